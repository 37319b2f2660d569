"""A slab that is written: it has its final size from creation, is added to, and never changed.

Its index has room on the disk from creation, a record takes it when it is written: what no record
came to stays a hole. A record is written first, then its entry: so who is killed in between leaves
a record that nobody knows. The lock says that there is a writer, and goes with the process, however
that ends. A process that is forked shares it, and so gives its share back.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from interlace.connectors.slab_store.checksum import checksum
from interlace.connectors.slab_store.files import write_at
from interlace.connectors.slab_store.layout import NO_PARENT, Entry, SlabHeader, pack_entries
from interlace.connectors.slab_store.slab import SUFFIX

NEW_SUFFIX = ".new"
_open_writers: weakref.WeakSet[SlabWriter] = weakref.WeakSet()
"""Of this process: what is done at a fork can only be said for all of it."""


class NewRecord(NamedTuple):
    """A block on its way to a slab."""

    block_hash: bytes
    parent_hash: bytes | None
    data: npt.NDArray[np.uint8]
    """[record_bytes], contiguous."""
    saved_ns: int | None = None
    """When somebody decided to store it, since the epoch; None: when it is written."""
    first_tokens: tuple[int, ...] = ()
    """See `Entry`."""


class SlabWriter:
    """Blocking file I/O: never on the event loop. One thread at a time."""

    def __init__(self, path: Path, fd: int, header: SlabHeader, now_ns: Callable[[], int]) -> None:
        """For `create`."""
        self.path = path
        self.header = header
        self._fd = fd
        self._now_ns = now_ns
        self._num_written = self._num_published = 0
        _open_writers.add(self)

    @classmethod
    def create(
        cls, folder: Path, header: SlabHeader, now_ns: Callable[[], int] = time.time_ns
    ) -> Self:
        """A slab of its final size in `folder`, which exists; its records have no room on the disk
        yet. `now_ns` is since the epoch.

        Raises: `OSError`; then nothing is left, if that can be had.
        """
        path = folder / f"{now_ns():016x}-{secrets.token_hex(4)}{SUFFIX}"
        new = path.with_name(path.name + NEW_SUFFIX)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(new, flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            # Room for all entries: what has found room for itself can be published.
            os.posix_fallocate(fd, 0, header.shape.data_at)
            os.ftruncate(fd, header.shape.file_bytes)
            write_at(fd, [memoryview(header.to_bytes())], 0)
            new.rename(path)
        except BaseException:
            with contextlib.suppress(OSError):
                new.unlink()
            os.close(fd)
            raise
        return cls(path, fd, header, now_ns)

    @property
    def num_free(self) -> int:
        """Records that may still be added: none after an error."""
        return self.header.shape.num_records - self._num_written

    def add(self, records: Sequence[NewRecord]) -> list[Entry]:
        """Write these, at most `num_free`, and publish them: others may find them from then on.

        Raises: `OSError`. Then some of them may be there, and nothing may be added any more.
        """
        assert 0 < len(records) <= self.num_free
        # Full until it has gone well: what an error leaves is not known, nor ever written over.
        first, self._num_written = self._num_written, self.header.shape.num_records
        entries = self._write(records, first)
        self._num_written = self._num_published = first + len(records)
        return entries

    def _write(self, records: Sequence[NewRecord], first: int) -> list[Entry]:
        shape = self.header.shape
        entries: list[Entry] = []
        for place, one in enumerate(records, first):
            assert one.data.nbytes == shape.record_bytes
            write_at(self._fd, [one.data.reshape(-1).data], shape.record_at(place))
            parent = NO_PARENT if one.parent_hash is None else one.parent_hash
            saved_ns = self._now_ns() if one.saved_ns is None else one.saved_ns
            entries.append(
                Entry(place, one.block_hash, parent, checksum(one.data), saved_ns, one.first_tokens)
            )
        write_at(self._fd, [memoryview(pack_entries(entries))], shape.entry_at(first))
        return entries

    def close(self) -> None:
        """Seal it: nothing is added any more, by anybody. May be repeated."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            # What a file system says only now is damage, and checksums find it.
            with contextlib.suppress(OSError):
                # A child that was forked a moment ago may have the file open too.
                fcntl.flock(fd, fcntl.LOCK_UN)
            with contextlib.suppress(OSError):
                os.close(fd)

    def discard(self) -> None:
        """Seal it, and remove it if nothing was published: who finds no room again and again is
        not to leave a file each time. Never raises."""
        if self._fd >= 0 and not self._num_published:
            with contextlib.suppress(OSError):
                self.path.unlink()
        self.close()

    def _leave_to_parent(self) -> None:
        """In a forked child: the slab is not its own. A lock is let go of by its last holder, so
        this takes nothing from the parent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _leave_all_to_parent() -> None:
    for writer in list(_open_writers):
        writer._leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)
