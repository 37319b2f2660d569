"""What both attention kernels are made of: taking keys into account, and storing what came out.

Softmax runs online in base 2: `peak` is a row's largest score so far, `total` the sum of
exp2(score - peak), `acc` the sum of values with these weights. Slots that a row may not see are
masked where they are loaded and where they are scored: they may hold NaN, and NaN times 0 is NaN.
"""

from __future__ import annotations

from interlace.layers.kernels.toolchain import Pointer, Scalar, Tile, constexpr, jit, tl


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


@jit()
def attend_tile_of_all(
    acc: Tile,
    peak: Tile,
    total: Tile,
    q: Tile,
    position: Tile,
    key_start: Scalar,
    end: Scalar,
    scale: Scalar,
    keys_at: Pointer,
    values_at: Pointer,
    span: Scalar,
    keys: constexpr,
    masked: constexpr,
    precision: constexpr,
) -> tuple[Tile, Tile, Tile]:
    """As `attend_tile`, of contiguous keys, row `span` of the matrices being the first, and with
    `peak` before `scale`, which is folded into the exponents."""
    k = keys_at.load([span + key_start, 0])
    v = values_at.load([span + key_start, 0])
    scores = tl.dot(q, k.T, input_precision=precision)
    if masked:
        key = key_start + tl.arange(0, keys)
        seen = (key < end)[None, :] & (key[None, :] <= position[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    shift = new_peak
    if masked:  # a row that has seen nothing yet
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores * scale - (shift * scale)[:, None])
    shrink = tl.exp2((peak - shift) * scale)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=precision)
    return acc, new_peak, total


@jit()
def stored_tile(
    answer: Tile,
    log_weight: Tile,
    out: Pointer,
    partial: Pointer,
    weight: Pointer,
    at: Tile,
    head: Tile,
    split: Scalar,
    splits: Scalar,
    is_whole: Scalar,
    num_heads: Scalar,
    real: Tile,
    mask: Tile,
    dim: Tile,
    out_token_stride: Scalar,
    out_head_stride: Scalar,
    head_dim: constexpr,
) -> None:
    """Store the rows of one program: tokens `at` of the batch, one head each. If it is not whole,
    since other programs have keys of the same rows, as a part that is joined with theirs."""
    if is_whole:
        out_at = out + at * out_token_stride + head * out_head_stride
        tl.store(out_at[:, None] + dim[None, :], answer.to(out.dtype.element_ty), mask=mask)
    else:
        at_partial = (at * num_heads + head) * splits + split
        tl.store(partial + at_partial[:, None] * head_dim + dim[None, :], answer, mask=mask)
        tl.store(weight + at_partial, log_weight, mask=real)


@jit()
def finished(acc: Tile, peak: Tile, total: Tile) -> tuple[Tile, Tile]:
    """The rows' answers, and log2 of the weight of each. Rows that saw nothing: 0, -inf."""
    total = tl.where(total > 0, total, 1.0)
    return acc / total[:, None], peak + tl.log2(total)


@jit()
def joined(
    partial: Pointer,
    weight: Pointer,
    at: Tile,
    live: Tile,
    dim: Tile,
    head_dim: constexpr,
) -> Tile:
    """The answer of one row from partial ones, which lie at `at` where `live`."""
    log_weight = tl.load(weight + at, mask=live, other=float("-inf"))
    part = tl.load(
        partial + at[:, None] * head_dim + dim[None, :],
        mask=live[:, None] & (dim < head_dim)[None, :],
        other=0.0,
    )
    factor = tl.exp2(log_weight - tl.max(log_weight, 0))
    return tl.sum(part * factor[:, None], 0) / tl.sum(factor, 0)
