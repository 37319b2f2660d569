"""One safetensors file with one tensor, `kv_cache`, written and read as raw bytes.

The format is a length, a JSON header and the data. We write those ourselves, since the library
would copy the data into one buffer first, takes other arguments in each version, and has no numpy
type for bfloat16. Anything that reads safetensors reads these files.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from interlace.engine.errors import InterlaceError

ByteArray = npt.NDArray[np.uint8]

TENSOR_NAME = "kv_cache"
_TAGS = {
    "float32": ("F32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "float64": ("F64", 8),
}


class DamagedFileError(InterlaceError):
    """A stored file is not what was written: its KV is computed again, and the folder removed."""


@dataclasses.dataclass(frozen=True, slots=True)
class TensorFile:
    """What a file on the disk must be."""

    num_bytes: int
    """Header and data."""
    xxh3_128: str
    """Hex digest of header and data."""


def header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The bytes before the data of a tensor. `dtype` is a torch name without its prefix."""
    offsets = [0, _data_bytes(dtype, shape)]
    fields = {"dtype": _TAGS[dtype][0], "shape": list(shape), "data_offsets": offsets}
    text = json.dumps({TENSOR_NAME: fields}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _data_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * _TAGS[dtype][1]


def write_tensor(path: Path, dtype: str, shape: tuple[int, ...], data: ByteArray) -> TensorFile:
    """Create `path`, readable by its owner alone; `data` is contiguous, of any shape.

    Raises: `OSError`.
    """
    head = header(dtype, shape)
    with open_new(path) as file:
        file.write(head)
        file.write(data.data)
    digest = xxhash.xxh3_128(head)
    digest.update(data.data)
    return TensorFile(len(head) + data.nbytes, digest.hexdigest())


def open_new(path: Path) -> BinaryIO:
    """A file that did not exist before, for writing, mode 0600. Raises: `OSError`."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o600), "wb")


def read_tensor(path: Path, dtype: str, shape: tuple[int, ...], expected: TensorFile) -> ByteArray:
    """The data of a file, in fresh memory, [bytes]. What is checked is what is returned.

    Raises: `DamagedFileError`, `OSError`.
    """
    head = header(dtype, shape)
    if expected.num_bytes != len(head) + _data_bytes(dtype, shape):
        raise DamagedFileError(f"the manifest's size of {path.name} does not fit its shape")
    try:
        with path.open("rb", buffering=0) as file:
            data = _read_all(file, path.name, expected.num_bytes)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise DamagedFileError(f"{path.name} is missing") from error
    if xxhash.xxh3_128_hexdigest(data.data) != expected.xxh3_128:
        raise DamagedFileError(f"{path.name} has another digest than its manifest says")
    if data[: len(head)].tobytes() != head:
        raise DamagedFileError(f"{path.name} holds a tensor of another type or shape")
    return data[len(head) :]


def _read_all(file: io.FileIO, name: str, num_bytes: int) -> ByteArray:
    if os.fstat(file.fileno()).st_size != num_bytes:
        raise DamagedFileError(f"{name} has another size than its manifest says")
    data = np.empty(num_bytes, dtype=np.uint8)
    num_read = 0
    while num_read < len(data):
        added = file.readinto(data.data[num_read:])
        if not added:
            raise DamagedFileError(f"{name} ended while it was read")
        num_read += added
    return data
