"""Files of hidden states: their names, their format, and how they come and go.

A file is a safetensors file with the tensors `hidden_states` and `token_ids`. We write the format
ourselves, since the library's numpy part has no bfloat16, and its other part needs torch, which
must not compute on a second thread. All of it does file I/O, but for `path_of`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = "sha256-"
_TAGS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64", "int64": "I64"}


class Tensor(NamedTuple):
    """A tensor in host memory."""

    dtype: str
    """A torch name without its prefix."""
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]
    """Its bytes, contiguous, of any shape."""


def path_of(root: Path, request_id: str) -> Path:
    """Where the file of a request lies: directly in `root`, whatever the id. Any thread, no I/O.

    An id is used as it is if it consists of at most 128 letters, digits, and `_`, `-`, `.` (not in
    front); of any other one, the SHA-256 digest stands for it. No two ids have one path.
    """
    if _PLAIN.fullmatch(request_id) and not request_id.startswith(_DIGEST):
        return root / f"{request_id}.safetensors"
    digest = hashlib.sha256(request_id.encode("utf-8", "surrogatepass")).hexdigest()
    return root / f"{_DIGEST}{digest}.safetensors"


def prepare(root: Path) -> None:
    """Make the folder, readable by its owner alone, and try to write. Raises: `OSError`."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    trial = _temporary(root)
    os.close(_create(trial))
    trial.unlink()


class StatesFile:
    """One file, from writing to removal. `write` and `remove` are for one lane, in that order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_given_up = False
        self._is_there = False

    def give_up(self) -> None:
        """Do not let the file appear, if it has not yet. Any thread."""
        self._is_given_up = True

    def write(self, tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> None:
        """Write aside, and rename into place: what is there is whole. `notes` are for people.

        Without fsync: a power cut may tear what was written last. Raises: `OSError`; then nothing
        is left of it, and what was there before is there still.
        """
        temporary = _temporary(self._path.parent)
        try:
            with os.fdopen(_create(temporary), "wb") as file:
                file.write(_header(tensors, notes))
                for tensor in tensors.values():
                    file.write(tensor.data.data)
            if not self._is_given_up:
                temporary.replace(self._path)
                self._is_there = True
                return
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        temporary.unlink()

    def remove(self) -> None:
        """Remove the file, if this object's `write` put it there. One that cannot be is left."""
        if not self._is_there:
            return
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("hidden states of no use could not be removed: %s", error)


def _temporary(folder: Path) -> Path:
    """A name that no request has: those do not begin with a dot."""
    return folder / f".{os.getpid()}-{secrets.token_hex(8)}.tmp"


def _create(path: Path) -> int:
    """A descriptor of a new file, mode 0600. Raises: `OSError`."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _header(tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> bytes:
    """Length and JSON header; the data of the tensors follow in their order."""
    fields: dict[str, object] = {"__metadata__": dict(notes)}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.data.nbytes
        dtype = _TAGS[tensor.dtype]
        fields[name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
