"""The CUDA driver's own copies between host memory and pages: strided ones, and many of either kind
in one call.

Copy engines do them, so what computes beside them keeps all its multiprocessors.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

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


class StridedRows(NamedTuple):
    """One side of many strided copies."""

    addresses: Addresses
    """Of the first row of each."""
    pitches: Addresses | int
    """Bytes from one row to the next: of each copy, or of as many as numpy stretches over them."""


Operations: TypeAlias = NDArray[np.void]
"""Strided copies as a `Memcpy2DBatch` takes them, in the shape of their addresses."""


class Memcpy2DBatch(Protocol):
    """Many strided copies, in any order among themselves."""

    def prepare(
        self, targets: StridedRows, sources: StridedRows, width: int, heights: Addresses
    ) -> Operations:
        """Copies of rows of `width` bytes from each source to its target, for `queue`. `heights`:
        how many rows, stretched as pitches are."""
        ...

    def queue(self, operations: Operations) -> None:
        """Queue these, one at least, on the current stream, which is not the default one: what was
        prepared, or some of it along the first axis. Raises: `ConnectorError`."""
        ...


def _refused(what: str, error: object) -> ConnectorError:
    """Why something was not copied."""
    return ConnectorError(
        f"{what} failed with {error}: are the records pinned, and is the device well?"
    )


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
            what = f"cudaMemcpy2DAsync of {height} rows of {width} bytes"
            raise _refused(what, getattr(code, "name", code))


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


class _BatchCall:
    """A call for many copies, of CUDA 12.8 and later. Without cuda.bindings, which would take lists
    of Python's objects: the driver reads numpy's memory as it is."""

    def __init__(self, driver: ctypes.CDLL, name: str, device: torch.device) -> None:
        """Raises: `AttributeError` if the driver has no such call."""
        self._name = name
        newer = getattr(driver, f"{name}_v2", None)  # which tells of no failed index
        self._is_newer = newer is not None
        self._call = getattr(driver, name) if newer is None else newer
        self._device_index = _index(device)

    def queue(self, what: str, arguments: list[object], flags: list[object]) -> None:
        """On the current stream. `flags` come behind the failed index. Raises: `ConnectorError`."""
        failed = [] if self._is_newer else [ctypes.byref(ctypes.c_size_t(0))]
        stream = torch._C._cuda_getCurrentRawStream(self._device_index)
        code = self._call(*arguments, *failed, *flags, ctypes.c_void_p(stream))
        if code != 0:
            raise _refused(f"{self._name} of {what}", f"error {code}")


class _CudaMemcpyBatch:
    """`cuMemcpyBatchAsync`."""

    def __init__(self, driver: ctypes.CDLL, device: torch.device) -> None:
        """Raises: `AttributeError` if the driver has no such call."""
        self._call = _BatchCall(driver, "cuMemcpyBatchAsync", device)
        self._attributes = _Attributes(_IN_STREAM_ORDER)
        self._first = (ctypes.c_size_t * 1)(0)

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
        self._call.queue(f"{len(targets)} copies of {num_bytes} bytes", arguments, [])


class _Operand(ctypes.Structure):
    """`CUmemcpy3DOperand`, of a pointer."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("address", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("num_rows", ctypes.c_size_t),
        ("loc_hint", _Location),
    )


class _Operation(ctypes.Structure):
    """`CUDA_MEMCPY3D_BATCH_OP`."""

    _fields_ = (
        ("source", _Operand),
        ("target", _Operand),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
        ("depth", ctypes.c_size_t),
        ("src_access_order", ctypes.c_int),
        ("flags", ctypes.c_uint),
    )


_POINTER = 1
"""`CU_MEMCPY_OPERAND_TYPE_POINTER`."""
_OPERATIONS = np.dtype(_Operation)


class _CudaMemcpy2DBatch:
    """`cuMemcpy3DBatchAsync`, of copies that are one layer deep."""

    def __init__(self, driver: ctypes.CDLL, device: torch.device) -> None:
        """Raises: `AttributeError` if the driver has no such call."""
        self._call = _BatchCall(driver, "cuMemcpy3DBatchAsync", device)

    def prepare(
        self, targets: StridedRows, sources: StridedRows, width: int, heights: Addresses
    ) -> Operations:
        """See `Memcpy2DBatch`."""
        operations = np.zeros(targets.addresses.shape, _OPERATIONS)
        for operands, rows in (
            (operations["source"], sources),
            (operations["target"], targets),
        ):
            operands["type"] = _POINTER
            operands["address"], operands["pitch"] = rows
            operands["num_rows"] = heights
        operations["width"], operations["height"], operations["depth"] = width, heights, 1
        operations["src_access_order"] = _IN_STREAM_ORDER
        return operations

    def queue(self, operations: Operations) -> None:
        """See `Memcpy2DBatch`."""
        assert operations.flags.c_contiguous, "the driver reads them one behind the other"
        arguments: list[object] = [
            ctypes.c_size_t(operations.size),
            ctypes.c_void_p(operations.ctypes.data),
        ]
        what = f"{operations.size} copies of rows"
        self._call.queue(what, arguments, [ctypes.c_ulonglong(0)])


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
    return _tried(_CudaMemcpyBatch, _copy_two_pieces, device)


def cuda_memcpy_2d_batch(device: torch.device) -> Memcpy2DBatch | None:
    """The driver's batched strided copies; None as for `cuda_memcpy_batch`. Device thread."""
    return _tried(_CudaMemcpy2DBatch, _copy_two_columns, device)


_TRIAL_BYTES = 128
_Batch = TypeVar("_Batch")


def _tried(
    make: Callable[[ctypes.CDLL, torch.device], _Batch],
    trial: Callable[[_Batch, Addresses, Addresses], None],
    device: torch.device,
) -> _Batch | None:
    """Copies by the driver; None if it has none, or if `trial` fails or copies other bytes.

    `trial` is to copy `_TRIAL_BYTES` as they are, to the first address from the second one; this
    waits for it.
    """
    try:
        batch = make(ctypes.CDLL("libcuda.so.1"), device)
    except (OSError, AttributeError):
        return None
    source = torch.arange(_TRIAL_BYTES, dtype=torch.uint8).pin_memory()
    target = torch.zeros(_TRIAL_BYTES, dtype=torch.uint8, device=device)
    target_at, source_at = (np.array([one.data_ptr()], np.uint64) for one in (target, source))
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            trial(batch, target_at, source_at)
        stream.synchronize()
    except ConnectorError:
        return None
    return batch if torch.equal(target.cpu(), source) else None


def _copy_two_pieces(batch: MemcpyBatch, target: Addresses, source: Addresses) -> None:
    half = _TRIAL_BYTES // 2
    places = np.arange(2, dtype=np.uint64) * np.uint64(half)
    batch.copy(target + places, source + places, half)


def _copy_two_columns(batch: Memcpy2DBatch, target: Addresses, source: Addresses) -> None:
    """Rows in turns, so that other pitches or heights than these would show."""
    width, num_rows = _TRIAL_BYTES // 8, 4
    places = np.arange(2, dtype=np.uint64) * np.uint64(width)
    targets, sources = (StridedRows(at + places, 2 * width) for at in (target, source))
    batch.queue(batch.prepare(targets, sources, width, np.full(2, num_rows, np.uint64)))
