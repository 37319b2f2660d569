"""Whole reads and writes at a place of an open file. Blocking; any thread."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

_MOST_BYTES = 1 << 30
"""The kernel moves less than 2 GiB in a call."""


def open_to_read(path: Path) -> int:
    """A descriptor of this file, and of no link. Never waits: a pipe by that name would be waited
    for until somebody writes to it. Raises: `OSError`."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def read_at(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill `buffer`, bytes, from `offset` on; how many bytes there were. Raises: `OSError`."""
    return read_all_at(fd, [buffer], offset)


def read_all_at(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill these, bytes, with what lies from `offset` on, one behind the other, in as few calls as
    may be; how many bytes there were. At most 1,024 buffers. Raises: `OSError`."""
    left = [buffer[first : first + _MOST_BYTES] for buffer in buffers for first in _firsts(buffer)]
    num_read = 0
    while left:
        added = os.preadv(fd, left, offset + num_read)
        if not added:
            break
        num_read += added
        while left and added >= len(left[0]):
            added -= len(left.pop(0))
        if added:
            left[0] = left[0][added:]
    return num_read


def _firsts(buffer: memoryview) -> range:
    return range(0, len(buffer), _MOST_BYTES)


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
