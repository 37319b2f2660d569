"""Each rule against a slow oracle in plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.layers import logits_rules as rules

steady = settings(derandomize=True, deadline=None, max_examples=150)
# A coarse grid, so that equal values are common.
LOGITS = st.lists(st.integers(-6, 6).map(lambda n: n / 2), min_size=1, max_size=24)
IDS = st.lists(st.integers(-2, 30), max_size=12)


def row_of(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ids_of(values: list[int]) -> rules.IdArray:
    return np.array(values, dtype=np.int64)


def slow_weights(logits: list[float], temperature: float) -> list[float]:
    top = max(logits)
    return [math.exp((x - top) / temperature) for x in logits]


def slow_kept(weights: list[float], min_p: float, top_k: int, top_p: float) -> list[int]:
    """The rules as sentences: sort by (weight, id), then drop from the end."""
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    order = [i for i in order if weights[i] > 0 and weights[i] >= min_p]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1.0:
        total = sum(weights[i] for i in order)
        nucleus: list[int] = []
        while sum(weights[i] for i in nucleus) < top_p * total:
            nucleus.append(order[len(nucleus)])
        order = nucleus
    return sorted(order)


@steady
@given(
    logits=LOGITS,
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    top_k=st.integers(-1, 30),
    top_p=st.floats(0.01, 1.0),
)
def test_kept_tokens(
    logits: list[float], temperature: float, min_p: float, top_k: int, top_p: float
) -> None:
    weights = rules.relative_weights(row_of(logits), temperature)
    np.testing.assert_allclose(weights.numpy(), slow_weights(logits, temperature), rtol=1e-14)
    kept = rules.kept_tokens(weights, min_p, top_k, top_p).tolist()
    assert kept == slow_kept(weights.tolist(), min_p, top_k, top_p)
    assert logits.index(max(logits)) in kept


def test_equal_tokens_are_kept_from_the_lowest_id() -> None:
    weights = row_of([0.5, 1.0, 0.5, 1.0, 0.5])
    assert rules.kept_tokens(weights, 0.0, 1, 1.0).tolist() == [1]
    assert rules.kept_tokens(weights, 0.0, 3, 1.0).tolist() == [0, 1, 3]
    # Probabilities are 1/7, 2/7, 1/7, 2/7, 1/7.
    assert rules.kept_tokens(weights, 0.0, 0, 0.6).tolist() == [0, 1, 3]
    assert rules.kept_tokens(weights, 1.0, 0, 1.0).tolist() == [1, 3]


def test_top_p_counts_what_top_k_left() -> None:
    weights = row_of([1.0, 0.5, 0.5, 0.5, 0.5])
    # Alone, 1/3 of the probability; of the two that top-k leaves, 2/3.
    assert rules.kept_tokens(weights, 0.0, 0, 0.6).tolist() == [0, 1, 2]
    assert rules.kept_tokens(weights, 0.0, 2, 0.6).tolist() == [0]


def test_a_large_vocabulary_of_equals() -> None:
    weights = torch.ones(50_000, dtype=torch.float64)
    assert rules.kept_tokens(weights, 0.0, 40, 1.0).tolist() == list(range(40))
    assert rules.kept_tokens(weights, 0.0, 0, 0.25).tolist() == list(range(12_500))
    assert rules.kept_tokens(weights / 10, 0.0, 0, 1e-300).tolist() == [0]
    # Half of the probability is in one token, and top-p needs a quarter of the small ones.
    weights[777] = 49_999.0
    assert rules.kept_tokens(weights, 0.0, 0, 0.625).tolist() == list(range(12_501))


@pytest.mark.parametrize("temperature", [1e-6, 1e-300, 5e-324])
def test_a_tiny_temperature_leaves_the_largest_and_no_nan(temperature: float) -> None:
    row = row_of([1e4, -1e4, 1e4, -math.inf, 9999.0])
    weights = rules.relative_weights(row, temperature)
    assert weights.tolist() == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert rules.kept_tokens(weights, 0.0, 0, 1.0).tolist() == [0, 2]


@steady
@given(logits=LOGITS, bias=st.dictionaries(st.integers(0, 40), st.integers(-100, 100)))
def test_bias(logits: list[float], bias: dict[int, float]) -> None:
    row = row_of(logits)
    rules.add_bias_(row, bias)
    assert row.tolist() == [x + bias.get(i, 0.0) for i, x in enumerate(logits)]


@steady
@given(logits=LOGITS, ids=IDS)
def test_mask(logits: list[float], ids: list[int]) -> None:
    row = row_of(logits)
    rules.mask_(row, frozenset(ids))
    assert row.tolist() == [-math.inf if i in ids else x for i, x in enumerate(logits)]


@steady
@given(logits=LOGITS, prompt=IDS, output=IDS, penalty=st.sampled_from([0.5, 1.1, 2.0]))
def test_repetition_penalty(
    logits: list[float], prompt: list[int], output: list[int], penalty: float
) -> None:
    row = row_of(logits)
    rules.penalise_repetition_(row, ids_of(prompt), ids_of(output), penalty)
    expected = [
        x if i not in prompt + output else x / penalty if x > 0 else x * penalty
        for i, x in enumerate(logits)
    ]
    assert row.tolist() == expected


@steady
@given(
    logits=LOGITS,
    output=IDS,
    presence=st.sampled_from([-2.0, 0.0, 0.5]),
    frequency=st.sampled_from([-0.25, 0.0, 2.0]),
)
def test_presence_and_frequency(
    logits: list[float], output: list[int], presence: float, frequency: float
) -> None:
    row = row_of(logits)
    rules.penalise_output_(row, ids_of(output), presence, frequency)
    expected = [
        x - (presence + frequency * output.count(i) if i in output else 0.0)
        for i, x in enumerate(logits)
    ]
    assert row.tolist() == expected


def test_penalties_only_read_the_history() -> None:
    history = ids_of([3, 1, 1])
    history.flags.writeable = False
    row = torch.ones(5, dtype=torch.float64)
    rules.penalise_repetition_(row, history, history, 2.0)
    rules.penalise_output_(row, history, 0.5, 0.25)
    assert row.tolist() == [1.0, -0.5, 1.0, -0.25, 1.0]


@steady
@given(values=LOGITS, count=st.integers(1, 30))
def test_top_ids(values: list[float], count: int) -> None:
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    assert rules.top_ids(row_of(values), count).tolist() == sorted(order[:count])
    assert rules.ranked(row_of(values)).tolist() == order
