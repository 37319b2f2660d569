"""Attention of requests with one new token: the keys of all are dealt out evenly to programs.

Each program works out the same schedule from the lengths: a request gets as many shares of about
equal size as its length asks for, and item i is the i-th share of all. So one long request among
short ones occupies the whole device, and the grid depends on no length.
"""

from __future__ import annotations

from interlace.layers.kernels.attention_parts import attend_tile, finished, joined
from interlace.layers.kernels.toolchain import Pointer, Scalar, Tile, constexpr, jit, tl


@jit()
def schedule(
    seq_lens: Pointer,
    query_start_loc: Pointer,
    num_requests: Scalar,
    window: Scalar,
    slots: constexpr,
    least: constexpr,
    keys: constexpr,
    padded_requests: constexpr,
) -> tuple[Tile, Tile, Tile, Tile, Tile]:
    """Of each request: its row, length, first key and shares, and the shares up to its end.

    A share is what each of `slots` programs would get, or more where requests are many (they fill
    the device anyway), and at least `least`. Requests without exactly one new token get none;
    padding gets one. The sum of all is at most `slots` and one for each request.
    """
    index = tl.arange(0, padded_requests)
    known = index < num_requests
    start = tl.load(query_start_loc + index, mask=known, other=0)
    end = tl.load(query_start_loc + index + 1, mask=known, other=0)
    length = tl.load(seq_lens + index, mask=known, other=0)
    begin = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    mine = known & (end - start == 1)
    span = tl.where(mine, length - begin // keys * keys, 0)
    mean = tl.cdiv(tl.sum(span, 0), slots)
    share = tl.maximum(mean + mean // (4 * slots) * num_requests, least)
    shares = tl.where(mine, tl.maximum(tl.cdiv(span, share), 1), 0)
    return start, length, begin, shares, tl.cumsum(shares, 0)


@jit()
def pick(values: Tile, which: Tile) -> Scalar:
    """The one value where `which` holds."""
    return tl.sum(tl.where(which, values, 0), 0)


@jit("num_requests", "window", "table_stride")
def decode_kernel(
    q: Pointer,
    pages: Pointer,
    block_table: Pointer,
    seq_lens: Pointer,
    query_start_loc: Pointer,
    out: Pointer,
    partial: Pointer,
    weight: Pointer,
    num_requests: Scalar,
    window: Scalar,
    scale: Scalar,
    table_stride: Scalar,
    q_token_stride: Scalar,
    q_head_stride: Scalar,
    out_token_stride: Scalar,
    out_head_stride: Scalar,
    page_stride: Scalar,
    half_stride: Scalar,
    slot_stride: Scalar,
    head_stride: Scalar,
    group: constexpr,
    head_dim: constexpr,
    padded_dim: constexpr,
    block_size: constexpr,
    rows: constexpr,
    keys: constexpr,
    slots: constexpr,
    least: constexpr,
    padded_requests: constexpr,
    precision: constexpr,
) -> None:
    """One KV head's query heads over one share of a request's keys.

    Grid: (kv heads, slots + requests).
    """
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    starts, lengths, begins, all_shares, after = schedule(
        seq_lens, query_start_loc, num_requests, window, slots, least, keys, padded_requests
    )
    if item >= tl.sum(all_shares, 0):
        return
    request = tl.sum((after <= item).to(tl.int32), 0)
    which = tl.arange(0, padded_requests) == request
    seq_len = pick(lengths, which)
    begin = pick(begins, which)
    shares = pick(all_shares, which)
    start = pick(starts, which)
    base = begin // keys * keys
    share = tl.cdiv(tl.cdiv(seq_len - base, shares), keys) * keys
    low = base + (item - pick(after, which) + shares) * share
    high = tl.minimum(low + share, seq_len)

    row = tl.arange(0, rows)
    dim = tl.arange(0, padded_dim)
    head = kv_head * group + row
    mask = (row < group)[:, None] & (dim < head_dim)[None, :]
    q_at = q + start.to(tl.int64) * q_token_stride + head * q_head_stride
    q_tile = tl.load(q_at[:, None] + dim[None, :], mask=mask, other=0.0)
    table = block_table + request.to(tl.int64) * table_stride
    k_pages = pages + kv_head * head_stride
    position = row * 0 + seq_len - 1
    acc = tl.zeros((rows, padded_dim), tl.float32)
    peak = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    for key_start in range(low, high, keys):
        acc, peak, total = attend_tile(
            acc, peak, total, q_tile, position, key_start, begin, high, window, scale,
            table, k_pages, k_pages + half_stride, page_stride, slot_stride,
            head_dim, padded_dim, block_size, keys, True, precision,  # noqa: FBT003
        )  # fmt: skip
    answer, log_weight = finished(acc, peak, total)
    if shares == 1:
        out_at = out + start.to(tl.int64) * out_token_stride + head * out_head_stride
        tl.store(out_at[:, None] + dim[None, :], answer.to(out.dtype.element_ty), mask=mask)
    else:
        at = item * (tl.num_programs(0) * group) + head
        tl.store(partial + at[:, None] * head_dim + dim[None, :], answer, mask=mask)
        tl.store(weight + at, log_weight, mask=row < group)


@jit("num_requests", "window")
def join_decode_kernel(
    seq_lens: Pointer,
    query_start_loc: Pointer,
    out: Pointer,
    partial: Pointer,
    weight: Pointer,
    num_requests: Scalar,
    window: Scalar,
    out_token_stride: Scalar,
    out_head_stride: Scalar,
    head_dim: constexpr,
    padded_dim: constexpr,
    keys: constexpr,
    slots: constexpr,
    least: constexpr,
    padded_requests: constexpr,
) -> None:
    """Join the shares of one request and head, if it has several. Grid: (heads, requests)."""
    head = tl.program_id(0)
    request = tl.program_id(1)
    starts, _, _, all_shares, after = schedule(
        seq_lens, query_start_loc, num_requests, window, slots, least, keys, padded_requests
    )
    which = tl.arange(0, padded_requests) == request
    shares = pick(all_shares, which)
    if shares <= 1:
        return
    share = tl.arange(0, slots)
    item = pick(after, which) - shares + share
    dim = tl.arange(0, padded_dim)
    at = item * tl.num_programs(0) + head
    answer = joined(partial, weight, at, share < shares, dim, head_dim)
    start = pick(starts, which).to(tl.int64)
    out_at = out + start * out_token_stride + head * out_head_stride
    tl.store(out_at + dim, answer.to(out.dtype.element_ty), mask=dim < head_dim)
