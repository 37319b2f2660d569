"""The CUDA driver's own copies between host memory and pages: strided ones, and many in one call.

Copy engines do them, so what computes beside them keeps all its multiprocessors.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from interlace.engine.errors import ConnectorError

Addresses: TypeAlias = NDArray[np.uint64]


class Memcpy2D(Protocol):
    """Strided copies of rows between host and device."""

    def current_stream(self) -> int:
        """A handle of the stream on which to queue."""
        ...

    def copy(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        height: int,
        stream: int,
        *,
        to_device: bool,
    ) -> None:
        """Queue `height` rows of `width` bytes. Raises: `ConnectorError`."""
        ...


class MemcpyBatch(Protocol):
    """Many copies of the same size, in any order among themselves."""

    def copy(self, targets: Addresses, sources: Addresses, num_bytes: int) -> None:
        """Queue, on the current stream, which is not the default one, copies of `num_bytes` from
        each source to its target; one at least. Raises: `ConnectorError`."""
        ...


class _CudaMemcpy2D:
    """`cudaMemcpy2DAsync`."""

    def __init__(self, runtime: Any, device: torch.device) -> None:
        self._copy = runtime.cudaMemcpy2DAsync
        self._forget_error = runtime.cudaGetLastError
        self._to_device = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._to_host = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._device_index = _index(device)

    def current_stream(self) -> int:
        """See `Memcpy2D`. Without the object that `torch.cuda.current_stream` makes each time."""
        return torch._C._cuda_getCurrentRawStream(self._device_index)

    def copy(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        height: int,
        stream: int,
        *,
        to_device: bool,
    ) -> None:
        """See `Memcpy2D`."""
        kind = self._to_device if to_device else self._to_host
        (code,) = self._copy(
            target, target_pitch, source, source_pitch, width, height, kind, stream
        )
        if int(code) != 0:
            self._forget_error()  # else whoever asks next would be told of it
            raise ConnectorError(
                f"cudaMemcpy2DAsync of {height} rows of {width} bytes failed with"
                f" {getattr(code, 'name', code)}: are the records pinned, and is the device well?"
            )


class _Location(ctypes.Structure):
    """`CUmemLocation`."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """`CUmemcpyAttributes`."""

    _fields_ = (
        ("src_access_order", ctypes.c_int),
        ("src_loc_hint", _Location),
        ("dst_loc_hint", _Location),
        ("flags", ctypes.c_uint),
    )


_IN_STREAM_ORDER = 1
"""`CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`: what the stream does before may write to the sources."""


class _CudaMemcpyBatch:
    """`cuMemcpyBatchAsync`, of CUDA 12.8 and later. Without cuda.bindings, which would take lists
    of Python's numbers: the driver reads numpy's memory as it is."""

    def __init__(self, driver: ctypes.CDLL, device: torch.device) -> None:
        """Raises: `AttributeError` if the driver has no such call."""
        self._is_newer = hasattr(driver, "cuMemcpyBatchAsync_v2")  # which tells of no failed index
        self._call = driver.cuMemcpyBatchAsync_v2 if self._is_newer else driver.cuMemcpyBatchAsync
        self._attributes = _Attributes(_IN_STREAM_ORDER)
        self._first = (ctypes.c_size_t * 1)(0)
        self._device_index = _index(device)

    def copy(self, targets: Addresses, sources: Addresses, num_bytes: int) -> None:
        """See `MemcpyBatch`."""
        sizes = np.full(len(targets), num_bytes, np.uint64)
        arguments: list[object] = [
            *(ctypes.c_void_p(numbers.ctypes.data) for numbers in (targets, sources, sizes)),
            ctypes.c_size_t(len(targets)),
            ctypes.byref(self._attributes),
            self._first,
            ctypes.c_size_t(1),
        ]
        if not self._is_newer:
            arguments.append(ctypes.byref(ctypes.c_size_t(0)))
        stream = torch._C._cuda_getCurrentRawStream(self._device_index)
        code = self._call(*arguments, ctypes.c_void_p(stream))
        if code != 0:
            raise ConnectorError(
                f"cuMemcpyBatchAsync of {len(targets)} copies of {num_bytes} bytes failed with"
                f" error {code}: are the records pinned, and is the device well?"
            )


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def cuda_memcpy_2d(device: torch.device) -> Memcpy2D | None:
    """The driver's strided copies; None if `cuda.bindings` cannot be imported."""
    try:
        runtime = importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        return None
    return _CudaMemcpy2D(runtime, device)


def cuda_memcpy_batch(device: torch.device) -> MemcpyBatch | None:
    """The driver's batched copies; None if it has none, or if a first one fails, for which this
    waits. Device thread."""
    try:
        batch = _CudaMemcpyBatch(ctypes.CDLL("libcuda.so.1"), device)
    except (OSError, AttributeError):
        return None
    source = torch.arange(16, dtype=torch.int64).pin_memory()
    target = torch.zeros(16, dtype=torch.int64, device=device)
    places = np.arange(2, dtype=np.uint64) * np.uint64(64)
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            batch.copy(places + target.data_ptr(), places + source.data_ptr(), 64)
        stream.synchronize()
    except ConnectorError:
        return None
    return batch if torch.equal(target.cpu(), source) else None
