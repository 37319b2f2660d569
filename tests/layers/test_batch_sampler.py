"""The batched sampler gives its twin's tokens, row by row, whatever else is in the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interlace.engine.sampling_params import SamplingParams
from interlace.layers.batch_sampler import Draw, draw_tokens, fits
from interlace.layers.sampler import SamplingRow, sample


def make_row(seed: int, num_output: int, **params: Any) -> SamplingRow:
    return SamplingRow(
        req_id=f"r{seed}-{num_output}",
        params=SamplingParams(**params),
        seed=seed,
        prompt_token_ids=np.array([1, 2], dtype=np.int64),
        output_token_ids=np.arange(num_output, dtype=np.int64),
        stop_token_ids=frozenset({3}),
    )


def batched(logits: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    draws = [
        Draw.of(i, row.params, row.seed, len(row.output_token_ids)) for i, row in enumerate(rows)
    ]
    token_ids = logits.max(-1).indices
    drawn = [draw for draw in draws if draw is not None]
    if drawn:
        places = torch.tensor([draw.place for draw in drawn])
        token_ids[places] = draw_tokens(logits[places], drawn)
    return token_ids.tolist()


rows_of = st.builds(
    make_row,
    seed=st.integers(0, 2**64 - 1),
    num_output=st.integers(0, 50),
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.5, 1e6]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, 39, 40, 1000]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 40, 300]), st.lists(rows_of, min_size=1))
def test_tokens_are_those_of_the_twin(seed: int, size: int, rows: list[SamplingRow]) -> None:
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), size, generator=random) * 3
    if seed % 3 == 0:
        logits = logits.round()  # many equals
    assert batched(logits, rows) == sample(logits, rows).token_ids


@given(st.lists(rows_of, min_size=2))
def test_a_row_depends_on_itself_alone(rows: list[SamplingRow]) -> None:
    logits = torch.randn(len(rows), 60, generator=torch.Generator().manual_seed(1))
    together = batched(logits, rows)
    assert [batched(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)] == together


@pytest.mark.parametrize(
    ("fitting", "params"),
    [
        (True, {}),
        (True, {"temperature": 0.0}),
        (True, {"top_k": 3, "top_p": 0.5, "min_p": 0.1}),
        (False, {"logprobs": 0}),
        (False, {"logit_bias": {1: 2.0}}),
        (False, {"repetition_penalty": 1.1}),
        (False, {"presence_penalty": 0.1}),
        (False, {"frequency_penalty": 0.1}),
        (False, {"min_tokens": 1}),
    ],
)
def test_rows_that_need_more_are_told_apart(fitting: bool, params: dict[str, Any]) -> None:
    assert fits(SamplingParams(**params), 0) is fitting


def test_a_mask_that_has_ended_needs_no_more() -> None:
    assert not fits(SamplingParams(min_tokens=4), 3)
    assert fits(SamplingParams(min_tokens=4), 4)
