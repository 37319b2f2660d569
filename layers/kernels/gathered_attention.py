"""Attention of long chunks over gathered keys: pages are copied together, and read as whole tiles.

A program that picks the tokens of its tile out of pages computes 330 TFLOP/s at most, since every
thread works out addresses. Of contiguous keys the tensor memory accelerator fetches a tile at a
time, and the same program comes to 570. Gathering 8,900 tokens takes 25 us of that.

All of it depends on shapes alone and reads lengths on the device, so it can be captured. Each
request that computes several tokens has a span of the room, whose length is rounded up to
`KEY_GRAIN`; what lies behind its last token there is zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from interlace.layers.kernels.attention_parts import (
    attend_tile_of_all,
    finished,
    stored_tile,
)
from interlace.layers.kernels.attention_plan import KEY_GRAIN, AttentionPlan
from interlace.layers.kernels.chunk_kernels import find_request, find_tile, visible_keys
from interlace.layers.kernels.toolchain import (
    Pointer,
    Scalar,
    constexpr,
    descriptor,
    jit,
    next_power_of_2,
    size_class,
    tl,
)

_TOKENS = 32
"""Gathered at a time; divides `KEY_GRAIN`."""
_GATHER_PROGRAMS = 64
"""For each KV head and half: a fixed grid, whatever the lengths and the room."""


@dataclasses.dataclass(frozen=True, slots=True)
class KeyRoom:
    """Where the keys and values of a step's long chunks lie while a layer attends.

    One serves all layers and steps of a runner, since no two compute at once.
    """

    keys: Tensor
    """[kv_heads, capacity, padded_dim], contiguous; behind `head_dim` zeros."""
    values: Tensor

    @classmethod
    def allocate(
        cls,
        *,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KeyRoom:
        """For spans of `capacity` tokens in all, rounded up to `KEY_GRAIN`."""
        shape = (num_kv_heads, _rounded(capacity), max(16, next_power_of_2(head_dim)))
        return cls(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))

    @property
    def capacity(self) -> int:
        """Tokens, in spans."""
        return self.keys.shape[1]

    def holds(self, lengths: Iterable[int]) -> bool:
        """Whether requests of these lengths fit beside each other."""
        return sum(map(_rounded, lengths)) <= self.capacity


class GatheredKeys(NamedTuple):
    """The room as one step divides it."""

    room: KeyRoom
    starts: Tensor
    """int32 [B + 1]: where each request's span begins; the end of the last one."""


@jit("num_requests")
def place_kernel(
    seq_lens: Pointer,
    query_start_loc: Pointer,
    starts: Pointer,
    num_requests: Scalar,
    grain: constexpr,
    padded_requests: constexpr,
) -> None:
    """Give a span to each request with several new tokens. One program."""
    request = tl.arange(0, padded_requests)
    real = request < num_requests
    begin = tl.load(query_start_loc + request, mask=real, other=0)
    count = tl.load(query_start_loc + request + 1, mask=real, other=0) - begin
    length = tl.load(seq_lens + request, mask=real, other=0)
    span = tl.where(count > 1, tl.cdiv(length, grain) * grain, 0)
    end = tl.cumsum(span, 0)
    tl.store(starts + request, end - span, mask=real)
    tl.store(starts + request + 1, end, mask=request == num_requests - 1)


@jit("num_requests", "table_stride", "capacity")
def gather_kernel(
    pages: Pointer,
    block_table: Pointer,
    seq_lens: Pointer,
    starts: Pointer,
    keys: Pointer,
    values: Pointer,
    num_requests: Scalar,
    capacity: Scalar,
    table_stride: Scalar,
    page_stride: Scalar,
    half_stride: Scalar,
    slot_stride: Scalar,
    head_stride: Scalar,
    head_dim: constexpr,
    padded_dim: constexpr,
    block_size: constexpr,
    tokens: constexpr,
) -> None:
    """Copy K or V of one head into all spans, zeros behind each request's last token.

    Grid: (any number, kv heads, 2).
    """
    head = tl.program_id(1)
    half = tl.program_id(2)
    dim = tl.arange(0, padded_dim)
    narrow = (dim < head_dim)[None, :]
    out = keys
    if half == 1:
        out = values
    out += head.to(tl.int64) * capacity * padded_dim
    source = pages + half * half_stride + head * head_stride
    # Never more than there is room for, whatever was promised.
    total = tl.minimum(tl.load(starts + num_requests), capacity)
    for item in range(tl.program_id(0), total // tokens, tl.num_programs(0)):
        request = find_request(item * tokens, starts, num_requests, 0)
        place = item * tokens + tl.arange(0, tokens)
        token = place - tl.load(starts + request)
        present = token < tl.load(seq_lens + request)
        row = block_table + request.to(tl.int64) * table_stride
        block = tl.load(row + token // block_size, mask=present, other=0).to(tl.int64)
        at = source + (block * page_stride + token % block_size * slot_stride)[:, None]
        kept = tl.load(at + dim[None, :], mask=present[:, None] & narrow, other=0.0)
        tl.store(out + place.to(tl.int64)[:, None] * padded_dim + dim[None, :], kept)


@jit("num_requests", "splits", "capacity")
def gathered_chunk_kernel(
    q: Pointer,
    keys_at: Pointer,
    values_at: Pointer,
    capacity: Scalar,
    starts: Pointer,
    seq_lens: Pointer,
    query_start_loc: Pointer,
    out: Pointer,
    partial: Pointer,
    weight: Pointer,
    num_requests: Scalar,
    splits: Scalar,
    scale: Scalar,
    q_token_stride: Scalar,
    q_head_stride: Scalar,
    out_token_stride: Scalar,
    out_head_stride: Scalar,
    group: constexpr,
    head_dim: constexpr,
    padded_dim: constexpr,
    tokens: constexpr,
    rows: constexpr,
    keys: constexpr,
    precision: constexpr,
) -> None:
    """As `chunk_kernel`, over gathered keys: `keys_at` and `values_at` describe the room as one
    matrix of rows. Grid: (kv heads, splits, tiles)."""
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    request, start, count, seq_len, first = find_tile(
        query_start_loc, seq_lens, num_requests, tokens
    )
    if (count <= 1) | (first >= count):
        return
    _, end, share = visible_keys(seq_len, count, first, 0, splits, tokens, keys)
    low = split * share
    high = tl.minimum(low + share, end)
    if (split > 0) & (low >= end):
        return

    row = tl.arange(0, rows)
    dim = tl.arange(0, padded_dim)
    token = row // group
    head = kv_head * group + row % group
    real = (token < tokens) & (first + token < count)
    position = seq_len - count + first + token
    mask = real[:, None] & (dim < head_dim)[None, :]
    at = (start + first).to(tl.int64) + token
    q_at = q + at * q_token_stride + head * q_head_stride
    q_tile = tl.load(q_at[:, None] + dim[None, :], mask=mask, other=0.0)

    span = kv_head * capacity + tl.load(starts + request)
    acc = tl.zeros((rows, padded_dim), tl.float32)
    peak = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    seen_by_all = tl.minimum(high, seq_len - count + first + 1)
    plain = low + tl.maximum(seen_by_all - low, 0) // keys * keys
    for key_start in range(low, plain, keys):
        acc, peak, total = attend_tile_of_all(
            acc, peak, total, q_tile, position, key_start, high, scale,
            keys_at, values_at, span, keys, False, precision,  # noqa: FBT003
        )  # fmt: skip
    for key_start in range(plain, high, keys):
        acc, peak, total = attend_tile_of_all(
            acc, peak, total, q_tile, position, key_start, high, scale,
            keys_at, values_at, span, keys, True, precision,  # noqa: FBT003
        )  # fmt: skip
    answer, log_weight = finished(acc, peak * scale, total)
    stored_tile(
        answer, log_weight, out, partial, weight, at, head, split, splits, end <= share,
        tl.num_programs(0) * group, real, mask, dim, out_token_stride, out_head_stride, head_dim,
    )  # fmt: skip


def place_keys(seq_lens: Tensor, query_start_loc: Tensor, *, out: Tensor) -> Tensor:
    """Divide the room for a step, once for all layers: fills and returns `out`, int32 [B + 1].

    Arguments as for `paged_attention`.
    """
    count = len(seq_lens)
    assert out.shape == query_start_loc.shape == (count + 1,)
    assert out.dtype == seq_lens.dtype == query_start_loc.dtype == torch.int32
    place_kernel[(1,)](
        seq_lens, query_start_loc, out, count,
        grain=KEY_GRAIN, padded_requests=size_class(count), num_warps=1,
    )  # fmt: skip
    return out


def gather_keys(
    pages: Tensor, block_table: Tensor, seq_lens: Tensor, gathered: GatheredKeys
) -> None:
    """Copy what the step's long chunks may see of a layer into the room.

    Promised: that the spans fit, see `KeyRoom.holds`; else what does not is left out.
    """
    _, _, block_size, num_kv_heads, head_dim = pages.shape
    room, starts = gathered
    assert room.keys.shape[0] == num_kv_heads, "the room is the pages'"
    assert room.keys.dtype == pages.dtype, "one dtype"
    gather_kernel[_GATHER_PROGRAMS, num_kv_heads, 2](
        pages, block_table, seq_lens, starts, room.keys, room.values,
        len(seq_lens), room.capacity, block_table.stride(0), *pages.stride()[:4],
        head_dim=head_dim, padded_dim=room.keys.shape[2], block_size=block_size,
        tokens=_TOKENS, num_warps=4,
    )  # fmt: skip


def attend_gathered(
    q: Tensor,
    gathered: GatheredKeys,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    plan: AttentionPlan,
    scale: float,
    out: Tensor,
    workspace: Tensor,
    weight: Tensor,
    precision: str,
) -> None:
    """Requests with several new tokens, by what `gather_keys` has put into the room: `scale` is of
    scores to the base 2. Partial answers and their weights go where the plan shares keys out."""
    tiles = plan.chunk
    (room, starts), width = gathered, gathered.room.keys.shape[2]
    keys_at, values_at = (
        descriptor(part.view(-1, width), (tiles.keys, width)) for part in (room.keys, room.values)
    )
    gathered_chunk_kernel[plan.num_kv_heads, plan.chunk_splits, plan.num_chunk_tiles](
        q, keys_at, values_at, room.capacity, starts, seq_lens, query_start_loc, out, workspace,
        weight, plan.num_requests, plan.chunk_splits, scale, *q.stride()[:2], *out.stride()[:2],
        group=plan.group, head_dim=plan.head_dim, padded_dim=width, tokens=plan.chunk_tokens,
        rows=tiles.rows, keys=tiles.keys, precision=precision,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


def _rounded(length: int) -> int:
    return -(-length // KEY_GRAIN) * KEY_GRAIN
