"""Attention over paged KV for decode, chunked prefill and mixed batches: one entry point."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from interlace.layers.kernels.attention_kernels import attend_kernel, join_kernel
from interlace.layers.kernels.attention_plan import AttentionPlan, Tiles
from interlace.layers.kernels.toolchain import next_power_of_2


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
    - `window`: how many tokens each one sees, itself included; 0 for all before it.

    Padding is harmless: a request with length 0 reads no page and gets zeros for its rows, a
    request without rows does nothing, and rows behind the last request's are left alone. Slots that
    no row sees are not read. Asserted: that shapes and dtypes are the plan's.
    """
    _check(q, pages, block_table, seq_lens, query_start_loc, plan, out, workspace)
    tensors = (q, pages, block_table, seq_lens, query_start_loc, out, workspace)
    _pass(tensors, plan, scale, window, decode=True)
    if plan.chunk_splits:
        _pass(tensors, plan, scale, window, decode=False)
    return out


_Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _pass(
    tensors: _Tensors, plan: AttentionPlan, scale: float, window: int, *, decode: bool
) -> None:
    """Requests with one new token, or those with more."""
    q, pages, block_table, seq_lens, query_start_loc, out, workspace = tensors
    tiles = plan.decode if decode else plan.chunk
    splits = plan.decode_splits if decode else plan.chunk_splits
    items = plan.num_requests if decode else _num_tiles(plan)
    tokens = 1 if decode else plan.chunk_tokens
    shares = (plan.num_requests if decode else plan.num_tokens) * plan.num_heads * splits
    weight = workspace[shares * plan.head_dim :] if splits > 1 else workspace
    attend_kernel[plan.num_kv_heads, splits, items](
        q, pages, block_table, seq_lens, query_start_loc, out, workspace, weight,
        plan.num_requests, splits, window, scale * math.log2(math.e), block_table.stride(0),
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), *pages.stride()[:4],
        group=plan.group, head_dim=plan.head_dim, padded_dim=next_power_of_2(plan.head_dim),
        block_size=pages.shape[2], tokens=tokens, rows=tiles.rows, keys=tiles.keys,
        decode=decode, windowed=window > 0,
        precision="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if splits > 1:
        _join(tensors, plan, weight, tiles, window, splits=splits, tokens=tokens, decode=decode)


def _join(
    tensors: _Tensors,
    plan: AttentionPlan,
    weight: Tensor,
    tiles: Tiles,
    window: int,
    *,
    splits: int,
    tokens: int,
    decode: bool,
) -> None:
    """Join the shares of each query token."""
    _, _, _, seq_lens, query_start_loc, out, workspace = tensors
    items = plan.num_requests if decode else plan.num_tokens
    join_kernel[plan.num_heads, items](
        seq_lens, query_start_loc, out, workspace, weight, plan.num_requests, splits, window,
        out.stride(0), out.stride(1),
        head_dim=plan.head_dim, padded_dim=next_power_of_2(plan.head_dim), tokens=tokens,
        keys=tiles.keys, padded_splits=next_power_of_2(splits), decode=decode,
        num_warps=4,
    )  # fmt: skip


def _num_tiles(plan: AttentionPlan) -> int:
    """Enough for any split of the tokens among the requests: each wastes less than one tile."""
    return plan.num_tokens // plan.chunk_tokens + plan.num_requests


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
