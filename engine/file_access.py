"""Files that somebody named: written whole or not at all, and refused in a line with a remedy."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from interlace.engine.errors import ConfigError

UNFINISHED_SUFFIX = ".tmp"
"""Of a file that is being written, or was by a process that was killed."""


def reason_of(error: OSError | ValueError) -> str:
    """Why a file was not read or written, without its name. `ValueError` is for names that none can
    have."""
    return getattr(error, "strerror", None) or str(error)


@contextlib.contextmanager
def refusing(what: str, remedy: str) -> Iterator[None]:
    """Raises: `ConfigError`, "WHAT (reason): REMEDY.", for what a file that cannot be read or
    written raises."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what} ({reason_of(error)}): {remedy}.") from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends well, and is removed if not.

    Readable by its owner alone. Blocks. Raises: `OSError`, with `path` as it was.
    """
    # Not by the whole name: a longer one may not be possible.
    descriptor, name = tempfile.mkstemp(UNFINISHED_SUFFIX, ".interlace-", path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
