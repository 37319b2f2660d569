"""Whole reads and writes at a place of an open file. Blocking; any thread."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

_MOST_BYTES = 1 << 30
"""The kernel moves less than 2 GiB in a call."""


def read_at(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill `buffer`, bytes, from `offset` on; how many bytes there were. Raises: `OSError`."""
    num_read = 0
    while num_read < len(buffer):
        part = buffer[num_read : num_read + _MOST_BYTES]
        added = os.preadv(fd, [part], offset + num_read)
        if not added:
            break
        num_read += added
    return num_read


def write_at(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """All of these, one behind the other, from `offset` on. Raises: `OSError`."""
    for buffer in buffers:
        written = 0
        while written < len(buffer):
            part = buffer[written : written + _MOST_BYTES]
            added = os.pwrite(fd, part, offset + written)
            if not added:  # no system does that, and none is to make this endless
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            written += added
        offset += len(buffer)
