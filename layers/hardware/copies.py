"""How fast this machine copies, measured: between host and GPU, within each.

Figures are bytes copied in a second; a copy within one memory reads and writes as much.
Runs on the caller's thread, which in an engine's process must be the device thread.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from interlace.layers.hardware.fact import Unknown, attempt

if TYPE_CHECKING:
    import torch

COPY_BYTES = 256 << 20
_ROUNDS = 5
"""The median of these counts, after one that warms up."""
_COPIES = 4
"""Copies in one round on the GPU, so that what a launch takes does not show."""


@dataclasses.dataclass(frozen=True, slots=True)
class CopySpeeds:
    """Bytes copied in a second, in copies of `num_bytes`."""

    num_bytes: int
    host_to_device: float | Unknown
    """From pinned memory."""
    device_to_host: float | Unknown
    device_to_device: float | Unknown
    """Within the memory of one GPU."""
    host_to_host: float | Unknown
    """By one thread."""


def copy_speeds(device: str | Unknown, advance: Callable[[float], None]) -> CopySpeeds:
    """Measure all four; takes about a second, with `advance(1)` after each.

    `device` is what `torch_facts` found; if it found none, those with a GPU are not tried.
    """

    def measured(
        make: Callable[[], tuple[torch.Tensor, torch.Tensor]], doing: str
    ) -> float | Unknown:
        speed = device if isinstance(device, Unknown) else attempt(lambda: _on_gpu(make), doing)
        advance(1)
        return speed

    speeds = CopySpeeds(
        num_bytes=COPY_BYTES,
        host_to_device=measured(lambda: (_on_device(), _pinned()), "copying to the device"),
        device_to_host=measured(lambda: (_pinned(), _on_device()), "copying from the device"),
        device_to_device=measured(lambda: (_on_device(), _on_device()), "copying on the device"),
        host_to_host=attempt(host_copy_speed, "copying on the host"),
    )
    advance(1)
    return speeds


def host_copy_speed(
    num_bytes: int = COPY_BYTES, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Bytes that one thread copies in a second, from memory to memory."""
    source, target = np.ones(num_bytes, np.uint8), np.empty(num_bytes, np.uint8)

    def seconds() -> float:
        start = clock()
        np.copyto(target, source)
        return clock() - start

    return num_bytes / _median(seconds)


def _on_gpu(make: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Bytes copied in a second from the second of two tensors that `make` returns to the first."""
    from torch import cuda

    target, source = make()
    event: Any = cuda.Event  # carries no types

    def seconds() -> float:
        start, end = (event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(_COPIES):
            target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    return _COPIES * source.nbytes / _median(seconds)


def _median(seconds: Callable[[], float]) -> float:
    seconds()
    return statistics.median(seconds() for _ in range(_ROUNDS))


def _on_device() -> torch.Tensor:
    import torch

    return torch.ones(COPY_BYTES, dtype=torch.uint8, device="cuda")


def _pinned() -> torch.Tensor:
    import torch

    return torch.ones(COPY_BYTES, dtype=torch.uint8).pin_memory()
