"""Paged, batched attention against a plain float64 twin; poisoned slots are never read.

All layouts of the pages give the same bits; workers that share the heads give the same answer.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.layers.attention import PagedAttention, SequenceChunk
from interlace.layers.attention_backend import KVCacheLayout
from interlace.layers.kv_pages import K, KVPages, V

BLOCK = 4
HEADS, KV_HEADS, DIM = 6, 2, 8


def _pages(
    num_blocks: int,
    dtype: torch.dtype = torch.float64,
    layout: KVCacheLayout = "NHD",
    cross_layers: bool = False,
    kv_heads: int = KV_HEADS,
) -> KVPages:
    return KVPages(
        num_layers=2,
        num_blocks=num_blocks,
        block_size=BLOCK,
        num_kv_heads=kv_heads,
        head_dim=DIM,
        dtype=dtype,
        device=torch.device("cpu"),
        layout=layout,
        cross_layers=cross_layers,
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


class Batch:
    """A random step over random KV, for pages of any layout or any share of the heads."""

    def __init__(self, spans: Sequence[tuple[int, int]], dtype: torch.dtype, seed: int) -> None:
        """`spans` are [start, end) of each request."""
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-end // BLOCK) for _, end in spans]
        free = list(range(1, sum(counts) + 1))
        random.Random(seed).shuffle(free)
        self.num_blocks = len(free) + 1
        self.chunks = [
            SequenceChunk([free.pop() for _ in range(count)], start, end)
            for count, (start, end) in zip(counts, spans, strict=True)
        ]
        self.dtype = dtype
        past = (2, self.num_blocks, 2, BLOCK, KV_HEADS, DIM)
        self.past = torch.randn(past, generator=generator).to(dtype)
        self.past[:, 0] = 0
        num_tokens = sum(end - start for start, end in spans)
        qkv = torch.randn(num_tokens, HEADS + 2 * KV_HEADS, DIM, generator=generator).to(dtype)
        # As the decoder gives them: views with gaps between the tokens.
        self.q, self.k, self.v = qkv.tensor_split((HEADS, HEADS + KV_HEADS), 1)

    def pages(
        self,
        layout: KVCacheLayout = "NHD",
        cross_layers: bool = False,
        heads: slice = slice(0, KV_HEADS),
    ) -> KVPages:
        """With the past of these KV heads."""
        count = heads.stop - heads.start
        pages = _pages(self.num_blocks, self.dtype, layout, cross_layers, count)
        for layer, past in zip(pages.layers, self.past, strict=True):
            layer.copy_(past[..., heads, :])
        return pages


batches = st.builds(
    lambda starts, dtype, seed: Batch([(s, s + n) for s, n in starts], dtype, seed),
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 2, 9])), min_size=1, max_size=6),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.integers(0, 10**6),
)


@settings(max_examples=40, deadline=None)
@given(batch=batches, piece_tokens=st.sampled_from([3, 64]))
def test_all_layouts_give_the_same_bits(batch: Batch, piece_tokens: int) -> None:
    layouts: tuple[KVCacheLayout, ...] = ("NHD", "HND")
    outs = []
    for way in itertools.product(layouts, (False, True)):
        pages = batch.pages(*way)
        attend = PagedAttention(pages, batch.chunks, HEADS, piece_tokens=piece_tokens)
        outs.append([attend(layer, batch.q, batch.k, batch.v) for layer in range(2)])
    for out in outs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(out, outs[0], strict=True))


TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 1e-2}
"""A sum's last bits depend on how BLAS splits it. That depends on how many heads the kernel can
deal out to threads (one head of one request runs outside of any team of threads), and on where a
thread's scratch memory begins; so a head alone can differ from the same head in company."""


@settings(max_examples=40, deadline=None)
@given(batch=batches, layout=st.sampled_from(["NHD", "HND"]), cross_layers=st.booleans())
def test_workers_that_share_the_heads_give_the_whole_answer(
    batch: Batch, layout: KVCacheLayout, cross_layers: bool
) -> None:
    whole = PagedAttention(batch.pages(), batch.chunks, HEADS)
    expected = whole(1, batch.q, batch.k, batch.v)
    group = HEADS // KV_HEADS
    attend: PagedAttention | None = None
    outs = []
    for worker in range(KV_HEADS):
        kv = slice(worker, worker + 1)
        pages = batch.pages(layout, cross_layers, kv)
        attend = attend.on(pages) if attend else PagedAttention(pages, batch.chunks, group)
        assert torch.equal(attend.slots, whole.slots)
        mine = slice(worker * group, (worker + 1) * group)
        outs.append(attend(1, batch.q[:, mine], batch.k[:, kv], batch.v[:, kv]))
        assert torch.equal(pages.layers[1][..., 0, :], _written(batch, worker))
    tolerance = TOLERANCE[batch.dtype]
    torch.testing.assert_close(torch.cat(outs, 1), expected, rtol=tolerance, atol=tolerance)


def _written(batch: Batch, kv_head: int) -> torch.Tensor:
    """What layer 1 holds of one KV head after the step."""
    pages = batch.past[1, ..., kv_head, :].clone()
    at = 0
    for chunk in batch.chunks:
        for position in range(chunk.start, chunk.end):
            page = pages[chunk.block_ids[position // BLOCK]]
            page[K, position % BLOCK] = batch.k[at, kv_head]
            page[V, position % BLOCK] = batch.v[at, kv_head]
            at += 1
    return pages
