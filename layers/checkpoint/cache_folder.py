"""Where files are cached, and how long a killed process's may stay."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

import platformdirs

from interlace.engine.file_access import UNFINISHED_SUFFIX

CACHE_VARIABLE = "INTERLACE_CACHE_DIR"
SCRATCH_PREFIX = "building-"
_SCRATCH_AGE_S = 6 * 3600.0


def cache_folder() -> Path:
    """`INTERLACE_CACHE_DIR`, or the user's cache folder of this system; may not exist yet."""
    chosen = os.environ.get(CACHE_VARIABLE, "").strip()
    if not chosen:
        return platformdirs.user_cache_path("interlace")
    return Path(os.path.expanduser(chosen))  # noqa: PTH111 - a ~ of nobody stays as it is


def private_folder(path: Path) -> Path:
    """Make `path` if need be, readable by its owner alone. Raises: `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.mkdir(exist_ok=True, mode=0o700)
    path.chmod(0o700)
    return path


def remove_stale_scratch(folder: Path) -> None:
    """Remove scratch folders and unfinished files of processes that were killed hours ago.

    What cannot be removed stays: the folder may be read-only.
    """
    oldest = time.time() - _SCRATCH_AGE_S
    for left in [*folder.glob(f"{SCRATCH_PREFIX}*"), *folder.glob(f"*{UNFINISHED_SUFFIX}")]:
        with contextlib.suppress(OSError):  # another process may have been quicker
            if left.lstat().st_mtime >= oldest:
                continue
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink()
