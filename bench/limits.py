"""What the device can do at most, measured: how fast it reads, and how fast it multiplies.

Figures of a benchmark are told as shares of these, taken in the same process, since machines of
one kind differ. Imports torch only to measure.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from interlace.bench.spread import Spread
from interlace.bench.work_size import WorkSize

if TYPE_CHECKING:
    import torch

ROUNDS = 7
"""Measured, after one that warms up."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Rates that no step can beat."""

    bytes_per_s: Spread
    """Of a sum over more memory than any cache holds."""
    flops_per_s: Spread
    """Of a product of large square matrices."""

    def reading_s(self, size: WorkSize) -> float:
        """Seconds that reading takes at least."""
        return size.num_bytes / self.bytes_per_s.median

    def computing_s(self, size: WorkSize) -> float:
        """Seconds that computing takes at least."""
        return size.flops / self.flops_per_s.median

    def least_s(self, size: WorkSize) -> float:
        """The longer of the two, since a device can do both at once."""
        return max(self.reading_s(size), self.computing_s(size))

    def figures(self) -> dict[str, Spread]:
        """For a report, in units that people read."""
        return {
            "read GB/s": _scaled(self.bytes_per_s, 1e-9),
            "matrix TFLOP/s": _scaled(self.flops_per_s, 1e-12),
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Extent:
    """How much work a measurement does."""

    num_bytes: int
    matrix_size: int
    """Rows and columns of each matrix."""
    calls: int
    """In each round, so that what a launch takes does not show."""


ON_GPU = Extent(num_bytes=4 << 30, matrix_size=8192, calls=4)
ON_CPU = Extent(num_bytes=256 << 20, matrix_size=1024, calls=1)


def measure_limits(
    device: torch.device,
    dtype: torch.dtype,
    extent: Extent | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Limits:
    """Both rates of `device`, the second one for matrices of `dtype`.

    Takes a second or two, and up to 4 GiB of a GPU, which are given back. On the device thread.
    `clock` times a CPU; a GPU is timed by its own events.
    """
    import torch

    extent = extent or (ON_GPU if device.type == "cuda" else ON_CPU)
    timed = _cuda_seconds if device.type == "cuda" else _host_seconds(clock)
    with torch.inference_mode():
        limits = Limits(
            _read_rate(device, extent, timed), _matrix_rate(device, dtype, extent, timed)
        )
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return limits


Timed = Callable[[Callable[[], object], int], float]
"""Seconds that so many calls take on the device."""


def _read_rate(device: torch.device, extent: Extent, timed: Timed) -> Spread:
    import torch

    num_bytes = extent.num_bytes
    if device.type == "cuda":
        num_bytes = min(num_bytes, torch.cuda.mem_get_info(device)[0] // 4)
    # Written, and not all zeros: untouched memory of a host is one page that the cache holds.
    numbers = torch.empty(num_bytes // 4, dtype=torch.float32, device=device).uniform_()
    return _rates(numbers.sum, numbers.nbytes, extent.calls, timed)


def _matrix_rate(device: torch.device, dtype: torch.dtype, extent: Extent, timed: Timed) -> Spread:
    import torch

    size = extent.matrix_size
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return _rates(lambda: torch.mm(left, right, out=out), 2 * size**3, extent.calls, timed)


def _rates(call: Callable[[], object], amount: int, calls: int, timed: Timed) -> Spread:
    timed(call, calls)
    return Spread.of(amount * calls / timed(call, calls) for _ in range(ROUNDS))


def _host_seconds(clock: Callable[[], float]) -> Timed:
    def seconds(call: Callable[[], object], calls: int) -> float:
        start = clock()
        for _ in range(calls):
            call()
        return clock() - start

    return seconds


def _cuda_seconds(call: Callable[[], object], calls: int) -> float:
    from torch import cuda

    event: Any = cuda.Event  # carries no types
    start, end = (event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def _scaled(spread: Spread, factor: float) -> Spread:
    return Spread.of(sample * factor for sample in spread.samples)
