"""Paged, batched attention against a plain float64 twin; poisoned slots are never read."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.layers.attention import PagedAttention, SequenceChunk
from interlace.layers.kv_pages import K, KVPages, V

BLOCK = 4
HEADS, KV_HEADS, DIM = 6, 2, 8


def _pages(num_blocks: int, dtype: torch.dtype = torch.float64) -> KVPages:
    return KVPages(
        num_layers=2,
        num_blocks=num_blocks,
        block_size=BLOCK,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        dtype=dtype,
        device=torch.device("cpu"),
    )


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
    """One request: q [Q, HEADS, DIM] at positions start.., k and v [end, KV_HEADS, DIM]."""
    out = torch.empty_like(q)
    for i in range(q.shape[0]):
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            seen = start + i + 1
            scores = k[:seen, kv_head] @ q[i, head] / math.sqrt(DIM)
            out[i, head] = scores.softmax(0) @ v[:seen, kv_head]
    return out.reshape(q.shape[0], -1)


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=6),
    decodes=st.lists(st.integers(0, 40), max_size=6),
    piece_tokens=st.sampled_from([1, 3, 64]),
    seed=st.integers(0, 1000),
)
def test_mixed_batches_equal_the_plain_twin(
    shapes: list[tuple[int, int]], decodes: list[int], piece_tokens: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    spans = [(start, start + n) for start, n in shapes] + [(n, n + 1) for n in decodes]
    random.Random(seed).shuffle(spans)
    num_blocks = sum(-(-end // BLOCK) for _, end in spans) + 1
    pages = _pages(num_blocks)
    free = list(range(1, num_blocks))
    random.Random(seed).shuffle(free)
    for layer in pages.layers:
        layer[1:] = math.nan  # nothing but what is written, or zeroed on purpose, may count
    chunks, expected, q_parts, k_parts, v_parts = [], [], [], [], []
    for start, end in spans:
        blocks = [free.pop() for _ in range(-(-end // BLOCK))]
        pages.zero_blocks(blocks[-1:])
        q = torch.randn(end - start, HEADS, DIM, dtype=torch.float64, generator=generator)
        k = torch.randn(end, KV_HEADS, DIM, dtype=torch.float64, generator=generator)
        v = torch.randn(end, KV_HEADS, DIM, dtype=torch.float64, generator=generator)
        for position in range(start):
            page = pages.layers[1][blocks[position // BLOCK]]
            page[K, position % BLOCK] = k[position]
            page[V, position % BLOCK] = v[position]
        chunks.append(SequenceChunk(blocks, start, end))
        expected.append(_plain(q, k, v, start))
        q_parts.append(q)
        k_parts.append(k[start:])
        v_parts.append(v[start:])
    attend = PagedAttention(pages, chunks, HEADS, piece_tokens=piece_tokens)
    out = attend(1, torch.cat(q_parts), torch.cat(k_parts), torch.cat(v_parts))
    torch.testing.assert_close(out, torch.cat(expected))
    assert not pages.layers[1][0].any(), "the null block stays zero"


def test_writes_land_in_their_slots_and_nowhere_else() -> None:
    pages = _pages(4, torch.float32)
    slots = torch.tensor([2 * BLOCK + 1, 3 * BLOCK])
    k = torch.ones(2, KV_HEADS, DIM)
    v = torch.full((2, KV_HEADS, DIM), 2.0)
    pages.write(0, pages.kv_rows(slots), k, v)
    assert pages.layers[0][2, K, 1].eq(1).all()
    assert pages.layers[0][3, K, 0].eq(1).all()
    assert pages.layers[0][2, V, 1].eq(2).all()
    assert pages.layers[0].sum() == k.sum() + v.sum()
    assert not pages.layers[1].any()


@pytest.mark.parametrize("end", [BLOCK, BLOCK + 1])
def test_a_request_reads_blocks_that_another_fills_in_the_same_step(end: int) -> None:
    pages = _pages(4, torch.float64)
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(end + 1, KV_HEADS, DIM, dtype=torch.float64, generator=generator)
    v = torch.randn(end + 1, KV_HEADS, DIM, dtype=torch.float64, generator=generator)
    q = torch.randn(end + 1, HEADS, DIM, dtype=torch.float64, generator=generator)
    # The second request shares block 1, which the first one fills, and adds one token.
    chunks = [SequenceChunk([1, 2], 0, end), SequenceChunk([1, 3], BLOCK, BLOCK + 1)]
    out = PagedAttention(pages, chunks, HEADS)(0, q, k, v)
    past_k = torch.cat((k[:BLOCK], k[end:]))
    past_v = torch.cat((v[:BLOCK], v[end:]))
    torch.testing.assert_close(out[end:], _plain(q[end:], past_k, past_v, BLOCK))
