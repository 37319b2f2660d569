"""Paged attention under Triton's interpreter, against a float64 twin; NaN where nobody may look."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import AttentionCase, Heads

from interlace.layers.attention_backend import KVCacheLayout
from interlace.layers.kernels.attention_plan import HEAD_SIZES, AttentionPlan, plan_attention
from interlace.layers.kernels.toolchain import INTERPRETED

interpreted = pytest.mark.skipif(not INTERPRETED, reason="set TRITON_INTERPRET=1 to run these")

PADDING = (-1, 1)
"""A request of length 0 with one row."""


@interpreted
@settings(max_examples=12, deadline=None)
@given(
    spans=st.lists(
        st.one_of(
            st.tuples(st.integers(0, 150), st.just(1)),
            st.tuples(st.integers(0, 90), st.sampled_from([2, 3, 17])),
            st.sampled_from([PADDING, (-1, 3), (-1, 0)]),
        ),
        min_size=1,
        max_size=4,
    ),
    heads=st.sampled_from([Heads(2, 1, 64), Heads(6, 2, 64), Heads(2, 2, 80), Heads(4, 1, 96)]),
    shares=st.sampled_from([(0, 1, 1), (3, 4, 1), (1, 2, 2), (12, 16, 3)]),
    window=st.sampled_from([0, 0, 1, 40]),
    block_size=st.sampled_from([4, 16, 24]),
    seed=st.integers(0, 1000),
)
def test_mixed_batches_equal_the_twin(
    spans: list[tuple[int, int]],
    heads: Heads,
    shares: tuple[int, int, int],
    window: int,
    block_size: int,
    seed: int,
) -> None:
    case = AttentionCase.random(
        spans, heads, dtype=torch.float32, seed=seed, block_size=block_size, spare_rows=seed % 3
    )
    plan = case.plan()
    more_items, max_shares, splits = shares
    plan = case.plan(
        decode_items=len(spans) + more_items,
        max_shares=max_shares,
        chunk_splits=splits if plan.chunk_splits else 0,
    )
    case.check(plan, window)


@interpreted
@pytest.mark.parametrize("head_dim", HEAD_SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_head_size_in_every_pass(head_dim: int, dtype: torch.dtype) -> None:
    spans = [(130, 1), (3, 5), PADDING]
    case = AttentionCase.random(spans, Heads(2, 1, head_dim), dtype=dtype)
    case.check(case.plan(decode_items=6, max_shares=4, chunk_splits=1))


@interpreted
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("cross_layers", [False, True])
def test_all_layouts_of_the_pages_give_the_same_bits(
    layout: KVCacheLayout, cross_layers: bool
) -> None:
    spans, heads = [(40, 1), (9, 4)], Heads(4, 2, 64)
    plain = AttentionCase.random(spans, heads, dtype=torch.float32)
    case = AttentionCase.random(
        spans, heads, dtype=torch.float32, layout=layout, cross_layers=cross_layers
    )
    assert torch.equal(case.run(case.plan()), plain.run(plain.plan()))


@interpreted
def test_a_long_context_is_split_and_joined() -> None:
    case = AttentionCase.random([(2500, 1), (1, 1)], Heads(2, 1, 64), dtype=torch.float32)
    case.check(case.plan(decode_items=17, max_shares=16))


@interpreted
def test_the_grid_does_not_depend_on_lengths() -> None:
    """A plan for a captured size serves any lengths: padding, short and long ones."""
    for spans in (
        [(300, 1), PADDING, PADDING],
        [(0, 1), (1, 1), (62, 1)],
        [(-1, 0)] * 2 + [(5, 1)],
    ):
        case = AttentionCase.random(spans, Heads(2, 1, 64), dtype=torch.float32, spare_rows=3)
        plan = plan_attention(
            num_tokens=case.q.shape[0],
            num_requests=3,
            max_query_len=1,
            max_seq_len=512,
            num_heads=2,
            num_kv_heads=1,
            head_dim=64,
            dtype=torch.float32,
            num_sms=4,
        )
        assert plan.max_shares == 8
        case.check(plan)


@interpreted
def test_each_request_has_shares_by_its_length() -> None:
    """One long request among many short ones: only it is split, and all keys are seen once."""
    spans = [(700, 1)] + [(3, 1)] * 6 + [PADDING]
    case = AttentionCase.random(spans, Heads(2, 1, 64), dtype=torch.float32)
    case.check(case.plan(decode_items=11, max_shares=8))


@interpreted
def test_a_schedule_made_once_gives_the_same_bits() -> None:
    spans = [(200, 1), (30, 1), PADDING, (-1, 0), (4, 3)]
    case = AttentionCase.random(spans, Heads(2, 1, 64), dtype=torch.float32)
    plan = case.plan(decode_items=7, max_shares=4)
    schedule = case.schedule(plan)
    assert torch.equal(case.run(plan, schedule=schedule), case.run(plan))


@interpreted
@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=4),
    more_items=st.integers(0, 8),
    window=st.sampled_from([0, 500]),
)
def test_the_schedule_covers_every_key_once_in_even_shares(
    lengths: list[int], more_items: int, window: int
) -> None:
    spans = [(length - 1, 1) for length in lengths]
    case = AttentionCase.random(spans, Heads(1, 1, 8), dtype=torch.float32)
    plan = case.plan(decode_items=len(spans) + more_items, max_shares=8)
    rows = case.schedule(plan, window).tolist()
    items, requests = rows[: plan.decode_items], rows[plan.decode_items :]
    taken = 0
    for request, length in enumerate(lengths):
        start, first, shares = requests[request][:3]
        assert start == request
        assert first == taken
        assert 1 <= shares <= 8
        begin = max(0, length - window) if window else 0
        at = begin // plan.decode.keys * plan.decode.keys
        for item in items[first : first + shares]:
            assert item[:4] == [request, request, length, begin]
            assert item[4] == at or at >= length, "shares adjoin"
            assert item[6] == shares
            at = max(at, item[5])
        assert at == length or not length
        taken += shares
    assert taken <= plan.decode_items
    assert all(item[6] == 0 for item in items[taken:])


def _plan(num_tokens: int, max_query_len: int, max_seq_len: int) -> AttentionPlan:
    return plan_attention(
        num_tokens=num_tokens,
        num_requests=1 if max_query_len > 1 else num_tokens,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        dtype=torch.bfloat16,
        num_sms=132,
    )


@pytest.mark.parametrize(("max_seq_len", "shares"), [(8192, 32), (128, 1)])
def test_short_contexts_need_no_join(max_seq_len: int, shares: int) -> None:
    plan = _plan(8, 1, max_seq_len)
    assert plan.max_shares == shares
    assert plan.chunk_splits == 0
    partial = plan.workspace_numel - plan.schedule_shape[0] * plan.schedule_shape[1]
    assert (partial > 0) == (shares > 1)


@pytest.mark.parametrize(("tokens", "splits"), [(16, 16), (128, 4), (8192, 1)])
def test_short_chunks_share_long_contexts(tokens: int, splits: int) -> None:
    assert _plan(tokens, tokens, 16384).chunk_splits == splits
