"""The driver's copies, done by the host."""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from interlace.layers.cuda_copies import Addresses

STREAM = 77
"""The handle of the stream that is current `on_a_stream`."""


@contextlib.contextmanager
def on_a_stream() -> Iterator[None]:
    """For what asks torch for a stream that is not the default one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
        yield


class HostBatch:
    """A `MemcpyBatch` that copies at once, between any memory of the host; counts the calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def copy(self, targets: Addresses, sources: Addresses, num_bytes: int) -> None:
        self.num_calls += 1
        assert len(targets) == len(sources) > 0
        assert targets.flags.c_contiguous
        assert sources.flags.c_contiguous
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            ctypes.memmove(target, source, num_bytes)


class HostMemcpy:
    """A `Memcpy2D` that copies at once, between any memory of the host; counts the copies."""

    def __init__(self) -> None:
        self.num_copies = 0

    def current_stream(self) -> int:
        return 0

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
        self.num_copies += 1
        for row in range(height):
            ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)


_OPERAND = "I4xQQQII"
"""The fields of `_Operand`, with a gap behind the first one."""
_OPERATION = struct.Struct(f"<{_OPERAND}{_OPERAND}QQQII")
"""`CUDA_MEMCPY3D_BATCH_OP`, of pointers: source, target, width, height, depth, order, flags."""


class _Operand(NamedTuple):
    """`CUmemcpy3DOperand`, of a pointer."""

    type: int
    address: int
    row_length: int
    layer_height: int
    location_type: int
    location_id: int

    def rows(self, width: int, height: int) -> NDArray[np.uint8]:
        """[height, width]: the memory itself. Refused as the driver would."""
        assert (self.type, self.location_type, self.location_id) == (1, 0, 0)
        assert self.row_length >= width > 0
        assert self.layer_height >= height > 0
        size = self.row_length * (height - 1) + width
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.address))
        return np.lib.stride_tricks.as_strided(memory, (height, width), (self.row_length, 1))


class HostDriver:
    """`libcuda` that has one call for many copies, and copies at once; the last one first, since
    the driver promises no order."""

    def __init__(self, name: str, *, code: int = 0, spoils: bool = False) -> None:
        """`name`: of the call; one that ends in "_v2" tells of no failed index. It answers with
        `code`. If it `spoils`, a byte that it has copied is wrong."""
        self.calls: list[int] = []
        """Of each, how many copies it asked for."""
        self._num_failed = 0 if name.endswith("_v2") else 1  # pointers to a failed index
        self._code = code
        self._spoils = spoils
        copy = {"cuMemcpyBatchAsync": self._copy_pieces, "cuMemcpy3DBatchAsync": self._copy_rows}
        setattr(self, name, copy[name.removesuffix("_v2")])

    def _copy_pieces(self, targets: Any, sources: Any, sizes: Any, count: Any, *others: Any) -> int:
        assert len(others) == 4 + self._num_failed
        assert others[-1].value == STREAM
        places = (ctypes.c_uint64 * count.value).from_address
        pieces = list(zip(*(places(one.value) for one in (targets, sources, sizes)), strict=True))
        self.calls.append(len(pieces))
        if self._code == 0:
            for piece in reversed(pieces):
                ctypes.memmove(*piece)
            self._spoil(pieces[0][0])
        return self._code

    def _copy_rows(self, count: Any, operations: Any, *others: Any) -> int:
        assert len(others) == 2 + self._num_failed
        flags, stream = others[-2:]
        assert isinstance(flags, ctypes.c_ulonglong)
        assert (flags.value, stream.value) == (0, STREAM)
        memory = ctypes.string_at(operations.value, count.value * 112)
        copies = list(_OPERATION.iter_unpack(memory))
        self.calls.append(len(copies))
        if self._code == 0:
            for copy in reversed(copies):
                source, target = _Operand(*copy[:6]), _Operand(*copy[6:12])
                width, height, *others_of_it = copy[12:]
                assert others_of_it == [1, 1, 0], "one deep, in the stream's order, no flags"
                target.rows(width, height)[:] = source.rows(width, height)
            self._spoil(copies[0][7])
        return self._code

    def _spoil(self, address: int) -> None:
        if self._spoils:
            ctypes.c_uint8.from_address(address).value ^= 1
