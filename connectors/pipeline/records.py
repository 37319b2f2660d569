"""Host memory for records, visible to the GPU if there is one. Device thread.

On a GPU it is anonymous memory, touched by several threads and then registered: torch's own pinned
allocator rounds up to a power of two and takes most of a second for a GiB. On a CPU it takes room
only where it was written to.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import mmap
import time
from typing import Any

import numpy as np
import torch

from interlace.connectors.pipeline.host_room import container_room
from interlace.engine.errors import ConfigError
from interlace.layers.cuda_host_memory import CudaHostMemory
from interlace.layers.hardware import host
from interlace.layers.hardware.copies import host_copy_speed
from interlace.layers.hardware.fact import Unknown

logger = logging.getLogger(__name__)

_TOUCHING_THREADS = 8
_MEASURED_BYTES = 64 << 20
_MEASURED_HOST_BYTES = 8 << 20
_ROUNDS = 4
_MOST_OF_ROOM = 31 / 32
"""What is available is an estimate, and others live of it too."""


class HostRecords:
    """`tensor`: uint8 [num_records, num_layers, page_bytes], contiguous."""

    def __init__(self, tensor: torch.Tensor, device: torch.device, registered: int | None) -> None:
        """For `allocate`. `registered`: the address that is registered with CUDA, if any."""
        self.tensor = tensor
        self._device = device
        self._registered = registered

    @classmethod
    def allocate(
        cls, num_bytes: int, record_shape: tuple[int, int], device: torch.device
    ) -> HostRecords:
        """As many records of (layers, bytes of a page) as fit into `num_bytes`, zeroed.

        `device` is where their pages lie. May take seconds on a GPU.

        Raises: `ConfigError` if not one fits, or if the machine does not have that much memory.
        """
        record_bytes = record_shape[0] * record_shape[1]
        num_records = num_bytes // record_bytes
        if num_records < 1:
            raise ConfigError(
                f"{num_bytes} bytes hold no record: one block over all layers takes {record_bytes}"
                " bytes. Give the connector more host memory: raise host_bytes."
            )
        num_bytes = num_records * record_bytes
        check_available(num_bytes)
        try:
            memory = mmap.mmap(-1, num_bytes)
        except OSError as error:
            raise ConfigError(f"{_too_much(num_bytes)} The system says: {error}.") from error
        registered = _register(memory, num_bytes, device) if device.type == "cuda" else None
        tensor = torch.frombuffer(memory, dtype=torch.uint8).view(num_records, *record_shape)
        return cls(tensor, device, registered)

    @property
    def num_records(self) -> int:
        """How many there are."""
        return len(self.tensor)

    @property
    def record_bytes(self) -> int:
        """Of one block over all layers."""
        return self.tensor.stride(0)

    def measure_load_rate(self) -> float:
        """Bytes per second of one long copy to where the pages lie. Waits, for less than 50 ms."""
        if self._device.type != "cuda":
            return host_copy_speed(_MEASURED_HOST_BYTES, time.perf_counter)
        return _device_rate(self.tensor.view(-1)[:_MEASURED_BYTES], self._device)

    def close(self) -> None:
        """Let go of the memory; on a GPU when all of its work has ended. May be repeated."""
        address, self._registered = self._registered, None
        if address is None:
            return
        torch.cuda.synchronize(self._device)
        code = CudaHostMemory(self._device).unregister(address)
        if code != 0:
            logger.warning("CUDA did not unregister host memory: error %d", code)


def check_available(num_bytes: int) -> None:
    """Before anything is touched: who takes more than there is, is ended by the kernel.

    Raises: `ConfigError`.
    """
    memory = host.memory()
    rooms = [
        None if isinstance(memory, Unknown) else memory.available_bytes,
        container_room(),
    ]
    room = min((one for one in rooms if one is not None), default=None)
    if room is not None and num_bytes > room * _MOST_OF_ROOM:
        raise ConfigError(f"{_too_much(num_bytes)} {room / 2**30:.1f} GiB of it are available.")


def _too_much(num_bytes: int) -> str:
    return (
        f"host_bytes asks for {num_bytes / 2**30:.1f} GiB of host memory for KV records, which is"
        " more than this machine has: give the connector less."
    )


def _register(memory: mmap.mmap, num_bytes: int, device: torch.device) -> int:
    """Touch all of it, so that its pages exist, and register it; its address."""
    array = np.frombuffer(memory, np.uint8)
    pages = array[:: mmap.PAGESIZE]
    with concurrent.futures.ThreadPoolExecutor(_TOUCHING_THREADS, "interlace-touch") as pool:
        list(pool.map(lambda part: part.fill(0), np.array_split(pages, _TOUCHING_THREADS)))
    address = int(array.ctypes.data)
    code = CudaHostMemory(device).register(address, num_bytes)
    if code != 0:
        raise ConfigError(
            f"CUDA did not register {num_bytes / 2**30:.1f} GiB of host memory (error {code}): give"
            " the connector less by host_bytes, or raise the limit of locked memory (ulimit -l)."
        )
    return address


def _device_rate(source: torch.Tensor, device: torch.device) -> float:
    target = torch.empty_like(source, device=device)
    event: Any = torch.cuda.Event  # carries no types
    marks = [event(enable_timing=True) for _ in range(_ROUNDS + 1)]
    for mark in marks:
        mark.record()
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(device)
    # The first one warms up.
    seconds = min(a.elapsed_time(b) for a, b in itertools.pairwise(marks[1:])) / 1000
    return float(source.nbytes / seconds)
