"""Sums of pages, by the kernel under Triton's interpreter and by its twin: the store's checksum."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from interlace.connectors.slab_store.checksum import COLUMNS, checksum, factors
from interlace.layers.kernels.toolchain import INTERPRETED
from interlace.layers.page_sums import PageSums

NUM_BLOCKS = 7


def pages_of(num_layers: int, page_words: int, *, cross_layers: bool, high: bool) -> list[Tensor]:
    """Of float32; `high` bits are set in all words."""
    low = 0xF0000000 if high else 0
    words = np.random.default_rng(page_words).integers(
        low, 2**32, (NUM_BLOCKS, num_layers, page_words), np.uint32
    )
    memory = torch.from_numpy(words.view(np.int32)).view(torch.float32)
    layers = memory.unbind(1)
    return list(layers) if cross_layers else [pages.contiguous() for pages in layers]


def record(layers: list[Tensor], block: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.concatenate([pages[block].view(torch.uint8).numpy() for pages in layers])


def sums_over(layers: list[Tensor]) -> PageSums:
    num_words = len(layers) * layers[0][0].numel()
    return PageSums(layers, *factors(num_words // COLUMNS + 1))


@settings(max_examples=25, deadline=None)
@given(
    num_layers=st.integers(1, 4),
    page_words=st.sampled_from([1, 2, 48, 96, 1023, 1024, 1025, 1536, 2048]),
    cross_layers=st.booleans(),
    high=st.booleans(),
    seed=st.integers(0, 99),
)
def test_sums_of_pages_are_checksums_of_records(
    num_layers: int, page_words: int, *, cross_layers: bool, high: bool, seed: int
) -> None:
    layers = pages_of(num_layers, page_words, cross_layers=cross_layers, high=high)
    if not PageSums.can_sum(layers):  # odd words across layers
        return
    blocks = random.Random(seed).choices(range(NUM_BLOCKS), k=5)
    assert sums_over(layers).of(blocks).values().tolist() == [
        checksum(record(layers, block)) for block in blocks
    ]


@pytest.mark.skipif(not INTERPRETED, reason="set TRITON_INTERPRET=1 to run these")
def test_the_kernel_and_its_twin_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = pages_of(3, 1536, cross_layers=False, high=True)
    by_kernel = sums_over(layers).of(range(NUM_BLOCKS)).values().tolist()
    monkeypatch.setattr("interlace.layers.kernels.toolchain.runs_on", lambda device: False)
    assert sums_over(layers).of(range(NUM_BLOCKS)).values().tolist() == by_kernel


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_bit_makes_another_sum(dtype: torch.dtype) -> None:
    memory = torch.randint(0, 256, (2, 4, 2, 4, 2, 8 * dtype.itemsize), dtype=torch.uint8)
    layers = list(memory.view(dtype))
    sums = sums_over(layers)
    before = sums.of([1, 3]).values()
    memory[1, 3, 1, 2, 1, 5] ^= 0x80
    after = sums.of([1, 3]).values()
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_what_has_no_whole_words_is_not_summed() -> None:
    assert PageSums.can_sum([torch.zeros(4, 2, 6)])
    assert not PageSums.can_sum([torch.zeros(4, 3, dtype=torch.bfloat16)])
    assert not PageSums.can_sum([torch.zeros(4, 2), torch.zeros(4, 4)[:, :2]])
    assert not PageSums.can_sum([torch.zeros(41)[1:].view(10, 4), torch.zeros(10, 4)])
