"""Attention of requests with one new token: the keys of all are dealt out evenly to programs.

A schedule is worked out from the lengths on the device, once a step: a request gets as many shares
of about equal size as its length asks for, and item i is the i-th share of all. So one long request
among short ones occupies the whole device, and no grid depends on a length. A row of the schedule
is 8 numbers. Of an item: its request's row of Q, block table and length, the first key it may see,
the keys of the share, the request's number of shares (0: no such item). Behind the items, of a
request: its row of Q, its first item and its number of shares.
"""

from __future__ import annotations

from interlace.layers.kernels.attention_parts import attend_tile, finished, joined
from interlace.layers.kernels.toolchain import Pointer, Scalar, Tile, constexpr, jit, tl


@jit()
def pick(values: Tile, which: Tile) -> Scalar:
    """The one value where `which` holds."""
    return tl.sum(tl.where(which, values, 0), 0)


@jit()
def shares_of(span: Tile, mine: Tile, share: Scalar) -> Tile:
    """Into how many shares of at most that many keys each request's are cut."""
    return tl.where(mine, tl.maximum(tl.cdiv(span, share), 1), 0)


@jit("num_requests", "num_items", "window")
def schedule_kernel(
    seq_lens: Pointer,
    query_start_loc: Pointer,
    schedule: Pointer,
    num_requests: Scalar,
    num_items: Scalar,
    window: Scalar,
    max_shares: constexpr,
    least: constexpr,
    keys: constexpr,
    padded_requests: constexpr,
) -> None:
    """One row of the schedule. Grid: (items + requests,).

    A share is as small as the number of items allows, but at least `least`, and no request has more
    than `max_shares`. Requests without exactly one new token get none; padding gets one.
    """
    row = tl.program_id(0)
    index = tl.arange(0, padded_requests)
    known = index < num_requests
    start = tl.load(query_start_loc + index, mask=known, other=0)
    stop = tl.load(query_start_loc + index + 1, mask=known, other=0)
    length = tl.load(seq_lens + index, mask=known, other=0)
    begin = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    mine = known & (stop - start == 1)
    span = tl.where(mine, length - begin // keys * keys, 0)
    longest = tl.max(span, 0)
    low_share = tl.maximum(tl.cdiv(longest, max_shares), least)
    high_share = tl.maximum(longest, low_share)  # one share for each request: they all fit
    while low_share < high_share:
        middle = (low_share + high_share) // 2
        if tl.sum(shares_of(span, mine, middle), 0) <= num_items:
            high_share = middle
        else:
            low_share = middle + 1
    shares = shares_of(span, mine, high_share)
    after = tl.cumsum(shares, 0)
    at = schedule + row * 8
    if row < num_items:
        request = tl.sum((after <= row).to(tl.int32), 0)
        which = index == request
        count = pick(shares, which)  # none for an item behind the last
        first_key = pick(begin, which)
        end = pick(length, which)
        base = first_key // keys * keys
        part = tl.cdiv(tl.cdiv(end - base, tl.maximum(count, 1)), keys) * keys
        low = base + (row - pick(after, which) + count) * part
        tl.store(at, pick(start, which))
        tl.store(at + 1, request)
        tl.store(at + 2, end)
        tl.store(at + 3, first_key)
        tl.store(at + 4, low)
        tl.store(at + 5, tl.minimum(low + part, end))
        tl.store(at + 6, count)
    else:
        which = index == row - num_items
        count = pick(shares, which)
        tl.store(at, pick(start, which))
        tl.store(at + 1, pick(after, which) - count)
        tl.store(at + 2, count)


@jit("window", "table_stride")
def decode_kernel(
    q: Pointer,
    pages: Pointer,
    block_table: Pointer,
    schedule: Pointer,
    out: Pointer,
    partial: Pointer,
    weight: Pointer,
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
    precision: constexpr,
) -> None:
    """One KV head's query heads over one share of a request's keys. Grid: (kv heads, items)."""
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    at = schedule + item * 8
    start = tl.load(at).to(tl.int64)
    request = tl.load(at + 1).to(tl.int64)
    seq_len = tl.load(at + 2)
    begin = tl.load(at + 3)
    low = tl.load(at + 4)
    high = tl.load(at + 5)
    shares = tl.load(at + 6)
    if shares == 0:
        return
    row = tl.arange(0, rows)
    dim = tl.arange(0, padded_dim)
    head = kv_head * group + row
    mask = (row < group)[:, None] & (dim < head_dim)[None, :]
    q_at = q + start * q_token_stride + head * q_head_stride
    q_tile = tl.load(q_at[:, None] + dim[None, :], mask=mask, other=0.0)
    table = block_table + request * table_stride
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
        out_at = out + start * out_token_stride + head * out_head_stride
        tl.store(out_at[:, None] + dim[None, :], answer.to(out.dtype.element_ty), mask=mask)
    else:
        place = item * (tl.num_programs(0) * group) + head
        tl.store(partial + place[:, None] * head_dim + dim[None, :], answer, mask=mask)
        tl.store(weight + place, log_weight, mask=row < group)


@jit("num_items")
def join_decode_kernel(
    schedule: Pointer,
    out: Pointer,
    partial: Pointer,
    weight: Pointer,
    num_items: Scalar,
    out_token_stride: Scalar,
    out_head_stride: Scalar,
    head_dim: constexpr,
    padded_dim: constexpr,
    max_shares: constexpr,
) -> None:
    """Join the shares of one request and head, if it has several. Grid: (heads, requests)."""
    head = tl.program_id(0)
    at = schedule + (num_items + tl.program_id(1)) * 8
    start = tl.load(at).to(tl.int64)
    first = tl.load(at + 1)
    shares = tl.load(at + 2)
    if shares <= 1:
        return
    share = tl.arange(0, max_shares)
    dim = tl.arange(0, padded_dim)
    place = (first + share) * tl.num_programs(0) + head
    answer = joined(partial, weight, place, share < shares, dim, head_dim)
    out_at = out + start * out_token_stride + head * out_head_stride
    tl.store(out_at + dim, answer.to(out.dtype.element_ty), mask=dim < head_dim)
