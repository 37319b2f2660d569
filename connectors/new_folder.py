"""Whether a folder could be made, and written to, told without a try: nothing is changed."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def check_writable(folder: Path) -> None:
    """Raise what making `folder` with its parents, and a file in it, would, as far as that can be
    told: a try may still fail. Blocking file I/O. Raises: `OSError`."""
    nearest = next((one for one in (folder, *folder.parents) if os.path.lexists(one)), folder)
    if not nearest.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(nearest))
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(nearest))
