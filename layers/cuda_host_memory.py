"""Host memory that a GPU may read by itself: registered with CUDA, or the same for tests.

By the driver's own calls: whatever they refuse leaves no error behind that a later call would be
told of.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol

import torch

_READ_ONLY = 0x08
"""`CU_MEMHOSTREGISTER_READ_ONLY`: files of most file systems are refused without."""


class HostMemory(Protocol):
    """Lets a device at the memory of the host."""

    def register(self, address: int, num_bytes: int, *, read_only: bool = False) -> int:
        """Whole pages, all in memory; 0 if that went well, else an error of CUDA. 30 to 60 us for a
        MiB, in which no thread can launch anything."""
        ...

    def unregister(self, address: int) -> int:
        """What was registered there as one. Waits until the device is idle; 0 or an error."""
        ...


class CudaHostMemory:
    """`cuMemHostRegister`. Any thread, one at a time."""

    def __init__(self, device: torch.device) -> None:
        """`device` is one of CUDA's. Raises: `OSError` without a driver."""
        self._device = device
        self._driver = ctypes.CDLL("libcuda.so.1")

    def register(self, address: int, num_bytes: int, *, read_only: bool = False) -> int:
        """See `HostMemory`."""
        arguments = (
            ctypes.c_void_p(address),
            ctypes.c_size_t(num_bytes),
            ctypes.c_uint(_READ_ONLY if read_only else 0),
        )
        return self._with_context(lambda: self._driver.cuMemHostRegister_v2(*arguments))

    def unregister(self, address: int) -> int:
        """See `HostMemory`."""
        return self._with_context(
            lambda: self._driver.cuMemHostUnregister(ctypes.c_void_p(address))
        )

    def _with_context(self, call: Callable[[], int]) -> int:
        """A thread that never used the device has no context: it gets the one that torch uses."""
        with torch.cuda.device(self._device):
            context = ctypes.c_void_p()
            self._driver.cuCtxGetCurrent(ctypes.byref(context))
            code = 0 if context else self._take_context()
            return code or int(call())

    def _take_context(self) -> int:
        """0, or an error. The context is as old as the process, so nobody lets go of it."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        return int(
            self._driver.cuDeviceGet(ctypes.byref(device), torch.cuda.current_device())
            or self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
            or self._driver.cuCtxSetCurrent(context)
        )
