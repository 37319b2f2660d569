"""How the numbers of KV look as bits: where paint has room, and which numbers count as equal.

Paint is a NaN with a number in its low bits. Neither a CPU nor a GPU makes such NaNs by itself, and
copies keep them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Bits = NDArray[Any]
"""Numbers as integers of their size."""
Floats = NDArray[Any]
"""Numbers as what they are."""


@dataclasses.dataclass(frozen=True, slots=True)
class NumberFormat:
    """Of all pages of one engine."""

    dtype: torch.dtype
    torch_bits: torch.dtype
    """The integer of its size."""
    floats: np.dtype[Any]
    bits: np.dtype[Any]
    base: int
    """The NaN of all paint."""
    low: int
    """Mask of the bits in which paint has its number: the lowest ones."""
    tolerance: float
    """Relative and absolute, of KV that was computed in batches of another shape, and for float32
    by other kernels."""

    def paint(self, number: int) -> int:
        """The bits that tell this number."""
        return self.base | number

    def wrapped(self, number: int) -> int:
        """`number`, from 1 on, as paint can tell it: beyond the largest it begins again at 1."""
        return 1 + (number - 1) % self.low

    def is_paint(self, bits: Bits) -> NDArray[np.bool_]:
        """Which ones are, of the same shape."""
        kind: NDArray[np.bool_] = (bits & ~self.low) == self.base
        return kind

    def numbers_of(self, bits: Bits) -> set[int]:
        """The numbers of all paint among these."""
        return set((bits[self.is_paint(bits)] & self.low).tolist())

    def as_floats(self, bits: Bits) -> Floats:
        """The same as numbers; a copy unless they lie together."""
        return np.ascontiguousarray(bits).view(self.floats)

    def are_equal(self, bits: Bits, right: Floats) -> bool:
        """Whether all of them are `right`, of the same shape and at least as exact."""
        close = np.allclose(self.as_floats(bits), right, rtol=self.tolerance, atol=self.tolerance)
        return bool(close)


FLOAT64 = NumberFormat(
    torch.float64,
    torch.int64,
    np.dtype(np.float64),
    np.dtype(np.int64),
    base=0x7FF8_1000_0000_0000,
    low=(1 << 44) - 1,
    tolerance=1e-9,
)
FLOAT32 = NumberFormat(
    torch.float32,
    torch.int32,
    np.dtype(np.float32),
    np.dtype(np.int32),
    base=0x7FD0_0000,  # neither 0x7FC0_0000, a CPU's own NaN, nor 0x7FFF_FFFF, a GPU's
    low=(1 << 20) - 1,
    tolerance=1e-4,
)
_FORMATS = {one.dtype: one for one in (FLOAT64, FLOAT32)}


def format_of(dtype: torch.dtype) -> NumberFormat:
    """That of pages of this type: float64 or float32."""
    return _FORMATS[dtype]
