"""Whether a folder could be made, and written to: tried where it would lie, and nothing is left."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path


def check_writable(folder: Path) -> None:
    """Raise what making `folder` with its parents, and a file in it, would, as far as a folder can
    tell that is made beside it and removed again. Blocking file I/O. Raises: `OSError`."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.lstat(folder)  # a path that is too long, or may not be gone through
    missing: list[str] = []
    nearest = folder
    while not os.path.lexists(nearest) and nearest != nearest.parent:
        missing.append(nearest.name)
        nearest = nearest.parent
    _check_names(nearest, missing)
    if not nearest.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(nearest))
    # Asking by `os.access` would be answered for the real user, and know nothing of a file system
    # that is mounted to be read.
    Path(tempfile.mkdtemp(prefix=".interlace-", dir=nearest)).rmdir()


def _check_names(nearest: Path, missing: Sequence[str]) -> None:
    """Those that are to be made are looked at by nobody but who makes them."""
    longest = os.pathconf(nearest, "PC_NAME_MAX") if missing and nearest.is_dir() else -1
    if longest > 0 and any(len(os.fsencode(name)) > longest for name in missing):
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), str(nearest))
