"""The two device functions of paged attention: attend, and join what several programs found.

Softmax runs online in base 2: `peak` is a row's largest score so far, `total` the sum of
exp2(score - peak), `acc` the sum of values with these weights. Slots that a row may not see are
masked where they are loaded and where they are scored: they may hold NaN, and NaN times 0 is NaN.
"""

from __future__ import annotations

from interlace.layers.kernels.toolchain import Pointer, Scalar, Tile, constexpr, jit, tl


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


@jit()
def attend_tile(
    acc: Tile,
    peak: Tile,
    total: Tile,
    q: Tile,
    position: Tile,
    key_start: Scalar,
    begin: Scalar,
    end: Scalar,
    window: Scalar,
    scale: Scalar,
    table: Pointer,
    k_pages: Pointer,
    v_pages: Pointer,
    page_stride: Scalar,
    slot_stride: Scalar,
    head_dim: constexpr,
    padded_dim: constexpr,
    block_size: constexpr,
    keys: constexpr,
    masked: constexpr,
    precision: constexpr,
) -> tuple[Tile, Tile, Tile]:
    """Take `keys` more keys from `key_start` on into account, all visible unless `masked`."""
    key = key_start + tl.arange(0, keys)
    dim = tl.arange(0, padded_dim)
    present = (key >= begin) & (key < end)
    if masked:
        block = tl.load(table + key // block_size, mask=present, other=0)
    else:
        block = tl.load(table + key // block_size)
    slot = block.to(tl.int64) * page_stride + (key % block_size) * slot_stride
    k_at = k_pages + slot[None, :] + dim[:, None]
    v_at = v_pages + slot[:, None] + dim[None, :]
    if masked:
        k = tl.load(k_at, mask=present[None, :] & (dim < head_dim)[:, None], other=0.0)
        v = tl.load(v_at, mask=present[:, None] & (dim < head_dim)[None, :], other=0.0)
    elif padded_dim != head_dim:
        k = tl.load(k_at, mask=(dim < head_dim)[:, None], other=0.0)
        v = tl.load(v_at, mask=(dim < head_dim)[None, :], other=0.0)
    else:
        k = tl.load(k_at)
        v = tl.load(v_at)
    scores = tl.dot(q, k, input_precision=precision) * scale
    if masked:
        seen = present[None, :] & (key[None, :] <= position[:, None])
        seen = seen & ((window == 0) | (key[None, :] > position[:, None] - window))
        scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    shift = new_peak
    if masked:  # a row that has seen nothing yet
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - shift[:, None])
    shrink = tl.exp2(peak - shift)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=precision)
    return acc, new_peak, total


@jit("num_requests", "splits", "window", "table_stride")
def attend_kernel(
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
    decode: constexpr,
    windowed: constexpr,
    precision: constexpr,
) -> None:
    """One KV head's query heads, one tile of query tokens of one request, one share of its keys.

    Grid: (kv heads, splits, requests or tiles). With `decode`, requests with one new token; else
    those with more, long reaches first.
    """
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    item = tl.program_id(2)
    if decode:
        request = item
        start = tl.load(query_start_loc + request)
        count = tl.load(query_start_loc + request + 1) - start
        first = item * 0
        mine = count == 1
    else:
        item = tl.num_programs(2) - 1 - item
        request = find_request(item, query_start_loc, num_requests, tokens)
        start = tl.load(query_start_loc + request)
        count = tl.load(query_start_loc + request + 1) - start
        first = (item - start // tokens - request) * tokens
        mine = (count > 1) & (first < count)
    if not mine:
        return
    seq_len = tl.load(seq_lens + request)
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
    at = (start + first).to(tl.int64)
    q_at = q + at * q_token_stride + token * q_token_stride + head * q_head_stride
    q_tile = tl.load(q_at[:, None] + dim[None, :], mask=mask, other=0.0)

    table = block_table + request.to(tl.int64) * table_stride
    k_pages = pages + kv_head * head_stride
    v_pages = k_pages + half_stride
    acc = tl.zeros((rows, padded_dim), tl.float32)
    peak = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    plain = low
    if not (decode or windowed):  # whole tiles that every row sees need no masks
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

    total = tl.where(total > 0, total, 1.0)  # a row that has seen nothing: zeros, weight 0
    answer = acc / total[:, None]
    if end - base <= share:  # no other program has keys
        out_at = out + at * out_token_stride + token * out_token_stride + head * out_head_stride
        tl.store(out_at[:, None] + dim[None, :], answer.to(out.dtype.element_ty), mask=mask)
    else:
        item_row = at + token
        if decode:
            item_row = request + token
        at_partial = (item_row * (tl.num_programs(0) * group) + head) * splits + split
        tl.store(partial + at_partial[:, None] * head_dim + dim[None, :], answer, mask=mask)
        tl.store(weight + at_partial, peak + tl.log2(total), mask=real)


@jit("num_requests", "splits", "window")
def join_kernel(
    seq_lens: Pointer,
    query_start_loc: Pointer,
    out: Pointer,
    partial: Pointer,
    weight: Pointer,
    num_requests: Scalar,
    splits: Scalar,
    window: Scalar,
    out_token_stride: Scalar,
    out_head_stride: Scalar,
    head_dim: constexpr,
    padded_dim: constexpr,
    tokens: constexpr,
    keys: constexpr,
    padded_splits: constexpr,
    decode: constexpr,
) -> None:
    """Join the shares of one query token and head. Grid: (heads, requests or tokens)."""
    head = tl.program_id(0)
    item = tl.program_id(1)
    request = item
    if not decode:
        request = find_request(item, query_start_loc, num_requests, 0)
    start = tl.load(query_start_loc + request)
    count = tl.load(query_start_loc + request + 1) - start
    token = item - start
    if decode:
        token = item * 0
        mine = count == 1
    else:
        mine = (count > 1) & (token < count)
    if not mine:
        return
    first = token // tokens * tokens
    seq_len = tl.load(seq_lens + request)
    begin, end, share = visible_keys(seq_len, count, first, window, splits, tokens, keys)
    span = end - begin // keys * keys
    if span <= share:  # the one program that had keys wrote the answer
        return
    split = tl.arange(0, padded_splits)
    dim = tl.arange(0, padded_dim)
    live = split * share < span
    at = (item.to(tl.int64) * tl.num_programs(0) + head) * splits + split
    log_weight = tl.load(weight + at, mask=live, other=float("-inf"))
    part = tl.load(
        partial + at[:, None] * head_dim + dim[None, :],
        mask=live[:, None] & (dim < head_dim)[None, :],
        other=0.0,
    )
    factor = tl.exp2(log_weight - tl.max(log_weight, 0))
    answer = tl.sum(part * factor[:, None], 0) / tl.sum(factor, 0)
    out_at = out + (start + token).to(tl.int64) * out_token_stride + head * out_head_stride
    tl.store(out_at + dim, answer.to(out.dtype.element_ty), mask=dim < head_dim)
