"""How often prefixes were loaded from files: a log beside the slabs, to which all engines append.

Each load is an entry: the hash of its prompt's first block. A log of `MOST_BYTES` gives way to a
new one and is kept until the next one is full, so what is counted are the latest tens of
thousands of loads. It is there for people who look at a store; nothing depends on it, so two that
change logs at the same moment may lose one. Blocking file I/O.
"""

from __future__ import annotations

import collections
import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from interlace.connectors.slab_store.files import open_to_read, read_at
from interlace.connectors.slab_store.layout import HASH_BYTES

LOG, OLD_LOG = "hits.log", "hits.old.log"
MOST_BYTES = 1 << 20
"""32,768 loads."""


def note(folder: Path, first_hashes: Iterable[bytes]) -> None:
    """Loads of prompts whose first blocks have these hashes. In one call, so that entries of
    several processes do not mix. Raises: `OSError`."""
    data = b"".join(first_hashes)
    if not data:
        return
    path = folder / LOG
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, flags, 0o600)
    try:
        os.write(fd, data)
        is_full = os.fstat(fd).st_size >= MOST_BYTES
    finally:
        os.close(fd)
    if is_full:
        with contextlib.suppress(FileNotFoundError):  # somebody else has done it
            path.replace(folder / OLD_LOG)


def count(folder: Path) -> collections.Counter[bytes]:
    """First block's hash -> loads that are remembered. What cannot be read counts for nothing."""
    counts = collections.Counter[bytes]()
    for name in (OLD_LOG, LOG):
        with contextlib.suppress(OSError):
            data = _read(folder / name)
            whole = len(data) // HASH_BYTES * HASH_BYTES
            counts.update(data[at : at + HASH_BYTES] for at in range(0, whole, HASH_BYTES))
    return counts


def _read(path: Path) -> bytes:
    """A log is a little longer than `MOST_BYTES` at most; of a longer file the beginning."""
    fd = open_to_read(path)
    try:
        data = bytearray(min(os.fstat(fd).st_size, 2 * MOST_BYTES))
        return bytes(data[: read_at(fd, memoryview(data), 0)])
    finally:
        os.close(fd)


def remove(folder: Path) -> None:
    """Forget them. Raises: `OSError`."""
    for name in (OLD_LOG, LOG):
        with contextlib.suppress(FileNotFoundError):
            (folder / name).unlink()
