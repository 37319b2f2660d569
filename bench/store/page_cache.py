"""What of files the system keeps in memory, and how to have it dropped. Linux; blocks on files.

A file that was written must reach the disk before its pages can go. Some file systems, tmpfs for
one, have no disk: they keep all pages, whatever they are asked.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from interlace.connectors.slab_store.slab import SUFFIX


def slab_files(folder: Path) -> list[Path]:
    """All slabs below `folder`."""
    return sorted(folder.rglob(f"*{SUFFIX}"))


def drop_pages(paths: Iterable[Path]) -> None:
    """Write what is dirty in these files, and let the system forget their pages, if it can.

    Raises: `OSError`.
    """
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def resident_bytes(paths: Iterable[Path]) -> int:
    """What of these files lies in memory, in whole pages. Touches none of it.

    Raises: `OSError`.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    return sum(_resident_pages(libc, path) for path in paths) * mmap.PAGESIZE


def _resident_pages(libc: ctypes.CDLL, path: Path) -> int:
    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if not num_bytes:
            return 0
        with mmap.mmap(file.fileno(), num_bytes, prot=mmap.PROT_READ) as mapping:
            pages = np.zeros(-(-num_bytes // mmap.PAGESIZE), np.uint8)
            view = np.frombuffer(mapping, np.uint8)
            code = libc.mincore(
                ctypes.c_void_p(view.ctypes.data),
                ctypes.c_size_t(num_bytes),
                ctypes.c_void_p(pages.ctypes.data),
            )
            del view  # else the mapping could not be closed
    if code != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    return int(np.count_nonzero(pages & 1))
