"""Attention of requests with several new tokens, in tiles of query tokens of one request."""

from __future__ import annotations

from interlace.layers.kernels.attention_parts import attend_tile, finished, stored_tile
from interlace.layers.kernels.toolchain import Pointer, Scalar, constexpr, jit, tl


@jit()
def find_request(
    item: Scalar, query_start_loc: Pointer, num_requests: Scalar, tokens: constexpr
) -> Scalar:
    """The request to which tile `item` belongs, where each has one tile too many at most.

    Request r's tiles of `tokens` tokens begin at `query_start_loc[r] // tokens + r`. With
    `tokens` 0 `item` is a token, and the answer is its request.
    """
    low = item * 0
    high = low + num_requests
    while low < high:
        middle = (low + high) // 2
        begin = tl.load(query_start_loc + middle)
        if tokens > 0:
            begin = begin // tokens + middle
        if begin <= item:
            low = middle + 1
        else:
            high = middle
    return low - 1


@jit()
def find_tile(
    query_start_loc: Pointer, seq_lens: Pointer, num_requests: Scalar, tokens: constexpr
) -> tuple[Scalar, Scalar, Scalar, Scalar, Scalar]:
    """What a program of a grid (.., .., tiles) computes; the last tiles, which see the most, begin
    first: the request, where its rows begin, their number, its length, the tile's first row."""
    item = tl.num_programs(2) - 1 - tl.program_id(2)
    request = find_request(item, query_start_loc, num_requests, tokens)
    start = tl.load(query_start_loc + request)
    count = tl.load(query_start_loc + request + 1) - start
    first = (item - start // tokens - request) * tokens
    return request, start, count, tl.load(seq_lens + request), first


@jit()
def visible_keys(
    seq_len: Scalar,
    count: Scalar,
    first: Scalar,
    window: Scalar,
    splits: Scalar,
    tokens: constexpr,
    keys: constexpr,
) -> tuple[Scalar, Scalar, Scalar]:
    """What query tokens [first, first + tokens) of `count` see: first key, end, keys per share.

    A request of length 0 is padding and sees nothing. Shares begin at multiples of `keys`.
    """
    context = seq_len - count
    end = tl.where(seq_len > 0, context + tl.minimum(first + tokens, count), 0)
    begin = tl.where(window > 0, tl.maximum(context + first + 1 - window, 0), 0)
    base = begin // keys * keys
    share = tl.cdiv(tl.cdiv(tl.maximum(end - base, 0), splits), keys) * keys
    return begin, end, share


@jit("num_requests", "splits", "window", "table_stride")
def chunk_kernel(
    q: Pointer,
    pages: Pointer,
    block_table: Pointer,
    seq_lens: Pointer,
    query_start_loc: Pointer,
    out: Pointer,
    partial: Pointer,
    weight: Pointer,
    num_requests: Scalar,
    splits: Scalar,
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
    tokens: constexpr,
    rows: constexpr,
    keys: constexpr,
    windowed: constexpr,
    precision: constexpr,
) -> None:
    """One KV head's query heads, one tile of one request's query tokens, one share of its keys.

    Grid: (kv heads, splits, tiles).
    """
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    request, start, count, seq_len, first = find_tile(
        query_start_loc, seq_lens, num_requests, tokens
    )
    if (count <= 1) | (first >= count):
        return
    begin, end, share = visible_keys(seq_len, count, first, window, splits, tokens, keys)
    base = begin // keys * keys
    low = base + split * share
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

    table = block_table + request.to(tl.int64) * table_stride
    k_pages = pages + kv_head * head_stride
    v_pages = k_pages + half_stride
    acc = tl.zeros((rows, padded_dim), tl.float32)
    peak = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    plain = low
    if not windowed:  # whole tiles that every row sees need no masks
        seen_by_all = tl.minimum(high, seq_len - count + first + 1)
        plain = low + tl.maximum(seen_by_all - low, 0) // keys * keys
        for key_start in range(low, plain, keys):
            acc, peak, total = attend_tile(
                acc, peak, total, q_tile, position, key_start, begin, high, window, scale,
                table, k_pages, v_pages, page_stride, slot_stride,
                head_dim, padded_dim, block_size, keys, False, precision,  # noqa: FBT003
            )  # fmt: skip
    for key_start in range(plain, high, keys):
        acc, peak, total = attend_tile(
            acc, peak, total, q_tile, position, key_start, begin, high, window, scale,
            table, k_pages, v_pages, page_stride, slot_stride,
            head_dim, padded_dim, block_size, keys, True, precision,  # noqa: FBT003
        )  # fmt: skip

    answer, log_weight = finished(acc, peak, total)
    stored_tile(
        answer, log_weight, out, partial, weight, at, head, split, splits, end - base <= share,
        tl.num_programs(0) * group, real, mask, dim, out_token_stride, out_head_stride, head_dim,
    )  # fmt: skip


@jit("num_requests", "num_heads", "splits", "window")
def join_chunk_kernel(
    seq_lens: Pointer,
    query_start_loc: Pointer,
    out: Pointer,
    partial: Pointer,
    weight: Pointer,
    num_requests: Scalar,
    num_heads: Scalar,
    splits: Scalar,
    window: Scalar,
    out_token_stride: Scalar,
    out_head_stride: Scalar,
    head_dim: constexpr,
    padded_dim: constexpr,
    tokens: constexpr,
    keys: constexpr,
    heads: constexpr,
) -> None:
    """Join the shares of some heads of one query token, if there are several.

    Grid: (head groups, tokens).
    """
    item = tl.program_id(1)
    request = find_request(item, query_start_loc, num_requests, 0)
    start = tl.load(query_start_loc + request)
    count = tl.load(query_start_loc + request + 1) - start
    seq_len = tl.load(seq_lens + request)
    token = item - start
    if (count <= 1) | (token >= count):
        return
    first = token // tokens * tokens
    begin, end, share = visible_keys(seq_len, count, first, window, splits, tokens, keys)
    span = end - begin // keys * keys
    if span <= share:
        return
    head = tl.program_id(0) * heads + tl.arange(0, heads)
    dim = tl.arange(0, padded_dim)
    real = head < num_heads
    mask = real[:, None] & (dim < head_dim)[None, :]
    at = (item.to(tl.int64) * num_heads + head) * splits
    acc = tl.zeros((heads, padded_dim), tl.float32)
    peak = tl.full((heads,), float("-inf"), tl.float32)
    total = tl.zeros((heads,), tl.float32)
    for split in range(tl.cdiv(span, share)):
        log_weight = tl.load(weight + at + split, mask=real, other=float("-inf"))
        part = tl.load(
            partial + (at + split)[:, None] * head_dim + dim[None, :], mask=mask, other=0.0
        )
        new_peak = tl.maximum(peak, log_weight)
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # nothing was seen yet
        factor = tl.exp2(log_weight - shift)
        shrink = tl.exp2(peak - shift)
        acc = acc * shrink[:, None] + part * factor[:, None]
        total = total * shrink + factor
        peak = new_peak
    answer, _ = finished(acc, peak, total)
    out_at = out + item.to(tl.int64) * out_token_stride + head * out_head_stride
    tl.store(out_at[:, None] + dim[None, :], answer.to(out.dtype.element_ty), mask=mask)
