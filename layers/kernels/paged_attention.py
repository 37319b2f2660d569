"""Attention over paged KV for decode, chunked prefill and mixed batches: one entry point."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from interlace.layers.kernels.attention_plan import AttentionPlan
from interlace.layers.kernels.chunk_kernels import chunk_kernel, join_chunk_kernel
from interlace.layers.kernels.decode_kernels import (
    decode_kernel,
    join_decode_kernel,
    schedule_kernel,
)
from interlace.layers.kernels.gathered_attention import (
    GatheredKeys,
    attend_gathered,
    gather_keys,
)
from interlace.layers.kernels.toolchain import size_class

LOG2_E = math.log2(math.e)
_JOINED_HEADS = 8


def schedule_decode(
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    plan: AttentionPlan,
    out: Tensor,
    window: int = 0,
) -> Tensor:
    """Deal out the keys of the step's requests: once for all layers with the same window.

    Arguments as for `paged_attention`; `out` is int32 of `plan.schedule_shape`, contiguous, and
    returned. Runs in a graph like the rest.
    """
    assert seq_lens.shape[0] == query_start_loc.shape[0] - 1 == plan.num_requests
    assert seq_lens.dtype == query_start_loc.dtype == out.dtype == torch.int32
    assert out.shape == plan.schedule_shape
    assert out.is_contiguous(), "rows of the schedule lie together"
    schedule_kernel[(out.shape[0],)](
        seq_lens, query_start_loc, out, plan.num_requests, plan.decode_items, window,
        max_shares=plan.max_shares, least=plan.least_share, keys=plan.decode.keys,
        padded_requests=size_class(plan.num_requests), num_warps=1,
    )  # fmt: skip
    return out


def paged_attention(
    q: Tensor,
    pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    plan: AttentionPlan,
    scale: float,
    out: Tensor,
    workspace: Tensor,
    schedule: Tensor | None = None,
    gathered: GatheredKeys | None = None,
    window: int = 0,
) -> Tensor:
    """Let each query token see its own request's tokens up to itself. Returns `out`.

    - `q` and `out`: [T, heads, head_dim], one floating dtype; the last dimension contiguous. They
      must not overlap.
    - `pages`: a layer's pages, logically [num_blocks, 2, block_size, kv_heads, head_dim], in any
      order of strides whose last is 1; the new tokens' K and V are in them already.
    - `block_table`: int32 [B, any], contiguous rows; `seq_lens`: int32 [B], tokens of each request,
      the new ones included; `query_start_loc`: int32 [B + 1], never falling: request b's new tokens
      are rows [query_start_loc[b], query_start_loc[b + 1]) of `q`.
    - `workspace`: float32, at least `plan.workspace_numel` numbers, whose content does not matter.
    - `schedule`: from `schedule_decode` with these lengths, plan and window. One serves all layers
      of a step; without it, each call makes its own in the workspace.
    - `gathered`: where a plan that `is_gathered` puts keys; with `starts` from `place_keys`, once
      for all layers. Such a plan knows no window.
    - `window`: how many tokens each one sees, itself included; 0 for all before it.

    Padding is harmless: a request with length 0 reads no page and gets zeros for its rows, a
    request without rows does nothing, and rows behind the last request's are left alone. Slots that
    no row sees are not read. Asserted: that shapes and dtypes are the plan's.
    """
    _check(q, pages, block_table, seq_lens, query_start_loc, plan, out, workspace)
    if schedule is None and plan.decode_items:
        place = _schedule_place(workspace, plan)
        schedule = schedule_decode(seq_lens, query_start_loc, plan=plan, out=place, window=window)
    step = _Step(q, pages, block_table, seq_lens, query_start_loc, out, workspace)
    if schedule is not None and plan.decode_items:
        assert schedule.shape == plan.schedule_shape, "the schedule is the plan's"
        assert schedule.dtype == torch.int32
        _decode(step, schedule, plan, scale, window)
    if plan.chunk_splits:
        _chunks(step, plan, scale, window, gathered)
    return out


class _Step(NamedTuple):
    """The tensors of a call."""

    q: Tensor
    pages: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    out: Tensor
    workspace: Tensor

    @property
    def strides(self) -> tuple[int, ...]:
        """Of the block table's rows, of Q, of the answers, of the pages."""
        return (
            self.block_table.stride(0),
            *self.q.stride()[:2],
            *self.out.stride()[:2],
            *self.pages.stride()[:4],
        )

    @property
    def precision(self) -> str:
        """What float32 products are computed in; 16-bit ones know no other way."""
        return "ieee" if self.q.dtype == torch.float32 else "tf32"


def _decode(step: _Step, schedule: Tensor, plan: AttentionPlan, scale: float, window: int) -> None:
    """Requests with one new token."""
    tiles, items = plan.decode, plan.decode_items
    weight = step.workspace[items * plan.num_heads * plan.head_dim :]
    decode_kernel[plan.num_kv_heads, items](
        step.q, step.pages, step.block_table, schedule, step.out, step.workspace, weight,
        window, scale * LOG2_E, *step.strides,
        group=plan.group, head_dim=plan.head_dim, padded_dim=plan.padded_dim,
        block_size=step.pages.shape[2], rows=tiles.rows, keys=tiles.keys,
        precision=step.precision, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if plan.max_shares > 1:
        join_decode_kernel[plan.num_heads, plan.num_requests](
            schedule, step.out, step.workspace, weight, items, *step.out.stride()[:2],
            head_dim=plan.head_dim, padded_dim=plan.padded_dim, max_shares=plan.max_shares,
            num_warps=4,
        )  # fmt: skip


def _chunks(
    step: _Step, plan: AttentionPlan, scale: float, window: int, gathered: GatheredKeys | None
) -> None:
    """Requests with several new tokens."""
    tiles, splits = plan.chunk, plan.chunk_splits
    weight = step.workspace[plan.num_tokens * splits * plan.num_heads * plan.head_dim :]
    if plan.is_gathered:
        assert gathered is not None, "there is room for what the plan gathers"
        assert window == 0, "gathered keys are seen by all that come behind them"
        gather_keys(step.pages, step.block_table, step.seq_lens, gathered)
        attend_gathered(
            step.q, gathered, step.seq_lens, step.query_start_loc,
            plan=plan, scale=scale * LOG2_E, out=step.out, workspace=step.workspace,
            weight=weight, precision=step.precision,
        )  # fmt: skip
    else:
        chunk_kernel[plan.num_kv_heads, splits, plan.num_chunk_tiles](
            step.q, step.pages, step.block_table, step.seq_lens, step.query_start_loc, step.out,
            step.workspace, weight, plan.num_requests, splits, window, scale * LOG2_E,
            *step.strides,
            group=plan.group, head_dim=plan.head_dim, padded_dim=plan.padded_dim,
            block_size=step.pages.shape[2], tokens=plan.chunk_tokens, rows=tiles.rows,
            keys=tiles.keys, windowed=window > 0, precision=step.precision,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
    if splits > 1:
        join_chunk_kernel[-(-plan.num_heads // _JOINED_HEADS), plan.num_tokens](
            step.seq_lens, step.query_start_loc, step.out, step.workspace, weight,
            plan.num_requests, plan.num_heads, splits, window, *step.out.stride()[:2],
            head_dim=plan.head_dim, padded_dim=plan.padded_dim, tokens=plan.chunk_tokens,
            keys=tiles.keys, heads=_JOINED_HEADS, num_warps=4,
        )  # fmt: skip


def _schedule_place(workspace: Tensor, plan: AttentionPlan) -> Tensor:
    """The last numbers of the workspace that the plan asks for, as integers."""
    rows, width = plan.schedule_shape
    end = plan.workspace_numel
    return workspace[end - rows * width : end].view(torch.int32).view(rows, width)


def _check(
    q: Tensor,
    pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    plan: AttentionPlan,
    out: Tensor,
    workspace: Tensor,
) -> None:
    rows = (plan.num_tokens, plan.num_heads, plan.head_dim)
    assert q.shape == out.shape == rows, "q and out are the plan's"
    assert pages.shape[1] == 2, "pages hold K and V"
    assert pages.shape[3:] == (plan.num_kv_heads, plan.head_dim), "pages are the plan's"
    assert q.dtype == pages.dtype == out.dtype, "one dtype"
    assert q.stride(2) == pages.stride(4) == out.stride(2) == 1, "heads are contiguous"
    assert block_table.stride(1) == 1, "rows of the block table are contiguous"
    assert block_table.shape[0] == seq_lens.shape[0] == plan.num_requests, "requests are the plan's"
    assert query_start_loc.shape[0] == plan.num_requests + 1
    assert block_table.dtype == seq_lens.dtype == query_start_loc.dtype == torch.int32
    assert workspace.dtype == torch.float32, "partial answers are float32"
    assert workspace.numel() >= plan.workspace_numel, "the workspace holds the partial answers"
