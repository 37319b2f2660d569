"""Whole rows: order of the rules, independence of the batch, errors that stay in their row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.engine.sampling_params import SamplingParams
from interlace.layers import logits_rules, sampler
from interlace.layers.random_draws import uniform
from interlace.layers.sampler import NO_TOKEN, SamplingRow, sample

steady = settings(derandomize=True, deadline=None, max_examples=100)
VOCAB = 16


def row(
    req_id: str = "r",
    *,
    seed: int = 0,
    prompt: tuple[int, ...] = (1, 2),
    output: tuple[int, ...] = (),
    stops: tuple[int, ...] = (),
    **params: Any,
) -> SamplingRow:
    params.setdefault("temperature", 0.0)
    return SamplingRow(
        req_id=req_id,
        params=SamplingParams(**params),
        seed=seed,
        prompt_token_ids=np.array(prompt, dtype=np.int64),
        output_token_ids=np.array(output, dtype=np.int64),
        stop_token_ids=frozenset(stops),
    )


def one(logits: list[float], the_row: SamplingRow) -> int:
    result = sample(torch.tensor([logits], dtype=torch.float32), [the_row])
    assert result.errors == {}
    return result.token_ids[0]


def test_no_rows() -> None:
    result = sample(torch.empty(0, VOCAB), [])
    assert (result.token_ids, result.logprobs, result.errors) == ([], [], {})


@pytest.mark.parametrize("size", [3, 17, 1000, 49152])
def test_greedy_takes_the_lowest_of_equal_ids(size: int) -> None:
    logits = torch.zeros(3, size)
    logits[1, size // 2 :] = 1.0
    logits[2, -1] = 1.0
    plain = [row(str(i)) for i in range(3)]
    assert sample(logits, plain).token_ids == [0, size // 2, size - 1]
    biased = [row(str(i), logit_bias={size + 5: 1.0}) for i in range(3)]
    assert sample(logits, biased).token_ids == [0, size // 2, size - 1]


def test_plain_greedy_rows_are_not_visited_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> torch.Tensor:
        raise AssertionError("a plain greedy row was copied")

    monkeypatch.setattr(sampler, "adjusted_logits", never)
    stops_over = row("c", min_tokens=1, output=(4,), stops=(5,))
    rows = [row("a"), row("b", top_k=3, top_p=0.5), stops_over]
    assert sample(torch.eye(3, VOCAB), rows).token_ids == [0, 1, 2]


def test_greedy_after_bias_mask_and_penalties() -> None:
    logits = [0.0, 1.0, 2.0, 3.0]
    assert one(logits, row(logit_bias={0: 3.5})) == 0
    assert one(logits, row(min_tokens=2, stops=(3,), output=(0,))) == 2
    assert one(logits, row(min_tokens=2, stops=(3,), output=(0, 0))) == 3
    assert one(logits, row(repetition_penalty=2.0, prompt=(3,))) == 2
    assert one(logits, row(repetition_penalty=2.0, prompt=(), output=(3,))) == 2
    assert one(logits, row(presence_penalty=1.5, prompt=(3,))) == 3
    assert one(logits, row(presence_penalty=1.5, output=(3,))) == 2
    assert one(logits, row(frequency_penalty=0.6, output=(3, 3))) == 2
    assert one(logits, row(frequency_penalty=0.6, output=(3,))) == 3


def test_a_bias_comes_before_the_mask_and_the_penalties() -> None:
    assert one([0.0, 1.0], row(min_tokens=1, stops=(0,), logit_bias={0: 100})) == 1
    # (-1 + 3) / 2 = 1 beats 0.5; the other way round, -1 * 2 + 3 = 1 ties, -1 / 2 + 3 is more.
    assert one([-1.0, 1.25], row(logit_bias={0: 3}, repetition_penalty=2.0, prompt=(0,))) == 1


def test_ids_that_the_vocabulary_does_not_have_are_ignored() -> None:
    wild = row(
        min_tokens=1,
        stops=(99,),
        logit_bias={77: 5.0},
        prompt=(1234,),
        repetition_penalty=1.5,
        presence_penalty=1.0,
    )
    assert one([0.0, 1.0, 0.5], wild) == 1


def oracle(logits: list[float], the_row: SamplingRow) -> int:
    """The same choice in plain Python, from weights of the whole vocabulary."""
    p = the_row.params
    top = max(logits)
    weights = [math.exp((x - top) / p.temperature) for x in logits]
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    order = [i for i in order if weights[i] >= p.min_p]
    order = order[: p.top_k] if p.top_k > 0 else order
    total = sum(weights[i] for i in order)
    count = next(
        n
        for n in range(1, len(order) + 1)
        if sum(weights[i] for i in order[:n]) >= p.top_p * total or n == len(order)
    )
    kept = sorted(order[:count])
    target = uniform(the_row.seed, len(the_row.output_token_ids)) * sum(weights[i] for i in kept)
    passed = 0.0
    for i in kept:
        passed += weights[i]
        if target < passed:
            return i
    return kept[-1]


@steady
@given(
    logits=st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=1, max_size=VOCAB),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.integers(0, VOCAB),
    top_p=st.floats(0.05, 1.0),
    min_p=st.sampled_from([0.0, 0.03, 0.4]),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 50),
)
def test_a_draw_against_the_oracle(
    logits: list[float],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    position: int,
) -> None:
    the_row = row(
        seed=seed,
        output=(0,) * position,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
    )
    assert one(logits, the_row) == oracle(logits, the_row)


def frequencies(logits: list[float], **params: Any) -> list[float]:
    """Share of each token over 2,000 output positions of one seed."""
    row_logits = torch.tensor(logits)
    positions = np.zeros(2000, dtype=np.int64)
    counts = [0] * len(logits)
    for position in range(2000):
        the_row = SamplingRow("r", SamplingParams(**params), 7, positions[:0], positions[:position])
        counts[sample(row_logits.unsqueeze(0), [the_row]).token_ids[0]] += 1
    return [n / 2000 for n in counts]


def test_frequencies_follow_the_probabilities() -> None:
    logits = [math.log(x) for x in (0.1, 0.2, 0.3, 0.4)]
    assert frequencies(logits) == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.035)
    assert frequencies(logits, top_k=2) == pytest.approx([0, 0, 3 / 7, 4 / 7], abs=0.035)
    hot = [math.sqrt(x) for x in (0.1, 0.2, 0.3, 0.4)]
    expected = [x / sum(hot) for x in hot]
    assert frequencies(logits, temperature=2.0) == pytest.approx(expected, abs=0.035)


def mixed_rows() -> list[SamplingRow]:
    return [
        row("greedy"),
        row("warm", seed=3, temperature=0.8, output=(4, 4, 2)),
        row("narrow", seed=3, temperature=1.5, top_k=5, top_p=0.9, logprobs=3),
        row("biased", logit_bias={2: 4.0, 9: -100}, logprobs=0),
        row("penal", seed=9, temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.5),
        row("short", seed=1, temperature=1.0, min_p=0.2, min_tokens=3, stops=(0, 1)),
    ]


@steady
@given(order=st.permutations(range(6)), size=st.integers(1, 6), seed=st.integers(0, 99))
def test_a_row_depends_on_nothing_else_in_the_batch(order: list[int], size: int, seed: int) -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    rows = mixed_rows()
    alone = [sample(logits[i : i + 1], [rows[i]]) for i in range(6)]
    chosen = order[:size]
    together = sample(logits[chosen], [rows[i] for i in chosen])
    assert together.token_ids == [alone[i].token_ids[0] for i in chosen]
    assert together.logprobs == [alone[i].logprobs[0] for i in chosen]


def test_logits_stay_as_they_are() -> None:
    for dtype in (torch.float32, torch.float64):
        logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0), dtype=dtype)
        before = logits.clone()
        assert sample(logits, mixed_rows()).errors == {}
        assert torch.equal(logits, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"logprobs": 2}])
def test_a_row_without_finite_logits_fails_alone(bad: float, params: dict[str, Any]) -> None:
    logits = torch.eye(3, VOCAB)
    logits[1, 5] = bad
    result = sample(logits, [row("a"), row("b", **params), row("c", temperature=1e-6)])
    assert result.token_ids == [0, NO_TOKEN, 2]
    assert result.logprobs == [None, None, None]
    assert list(result.errors) == ["b"]
    assert "no finite logits" in result.errors["b"]


def test_a_row_of_minus_infinity_fails_but_single_ones_do_not() -> None:
    logits = torch.full((2, VOCAB), -math.inf)
    logits[1, 3] = 0.0
    result = sample(logits, [row("a", temperature=1.0), row("b", temperature=1.0)])
    assert result.token_ids == [NO_TOKEN, 3]
    assert "no finite logits" in result.errors["a"]


def test_parameters_that_leave_nothing_fail_alone() -> None:
    everything = row("all", min_tokens=1, stops=tuple(range(VOCAB)))
    huge = row("huge", repetition_penalty=5e-324, prompt=(1,), temperature=1.0)
    result = sample(torch.eye(3, VOCAB), [everything, huge, row("ok", temperature=1e-6)])
    assert result.token_ids == [NO_TOKEN, NO_TOKEN, 2]
    assert set(result.errors) == {"all", "huge"}
    assert all("no token to choose" in message for message in result.errors.values())


def test_an_exception_belongs_to_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr(logits_rules, "add_bias_", fail)
    result = sample(torch.eye(2, VOCAB), [row("a", logit_bias={0: 1.0}), row("b")])
    assert result.token_ids == [NO_TOKEN, 1]
    assert result.errors == {"a": "sampling failed: ZeroDivisionError: boom"}


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(4))
    the_row = row(logit_bias={11: 100}, temperature=0.2, repetition_penalty=3.0, logprobs=3)
    found = sample(logits, [the_row]).logprobs[0]
    assert found is not None
    expected = torch.log_softmax(logits[0].double(), dim=0)
    order = logits[0].argsort(descending=True).tolist()
    assert found.token_id == 11
    assert found.logprob == pytest.approx(float(expected[11]))
    assert found.rank == order.index(11) + 1
    assert [i for i, _ in found.top] == order[:3]
    assert [x for _, x in found.top] == pytest.approx([float(expected[i]) for i in order[:3]])


def test_equal_logprobs_rank_by_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0]])
    result = sample(logits, [row(logit_bias={2: 9}, logprobs=4)]).logprobs[0]
    assert result is not None
    assert result.rank == 4
    assert [i for i, _ in result.top] == [1, 3, 0, 2]
    only = sample(logits, [row(logprobs=0)]).logprobs[0]
    assert only is not None
    assert (only.token_id, only.rank, only.top) == (1, 1, ())
    many = sample(logits, [row(logprobs=1024)]).logprobs[0]
    assert many is not None
    assert len(many.top) == 4
