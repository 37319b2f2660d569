"""QK norm, RoPE and the writing of K and V into the pages: one kernel after the QKV projection."""

from __future__ import annotations

import torch
from torch import Tensor

from interlace.layers.kernels.pointwise import scaled
from interlace.layers.kernels.toolchain import (
    Pointer,
    Scalar,
    Tile,
    constexpr,
    jit,
    next_power_of_2,
    tl,
)

MANY_TOKENS = 256
"""From here on each program takes more heads: there are programs enough."""


@jit()
def inverse_rms(x_1: Tile, x_2: Tile, size: constexpr, eps: Scalar) -> Tile:
    """What makes the root mean square of each row of both halves together 1."""
    wide_1 = x_1.to(tl.float32)
    wide_2 = x_2.to(tl.float32)
    squares = tl.sum(wide_1 * wide_1 + wide_2 * wide_2, 1, keep_dims=True)
    return tl.rsqrt(squares / size + eps)


@jit()
def rotated(x: Tile, partner: Tile, c: Tile, s: Tile) -> Tile:
    """`x * c + partner * s`, the first product rounded, as torch does it."""
    first = (x.to(tl.float32) * c).to(x.dtype)
    return (first.to(tl.float32) + partner.to(tl.float32) * s).to(x.dtype)


@jit()
def rope_write_kernel(
    qkv: Pointer,
    positions: Pointer,
    cos: Pointer,
    sin: Pointer,
    slot_mapping: Pointer,
    qk_norm: Pointer,
    q_out: Pointer,
    pages: Pointer,
    eps: Scalar,
    token_stride: Scalar,
    q_token_stride: Scalar,
    q_head_stride: Scalar,
    page_stride: Scalar,
    half_stride: Scalar,
    slot_stride: Scalar,
    head_stride: Scalar,
    num_heads: constexpr,
    num_kv_heads: constexpr,
    head_dim: constexpr,
    padded_half: constexpr,
    block_size: constexpr,
    heads_at_a_time: constexpr,
    has_norm: constexpr,
) -> None:
    """Some heads of one token. Grid: (heads of Q, K and V / heads_at_a_time rounded up, tokens).

    A head is held as its two halves: the rotation mixes number i of one with number i of the other.
    """
    half: constexpr = head_dim // 2
    token = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) * heads_at_a_time + tl.arange(0, heads_at_a_time)
    dim = tl.arange(0, padded_half)
    is_q = head < num_heads
    is_qk = head < num_heads + num_kv_heads
    real = head < num_heads + 2 * num_kv_heads
    inside = real[:, None] & (dim < half)[None, :]
    at = qkv + token * token_stride + head[:, None] * head_dim + dim[None, :]
    raw_1 = tl.load(at, mask=inside, other=0.0)
    raw_2 = tl.load(at + half, mask=inside, other=0.0)
    x_1, x_2 = raw_1, raw_2
    if has_norm:
        known = is_qk[:, None] & (dim < half)[None, :]
        by = qk_norm + head[:, None] * head_dim + dim[None, :]
        factor = inverse_rms(x_1, x_2, head_dim, eps)
        x_1 = scaled(x_1, factor, tl.load(by, mask=known, other=0.0))
        x_2 = scaled(x_2, factor, tl.load(by + half, mask=known, other=0.0))
    angle = tl.load(positions + token) * half + dim
    c = tl.load(cos + angle, mask=dim < half, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + angle, mask=dim < half, other=0.0).to(tl.float32)[None, :]
    turned_1 = rotated(x_1, x_2, c, -s)
    turned_2 = rotated(x_2, x_1, c, s)
    q_at = q_out + token * q_token_stride + head[:, None] * q_head_stride + dim[None, :]
    tl.store(q_at, turned_1, mask=inside & is_q[:, None])
    tl.store(q_at + half, turned_2, mask=inside & is_q[:, None])

    slot = tl.load(slot_mapping + token)
    kv_head = tl.where(is_qk, head - num_heads, head - num_heads - num_kv_heads)
    which = tl.where(is_qk, 0, half_stride)
    slot_at = slot // block_size * page_stride + slot % block_size * slot_stride
    kv_at = pages + slot_at + (which + kv_head * head_stride)[:, None] + dim[None, :]
    kept = inside & (head >= num_heads)[:, None] & (slot >= 0)
    tl.store(kv_at, tl.where(is_qk[:, None], turned_1, raw_1), mask=kept)
    tl.store(kv_at + half, tl.where(is_qk[:, None], turned_2, raw_2), mask=kept)


def rope_and_write(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    pages: Tensor,
    *,
    q_out: Tensor,
    qk_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Norm Q and K if asked to, rotate both, and write K and V into their slots. Returns `q_out`.

    - `qkv`: [T, (heads + 2 * kv_heads) * head_dim], rows contiguous: the projection's output.
    - `positions`: int64 [T], valid for padding too; `cos` and `sin`: [any, head_dim / 2],
      contiguous, of the model's dtype.
    - `slot_mapping`: int64 [T], `block_id * block_size + offset`, or -1: written nowhere.
    - `pages`: as in `paged_attention`.
    - `q_out`: [T, heads, head_dim], last dimension contiguous; may not overlap `qkv`.
    - `qk_norm`: [heads + kv_heads, head_dim], contiguous, with `eps`; None: no norm.

    The same rounding as `layers/norm.py` and `layers/rotary.py`. Asserted: shapes, dtypes, strides.
    """
    tokens, num_heads, head_dim = q_out.shape
    num_kv_heads = pages.shape[3]
    _check(qkv, positions, cos, sin, slot_mapping, pages, q_out, qk_norm)
    at_a_time, warps = (16, 4) if tokens >= MANY_TOKENS else (4, 1)
    groups = -(-(num_heads + 2 * num_kv_heads) // at_a_time)
    rope_write_kernel[groups, tokens](
        qkv, positions, cos, sin, slot_mapping, qkv if qk_norm is None else qk_norm, q_out, pages,
        eps, qkv.stride(0), q_out.stride(0), q_out.stride(1), *pages.stride()[:4],
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
        padded_half=next_power_of_2(head_dim // 2), block_size=pages.shape[2],
        heads_at_a_time=at_a_time, has_norm=qk_norm is not None, num_warps=warps,
    )  # fmt: skip
    return q_out


def _check(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    pages: Tensor,
    q_out: Tensor,
    qk_norm: Tensor | None,
) -> None:
    tokens, num_heads, head_dim = q_out.shape
    num_kv_heads = pages.shape[3]
    heads = num_heads + 2 * num_kv_heads
    assert qkv.shape == (tokens, heads * head_dim), "Q, K and V lie side by side"
    assert pages.shape[1] == 2, "pages hold K and V"
    assert pages.shape[4] == head_dim, "pages hold such heads"
    assert qkv.stride(1) == pages.stride(4) == q_out.stride(2) == 1, "heads are contiguous"
    assert qkv.dtype == pages.dtype == q_out.dtype == cos.dtype == sin.dtype, "one dtype"
    assert positions.shape == slot_mapping.shape == (tokens,), "a position and a slot each"
    assert positions.dtype == slot_mapping.dtype == torch.int64
    assert cos.shape == sin.shape == (cos.shape[0], head_dim // 2), "an angle for each pair"
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    if qk_norm is not None:
        assert qk_norm.shape == (num_heads + num_kv_heads, head_dim), "a weight for each number"
        assert qk_norm.is_contiguous()
        assert qk_norm.dtype == qkv.dtype, "one dtype"
