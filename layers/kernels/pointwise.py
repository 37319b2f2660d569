"""RMS norm, residual add with RMS norm, and the gated activation: one pass over memory each.

They round where `layers/norm.py` and `layers/decoder.py` round: statistics in float32, the normed
value to the dtype before the weight is multiplied in, SiLU to the dtype before the other factor.
"""

from __future__ import annotations

from torch import Tensor

from interlace.layers.kernels.toolchain import (
    Pointer,
    Scalar,
    Tile,
    constexpr,
    jit,
    next_power_of_2,
    tl,
)

ACTIVATION_BLOCK = 1024
MAX_WIDTH = 32768


@jit()
def scaled(x: Tile, factor: Tile, weight: Tile) -> Tile:
    """`x` by a float32 factor, rounded to its dtype, and then by a weight."""
    unit = (x.to(tl.float32) * factor).to(x.dtype)
    return (unit.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@jit()
def rms_norm_kernel(
    x: Pointer,
    delta: Pointer,
    weight: Pointer,
    out: Pointer,
    eps: Scalar,
    x_stride: Scalar,
    delta_stride: Scalar,
    out_stride: Scalar,
    width: constexpr,
    padded: constexpr,
    has_delta: constexpr,
) -> None:
    """One row. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, padded)
    inside = column < width
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    if has_delta:
        more = tl.load(delta + row * delta_stride + column, mask=inside, other=0.0)
        value = (value.to(tl.float32) + more.to(tl.float32)).to(value.dtype)
        tl.store(x + row * x_stride + column, value, mask=inside)
    by = tl.load(weight + column, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    answer = scaled(value, factor, by)
    tl.store(out + row * out_stride + column, answer, mask=inside)


@jit()
def silu_mul_kernel(
    gate_up: Pointer,
    out: Pointer,
    in_stride: Scalar,
    out_stride: Scalar,
    width: constexpr,
    block: constexpr,
) -> None:
    """`block` columns of one row. Grid: (rows, width / block rounded up)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    at = gate_up + row * in_stride + column
    gate = tl.load(at, mask=inside, other=0.0)
    up = tl.load(at + width, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    answer = active.to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * out_stride + column, answer.to(gate.dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor) -> Tensor:
    """RMS norm of each row of `x` [T, n] by `weight` [n], into `out` [T, n], returned.

    `out` may be `x`. Rows are contiguous; one floating dtype. Asserted: shapes, dtypes, strides.
    """
    return _norm(x, None, weight, eps, out)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float, *, out: Tensor) -> Tensor:
    """`x += delta`, rounded, then RMS norm of `x` into `out`, returned; all [T, n], weight [n].

    `out` may be `delta` but not `x`. Rows are contiguous; one floating dtype. Asserted: shapes,
    dtypes, strides.
    """
    return _norm(x, delta, weight, eps, out)


def silu_mul(gate_up: Tensor, *, out: Tensor) -> Tensor:
    """SiLU of the first half of each row of `gate_up` [T, 2n] times the second, into `out` [T, n].

    Returns `out`. Rows are contiguous; one floating dtype. Asserted: shapes, dtypes, strides.
    """
    rows, width = out.shape
    assert gate_up.shape == (rows, 2 * width), "gate and up lie side by side"
    assert gate_up.stride(1) == out.stride(1) == 1, "rows are contiguous"
    assert gate_up.dtype == out.dtype, "one dtype"
    block = min(ACTIVATION_BLOCK, next_power_of_2(width))
    silu_mul_kernel[rows, -(-width // block)](
        gate_up, out, gate_up.stride(0), out.stride(0), width=width, block=block, num_warps=4
    )
    return out


def _norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    rows, width = x.shape
    added = x if delta is None else delta
    assert added.shape == out.shape == x.shape, "one shape"
    assert weight.shape == (width,), "a weight for each column"
    assert x.stride(1) == added.stride(1) == out.stride(1) == weight.stride(0) == 1, "contiguous"
    assert x.dtype == added.dtype == weight.dtype == out.dtype, "one dtype"
    assert width <= MAX_WIDTH, "a row fits into a program"
    padded = next_power_of_2(width)
    rms_norm_kernel[(rows,)](
        x, added, weight, out, eps, x.stride(0), added.stride(0), out.stride(0),
        width=width, padded=padded, has_delta=delta is not None,
        num_warps=min(max(padded // 512, 1), 16),
    )  # fmt: skip
    return out
