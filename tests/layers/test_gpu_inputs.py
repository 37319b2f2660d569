"""What a step uploads, and where it is found: packed buffers, read back through their views."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.layers.attention import SequenceChunk
from interlace.layers.gpu.inputs import (
    NO_SLOT,
    Additions,
    BatchItem,
    InputBuffer,
    StepInputs,
    StepSize,
)
from interlace.layers.gpu.tables import NOTHING

LARGEST = StepSize(40, 6)
BLOCK_SIZE, NOBODY, MOST = 4, 9, 11
BUFFER = InputBuffer(LARGEST, MOST, torch.device("cpu"))
"""Shared by all examples: so each finds what the ones before have left there."""


def items_of(lengths: list[tuple[int, int]]) -> list[BatchItem]:
    """Chunks from so many tokens on, so many long; the host knows all tokens but every second
    request's last one."""
    items = []
    for row, (start, count) in enumerate(lengths):
        blocks = tuple(range(10 * row + 1, 10 * row + 11))
        known = np.arange(100 * row, 100 * row + count - row % 2)
        items.append(BatchItem(row, SequenceChunk(blocks, start, start + count), known))
    return items


chunks = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(lengths=chunks, more=st.tuples(st.integers(0, 4), st.integers(0, 3)), num=st.integers(0, 11))
def test_a_step_finds_its_numbers_and_padding(
    lengths: list[tuple[int, int]], more: tuple[int, int], num: int
) -> None:
    num_tokens, num_requests = sum(count for _, count in lengths), len(lengths)
    size = StepSize(num_tokens + more[0], min(num_requests + more[1], 6))
    places, ids = np.arange(num) * 3, np.arange(num) + 50
    given_additions = (places, ids) if num else (NOTHING, NOTHING)
    inputs, added = BUFFER.upload(items_of(lengths), size, BLOCK_SIZE, NOBODY, given_additions)
    check_tokens(inputs, lengths, num_tokens)
    check_requests(inputs, lengths, num_tokens)
    if not num:
        assert added is None
        return
    assert added is not None
    assert len(added.places) == len(added.block_ids) <= MOST
    seen = list(zip(added.places.tolist(), added.block_ids.tolist(), strict=True))
    right = list(zip(places.tolist(), ids.tolist(), strict=True))
    assert seen[:num] == right
    assert set(seen[num:]) <= {right[-1]}, "the last one again"


def check_tokens(inputs: StepInputs, lengths: list[tuple[int, int]], num_tokens: int) -> None:
    at = 0
    for row, (start, count) in enumerate(lengths):
        for i in range(count):
            is_known = i < count - row % 2
            position = start + i
            slot = (10 * row + 1 + position // BLOCK_SIZE) * BLOCK_SIZE + position % BLOCK_SIZE
            assert int(inputs.positions[at]) == position
            assert int(inputs.slots[at]) == slot
            assert int(inputs.sources[at]) == (NO_SLOT if is_known else row)
            assert not is_known or int(inputs.token_ids[at]) == 100 * row + i
            at += 1
    assert at == num_tokens
    assert set(inputs.slots[at:].tolist()) <= {NO_SLOT}
    assert set(inputs.sources[at:].tolist()) <= {NO_SLOT}


def check_requests(inputs: StepInputs, lengths: list[tuple[int, int]], num_tokens: int) -> None:
    count, behind = len(lengths), np.cumsum([n for _, n in lengths])
    padding = len(inputs.rows) - count
    assert inputs.rows.tolist() == [*range(count), *[NOBODY] * padding]
    assert inputs.last_tokens.tolist() == [*(behind - 1).tolist(), *[0] * padding]
    assert inputs.seq_lens.tolist() == [*(a + n for a, n in lengths), *[0] * padding]
    assert inputs.query_start_loc.tolist() == [0, *behind.tolist(), *[num_tokens] * padding]


@pytest.mark.parametrize(("num", "padded"), [(1, 1), (2, 2), (3, 4), (5, 8), (9, 11), (11, 11)])
def test_views_on_additions_are_made_for_few_counts(num: int, padded: int) -> None:
    numbers = np.arange(num)
    items = items_of([(0, 1)])
    size = StepSize(2, 1)
    _, first = BUFFER.upload(items, size, BLOCK_SIZE, NOBODY, (numbers, numbers))
    _, again = BUFFER.upload(items, size, BLOCK_SIZE, NOBODY, (numbers, numbers))
    assert isinstance(first, Additions)
    assert again is first
    assert len(first.places) == padded
