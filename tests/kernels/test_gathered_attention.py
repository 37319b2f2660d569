"""Attention over gathered keys, interpreted, against a float64 twin; NaN where nobody may look."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import AttentionCase, Heads

from interlace.layers.kernels.attention_plan import (
    GATHERED_TOKENS,
    KEY_GRAIN,
    AttentionPlan,
    Tiles,
    plan_attention,
)
from interlace.layers.kernels.gathered_attention import KeyRoom, gather_keys
from interlace.layers.kernels.toolchain import INTERPRETED

interpreted = pytest.mark.skipif(not INTERPRETED, reason="set TRITON_INTERPRET=1 to run these")

PADDING = (-1, 3)
"""A request of length 0 with three rows."""


@interpreted
@settings(max_examples=12, deadline=None)
@given(
    spans=st.lists(
        st.one_of(
            st.tuples(st.integers(0, 150), st.just(1)),
            st.tuples(st.integers(0, 200), st.sampled_from([2, 3, 17, 40])),
            st.sampled_from([PADDING, (-1, 1), (-1, 0)]),
        ),
        min_size=1,
        max_size=4,
    ),
    heads=st.sampled_from([Heads(2, 1, 64), Heads(6, 2, 64), Heads(2, 2, 80), Heads(4, 1, 96)]),
    rows=st.sampled_from([16, 32]),
    keys=st.sampled_from([32, 128]),
    splits=st.sampled_from([1, 2, 3]),
    block_size=st.sampled_from([4, 16, 24]),
    seed=st.integers(0, 1000),
)
def test_mixed_batches_equal_the_twin(
    spans: list[tuple[int, int]],
    heads: Heads,
    rows: int,
    keys: int,
    splits: int,
    block_size: int,
    seed: int,
) -> None:
    case = AttentionCase.random(
        spans, heads, dtype=torch.float32, seed=seed, block_size=block_size, spare_rows=seed % 3
    )
    case.check(case.gathered_plan(Tiles(rows, keys, num_warps=4, num_stages=2), splits))


@interpreted
def test_each_request_has_a_span_and_zeros_behind_its_last_token() -> None:
    spans = [(5, 1), (130, 9), PADDING, (0, 3), (7, 1)]
    case = AttentionCase.random(spans, Heads(4, 2, 80), dtype=torch.float16)
    gathered = case.gathered()
    assert gathered.starts.tolist() == [0, 0, 256, 256, 384, 384]
    plan = case.gathered_plan(Tiles(16, 64, num_warps=4, num_stages=2), 1)
    tables = case.block_table
    gather_keys(case.pages, tables, case.seq_lens, gathered)
    for half, part in enumerate((gathered.room.keys, gathered.room.values)):
        for request, start, length in ((1, 0, 139), (3, 256, 3)):
            blocks = tables[request, : -(-length // 16)].long()
            tokens = case.pages[blocks, half].flatten(0, 1)[:length].transpose(0, 1)
            assert torch.equal(part[:, start : start + length, :80], tokens)
            end = start + -(-length // KEY_GRAIN) * KEY_GRAIN
            assert (part[:, start + length : end] == 0).all()
        assert (part[..., 80:] == 0).all()
    case.check(plan)


@interpreted
def test_what_does_not_fit_writes_nowhere_else() -> None:
    """Whoever breaks the promise gets wrong answers, and not somebody else's memory."""
    case = AttentionCase.random([(300, 9)], Heads(2, 1, 64), dtype=torch.float32)
    gathered = case.gathered()
    room = gathered.room
    wide = torch.full((1, 1024, 64), math.nan)
    small = KeyRoom(wide[:, :128], wide[:, 512:640])
    gather_keys(case.pages, case.block_table, case.seq_lens, gathered._replace(room=small))
    assert not wide[:, :128].isnan().any()
    assert not wide[:, 512:640].isnan().any()
    assert wide[:, 128:512].isnan().all()
    assert wide[:, 640:].isnan().all()
    assert not small.holds([309])
    assert room.holds([309])


def _plan(
    tokens: int, dtype: torch.dtype = torch.bfloat16, *, may_gather: bool = True
) -> AttentionPlan:
    return plan_attention(
        num_tokens=tokens,
        num_requests=1,
        max_query_len=tokens,
        max_seq_len=16384,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        dtype=dtype,
        num_sms=132,
        may_gather=may_gather,
    )


def test_long_chunks_of_16_bits_are_gathered_where_there_is_room() -> None:
    assert _plan(GATHERED_TOKENS).is_gathered
    assert not _plan(GATHERED_TOKENS - 1).is_gathered
    assert not _plan(8192, torch.float32).is_gathered
    assert not _plan(8192, may_gather=False).is_gathered


@pytest.mark.parametrize(
    ("tokens", "rows", "splits"), [(528, 64, 1), (688, 128, 3), (1984, 128, 1), (8192, 128, 1)]
)
def test_tiles_are_those_that_were_fastest_on_an_h200(tokens: int, rows: int, splits: int) -> None:
    plan = _plan(tokens)
    assert (plan.chunk.rows, plan.chunk_splits) == (rows, splits)


@given(
    tokens=st.integers(GATHERED_TOKENS, 9000),
    kv_heads=st.integers(1, 16),
    group=st.sampled_from([1, 3, 4, 8, 64]),
    head_dim=st.sampled_from([64, 80, 128]),
    num_sms=st.sampled_from([1, 108, 132]),
)
def test_any_gathered_plan_holds_its_rows(
    tokens: int, kv_heads: int, group: int, head_dim: int, num_sms: int
) -> None:
    plan = plan_attention(
        num_tokens=tokens,
        num_requests=3,
        max_query_len=tokens,
        max_seq_len=10_000,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=torch.float16,
        num_sms=num_sms,
        may_gather=True,
    )
    assert plan.is_gathered
    assert plan.chunk_tokens >= 1
    assert KEY_GRAIN % plan.chunk.keys == 0, "no tile crosses into another request's span"
    assert plan.num_chunk_tiles * plan.chunk_tokens >= tokens
