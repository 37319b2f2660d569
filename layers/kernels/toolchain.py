"""Where the kernels get Triton from: the compiler, its interpreter, or, without Triton, neither.

Triton decides when a kernel is defined whether it will be compiled or interpreted.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from interlace.engine.errors import ConfigError

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0") == "1"

# The types of what kernels work with, for readers: a tensor outside and the address of its first
# number inside; a number; a block of numbers; a number that is known when the kernel is compiled.
# Triton finds the last one by its name, and accepts no other names than its own as types.
if TYPE_CHECKING:
    triton: Any
    tl: Any
    TensorDescriptor: Any
    Pointer: TypeAlias = Any
    Scalar: TypeAlias = Any
    Tile: TypeAlias = Any
    constexpr: TypeAlias = Any
elif HAS_TRITON:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    Pointer = Scalar = Tile = tl.tensor
    constexpr = tl.constexpr
else:
    triton = tl = Pointer = Scalar = Tile = constexpr = None


def jit(*fixed: str) -> Callable[[Callable[..., Any]], Any]:
    """Make a kernel of a function. `fixed` are integers whose value must not choose the code.

    Triton compiles a kernel anew for integers that are 1 or divisible by 16, which pays for
    strides, but not for numbers that change from step to step.
    """
    if not HAS_TRITON:
        return _Missing
    decorate: Callable[[Callable[..., Any]], Any] = triton.jit(do_not_specialize=list(fixed))
    return decorate


class _Missing:
    """Stands for a kernel where Triton is not installed."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._name = function.__name__

    def __getitem__(self, grid: object) -> Callable[..., Any]:
        raise ConfigError(
            f"The kernel {self._name} needs Triton, which is not installed. Install it "
            "(pip install triton; Linux only) or use device='cpu'."
        )


def descriptor(matrix: torch.Tensor, block: tuple[int, int]) -> Any:
    """What a kernel takes to fetch blocks of a contiguous `matrix` whole: on Hopper by the tensor
    memory accelerator."""
    return TensorDescriptor.from_tensor(matrix, list(block))


def runs_on(device: torch.device) -> bool:
    """Whether kernels can be called with tensors on this device."""
    return HAS_TRITON and (INTERPRETED if device.type == "cpu" else device.type == "cuda")


def size_class(count: int) -> int:
    """A power of two that is at least `count`: few of them, since each is compiled by itself."""
    size = 16
    while size < count:
        size *= 4
    return size


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`, for n >= 1."""
    return 1 << (n - 1).bit_length()
