"""Few rows times a weight matrix: read the weights once, at the memory's speed.

One token's step is little else. A matrix library spends its effort on tiles that a handful of rows
cannot fill; here each program takes a few outputs and sums along the whole input.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from interlace.layers.kernels.toolchain import Pointer, Scalar, constexpr, jit, next_power_of_2, tl

MAX_ROWS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class MatvecTiles:
    """What one program takes of the weights."""

    outputs: int
    inputs: int
    """Inputs at a time, a power of two."""
    num_warps: int


@jit("n")
def matvec_kernel(
    x: Pointer,
    weight: Pointer,
    bias: Pointer,
    out: Pointer,
    n: Scalar,
    x_stride: Scalar,
    out_stride: Scalar,
    k: constexpr,
    rows: constexpr,
    outputs: constexpr,
    inputs: constexpr,
    even_n: constexpr,
    has_bias: constexpr,
) -> None:
    """`outputs` numbers of each row of `x @ weight.T + bias`. Grid: (n / outputs, rounded up).

    Products are summed in float32, in an order that depends on the tiles alone.
    """
    output = tl.program_id(0) * outputs + tl.arange(0, outputs)
    lane = tl.arange(0, inputs)
    weights_at = weight + output[:, None].to(tl.int64) * k
    sums = ()
    for _ in tl.static_range(rows):
        sums += (tl.zeros((outputs, inputs), tl.float32),)  # type: ignore[assignment]
    for start in range(0, k, inputs):
        column = start + lane
        if even_n and k % inputs == 0:
            w = tl.load(weights_at + column[None, :], eviction_policy="evict_first")
        else:
            inside = (output < n)[:, None] & (column < k)[None, :]
            w = tl.load(
                weights_at + column[None, :],
                mask=inside,
                other=0.0,
                eviction_policy="evict_first",
            )
        wide = w.to(tl.float32)
        added = ()
        for row in tl.static_range(rows):
            x_row = tl.load(x + row * x_stride + column, mask=column < k, other=0.0)
            product = wide * x_row.to(tl.float32)[None, :]
            added += (sums[row] + product,)  # type: ignore[assignment]
        sums = added
    for row in tl.static_range(rows):
        answer = tl.sum(sums[row], 1)
        if has_bias:
            answer += tl.load(bias + output, mask=output < n, other=0.0).to(tl.float32)
        at = out + row * out_stride + output
        tl.store(at, answer.to(out.dtype.element_ty), mask=output < n)


def matvec_tiles(n: int, k: int, rows: int) -> MatvecTiles:
    """Tiles for weights [n, k]: a table by shape, found by measuring.

    Short inputs are taken in steps that divide them, or much of a step would be empty.
    """
    if k < 1024 and k % 64 == 0:
        return MatvecTiles(32 if n >= 8192 else 8, min(k & -k, 256), num_warps=4)
    if rows == 1:
        if k >= 8192:
            return MatvecTiles(4, 512, num_warps=8)
        if k >= 4096:
            return MatvecTiles(1 if n < 16384 else 2, 2048, num_warps=8)
        if k >= 2048:
            return MatvecTiles(1, 1024, num_warps=4)
        return MatvecTiles(2, min(next_power_of_2(k), 1024), num_warps=4)
    if rows == 2:
        if 4096 <= k < 8192:
            return MatvecTiles(4, 2048, num_warps=8)
        if 2048 <= k < 4096:
            return MatvecTiles(1, 1024, num_warps=2)
        return MatvecTiles(2, 512, num_warps=2)
    return MatvecTiles(2, 1024, num_warps=4) if rows <= 4 else MatvecTiles(1, 1024, num_warps=2)


def prefers_matvec(n: int, k: int, rows: int, dtype: torch.dtype) -> bool:
    """Whether this kernel beats the matrix library for weights [n, k], as measured on an H200.

    With more rows a 16-bit weight is used for longer than it takes to load it; then only small
    matrices gain, for which the library's choice is poor.
    """
    if rows == 0:
        return False
    if dtype == torch.float32:
        return rows <= 4
    small = n * k <= 4_000_000
    return rows == 1 or (rows == 2 and (k >= 1024 or small)) or (rows <= 4 and n <= 2048 and small)


def matvec(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor,
    tiles: MatvecTiles | None = None,
) -> Tensor:
    """`torch.nn.functional.linear(x, weight, bias)` for at most 8 rows, into `out`, returned.

    `x` is [rows, K] and `out` [rows, N], rows contiguous; `weight` is contiguous [N, K], `bias` [N]
    or None. One floating dtype; sums are float32, so float32 is computed as such. `tiles` is for
    measuring; without it a table decides. Asserted: shapes, dtypes, strides.
    """
    rows, k = x.shape
    n = weight.shape[0]
    assert 1 <= rows <= MAX_ROWS, "more rows are for a matrix product"
    assert weight.shape == (n, k), "weights are [outputs, inputs]"
    assert out.shape == (rows, n), "an output for each row and each row of the weights"
    assert weight.is_contiguous(), "weights are read in one piece"
    assert x.stride(1) == out.stride(1) == 1, "rows are contiguous"
    assert x.dtype == weight.dtype == out.dtype, "one dtype"
    assert bias is None or (bias.shape == (n,) and bias.is_contiguous() and bias.dtype == x.dtype)
    chosen = tiles or matvec_tiles(n, k, rows)
    matvec_kernel[(-(-n // chosen.outputs),)](
        x, weight, x if bias is None else bias, out, n, x.stride(0), out.stride(0),
        k=k, rows=rows, outputs=chosen.outputs, inputs=chosen.inputs,
        even_n=n % chosen.outputs == 0, has_bias=bias is not None,
        num_warps=chosen.num_warps,
    )  # fmt: skip
    return out
