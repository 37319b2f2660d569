"""A GGUF file: its metadata and its tensors, read through a mapping.

The header is walked here rather than by `gguf.GGUFReader`, which loops for as long as a damaged
header tells it to and needs seconds for a vocabulary. Nothing is believed beyond the file's length.
Element types, block sizes and dequantising are the `gguf` package's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFValueType

from interlace.engine.errors import ModelError

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_MAX_DIMS: Final = 4
_SCALARS: Final[Mapping[int, str]] = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "?",
}


@dataclasses.dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies. `shape` is [out, in], the order of NumPy and torch."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""
    num_bytes: int


class GGUFFile:
    """A checked GGUF file. Metadata values are str, int, float, bool or lists of those.

    Raises: `ModelError` at construction for a file that is foreign, truncated or inconsistent.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = _map(path)
        cursor = _Cursor(self._bytes, path)
        num_tensors, num_fields = _read_preamble(cursor)
        self.fields = _read_fields(cursor, num_fields)
        self.tensors = _read_tensor_table(cursor, num_tensors, self.fields)

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """Tensor `name` dequantised to float32, [out, in]; may be a read-only view of the file.

        Raises: `ModelError` if it is not there or of an element type that cannot be decoded.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self.path}: tensor {name} is missing.")
        raw = self._bytes[tensor.offset : tensor.offset + tensor.num_bytes]
        rows = raw.reshape(gguf.quant_shape_to_byte_shape(tensor.shape, tensor.kind))
        try:
            values: npt.NDArray[np.float32] = gguf.dequantize(rows, tensor.kind)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path}: tensor {name} has type {tensor.kind.name}, which cannot be decoded."
            ) from error
        return values


class _Cursor:
    """Reads forward through the header and refuses to leave the file."""

    def __init__(self, data: npt.NDArray[np.uint8], path: Path) -> None:
        self._data = data
        self._path = path
        self.offset = 0

    def fail(self, what: str) -> ModelError:
        return ModelError(f"{self._path} is damaged or not a GGUF file: {what}.")

    @property
    def size(self) -> int:
        return len(self._data)

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        end = self.offset + num_bytes
        if end > self.size:
            raise self.fail(f"truncated, it ends at byte {self.size} of at least {end}")
        part = self._data[self.offset : end]
        self.offset = end
        return part

    def uint32(self) -> int:
        return int.from_bytes(self.take(4).tobytes(), "little")

    def uint64(self) -> int:
        return int.from_bytes(self.take(8).tobytes(), "little")

    def count(self, least_bytes_each: int, what: str) -> int:
        """A number of items of at least so many bytes, which the rest of the file must hold."""
        count = self.uint64()
        if count * least_bytes_each > self.size - self.offset:
            raise self.fail(f"truncated, or its header lies: {count} {what}")
        return count

    def text(self) -> str:
        raw = self.take(self.count(1, "bytes of text")).tobytes()
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail("a text is not UTF-8") from error

    def values(self, dtype: str, count: int) -> list[Any]:
        kind = np.dtype(dtype)
        items: list[Any] = self.take(count * kind.itemsize).view(kind).tolist()
        return items


def _map(path: Path) -> npt.NDArray[np.uint8]:
    try:
        if path.stat().st_size == 0:
            raise ModelError(f"{path} is empty.")
        return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from error


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    """Magic, version and the two counts: (tensors, metadata fields)."""
    if cursor.take(4).tobytes() != _MAGIC:
        raise cursor.fail("it does not begin with 'GGUF'")
    version = cursor.uint32()
    if version not in _VERSIONS:
        raise cursor.fail(f"version {version} is not 2 or 3, or it is big-endian")
    num_tensors = cursor.count(24, "tensors")
    return num_tensors, cursor.count(13, "metadata fields")


def _read_fields(cursor: _Cursor, num_fields: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for _ in range(num_fields):
        key = cursor.text()
        if key in fields:
            raise cursor.fail(f"metadata field {key} appears twice")
        fields[key] = _read_value(cursor, cursor.uint32(), key)
    return fields


def _read_value(cursor: _Cursor, type_id: int, key: str) -> Any:
    if type_id == GGUFValueType.STRING:
        return cursor.text()
    if type_id == GGUFValueType.ARRAY:
        item_id = cursor.uint32()
        if item_id == GGUFValueType.STRING:
            return [cursor.text() for _ in range(cursor.count(8, f"texts in {key}"))]
        dtype = _scalar(cursor, item_id, key)
        return cursor.values(dtype, cursor.count(np.dtype(dtype).itemsize, f"items in {key}"))
    return cursor.values(_scalar(cursor, type_id, key), 1)[0]


def _scalar(cursor: _Cursor, type_id: int, key: str) -> str:
    dtype = _SCALARS.get(type_id)
    if dtype is None:
        raise cursor.fail(f"metadata field {key} has the unknown type {type_id}")
    return dtype


def _read_tensor_table(
    cursor: _Cursor, num_tensors: int, fields: dict[str, Any]
) -> dict[str, GGUFTensor]:
    table: dict[str, GGUFTensor] = {}
    for _ in range(num_tensors):
        name = cursor.text()
        if name in table:
            raise cursor.fail(f"tensor {name} appears twice")
        table[name] = _read_tensor(cursor, name)
    alignment = fields.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 1 <= alignment <= 2**20:
        raise cursor.fail(f"general.alignment is {alignment!r}")
    start = -(-cursor.offset // alignment) * alignment
    placed = {
        name: dataclasses.replace(tensor, offset=start + tensor.offset)
        for name, tensor in table.items()
    }
    for name, tensor in placed.items():
        end = tensor.offset + tensor.num_bytes
        if end > cursor.size:
            raise cursor.fail(f"truncated, tensor {name} ends at byte {end} of {cursor.size}")
    return placed


def _read_tensor(cursor: _Cursor, name: str) -> GGUFTensor:
    """One row of the table; its offset still counts from the start of the tensor data."""
    num_dims = cursor.uint32()
    if not 1 <= num_dims <= _MAX_DIMS:
        raise cursor.fail(f"tensor {name} has {num_dims} dimensions")
    shape = tuple(cursor.uint64() for _ in range(num_dims))[::-1]
    type_id, offset = cursor.uint32(), cursor.uint64()
    if type_id not in set(GGMLQuantizationType):
        raise cursor.fail(f"tensor {name} has the unknown type {type_id}")
    kind = GGMLQuantizationType(type_id)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if shape[-1] % block_size:
        raise cursor.fail(f"rows of tensor {name} are not whole blocks of {kind.name}")
    return GGUFTensor(kind, shape, offset, math.prod(shape) // block_size * block_bytes)
