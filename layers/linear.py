"""Matrix products of activations with weights, in the form that is fast on the device at hand."""

from __future__ import annotations

import torch
from torch.nn import functional

_FEW_ROWS = 16
_MANY_ROWS = 512


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x` [T, in] times `weight` [out, in] transposed, plus `bias` [out]: [T, out], dtype of x.

    On a CPU the result is mostly a transposed view (strides 1 and about T); element-wise
    operations keep that layout at no cost. Which kernel runs depends on the shapes alone, so
    equal input gives equal bits.
    """
    rows = x.shape[0]
    if x.device.type != "cpu" or (rows >= _MANY_ROWS and weight.shape[0] <= weight.shape[1]):
        return functional.linear(x, weight, bias)
    # BLAS is up to four times faster on few rows when asked for weight @ x.T than for
    # x @ weight.T, and on hundreds still a sixth faster where the output is the wider side. One
    # row is faster still as two, and few rows want to be contiguous.
    if rows == 1:
        x = functional.pad(x, (0, 0, 0, 1))
    elif rows < _FEW_ROWS:
        x = x.contiguous()
    out = torch.mm(weight, x.t()).t()
    if rows == 1:
        out = out[:1]
    return out if bias is None else out.add_(bias)
