"""A slab that is read. What is open stays readable, also when others have removed the file."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from interlace.connectors.slab_store.checksum import checksum
from interlace.connectors.slab_store.files import open_to_read, read_all_at, read_at
from interlace.connectors.slab_store.layout import (
    ENTRY_BYTES,
    HEADER_BYTES,
    DamagedRecordError,
    DamagedSlabError,
    Entry,
    Parsed,
    SlabHeader,
    parse_entries,
)

SUFFIX = ".slab"
_TOUCH_S = 1.0
_LOOK_RECORDS = 512
"""So many places of an index are read at a time: one that fills up is asked often, and is mostly
empty."""


class Slab:
    """Blocking file I/O: never on the event loop. Any one thread at a time, but for `read`."""

    def __init__(self, path: Path, fd: int, header: SlabHeader) -> None:
        """For `open`."""
        self.path = path
        self.name = path.name
        self.header = header
        self.is_sealed = False
        """Whether nothing will be added. See `look`."""
        self._fd = fd
        self._num_seen = 0
        self._touched_s = -math.inf
        self._lock = threading.Lock()
        self._num_readers = 0
        self._is_closed = self._is_parked = False
        self._identity = _identity(os.fstat(fd))

    @classmethod
    def open(cls, path: Path) -> Self:
        """Raises: `OSError`; `DamagedSlabError` if it is no slab, or was cut off."""
        fd = open_to_read(path)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise DamagedSlabError("it is no file")
            data = bytearray(HEADER_BYTES)
            length = read_at(fd, memoryview(data), 0)
            header = SlabHeader.from_bytes(bytes(data[:length]))
            size = os.fstat(fd).st_size
            if size != header.shape.file_bytes:
                raise DamagedSlabError(f"it has {size} bytes, and not {header.shape.file_bytes}")
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd, header)

    @property
    def file_bytes(self) -> int:
        """Of the file."""
        return self.header.shape.file_bytes

    @property
    def is_removed(self) -> bool:
        """Whether the file has no name any more, or not this one. Raises: `OSError`."""
        try:
            status = self._status()
        except FileNotFoundError:
            return True
        return status.st_nlink == 0 or _identity(status) != self._identity

    @property
    def is_whole(self) -> bool:
        """Whether the file still has its size. Raises: `OSError`."""
        return self._status().st_size == self.file_bytes

    def _status(self) -> os.stat_result:
        with self._lock:
            if self._fd >= 0:
                return os.fstat(self._fd)
            if self._is_closed:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF), str(self.path))
        return self.path.stat(follow_symlinks=False)

    def park(self) -> None:
        """Keep the file open only while it is read from now on: a store may have more slabs than a
        process may have files, and what is removed while it is open keeps its room. So what others
        remove cannot be read any more. For who looks at the index no more."""
        with self._lock:
            self._is_parked = True
            self._let_go()

    def look(self, *, with_tokens: bool = False) -> list[Entry]:
        """The entries that have come since the last look; `with_tokens`: with first tokens, see
        `Entry`. Raises: `OSError`; nothing is lost."""
        if self.is_sealed or self._is_closed or self._is_parked:
            return []
        # Asked first: what is added in between is seen by this look, or by a later one.
        is_sealed = not self.is_being_written
        entries: list[Entry] = []
        num_seen = self._num_seen
        while left := self.header.shape.num_records - num_seen:
            count = min(_LOOK_RECORDS, left)
            parsed = self._parse(num_seen, count, is_sealed=is_sealed, with_tokens=with_tokens)
            entries += parsed.entries
            num_seen += parsed.num_seen
            if parsed.num_seen < count:
                break
        self._num_seen, self.is_sealed = num_seen, is_sealed
        return entries

    def _parse(
        self, first_record: int, count: int, *, is_sealed: bool, with_tokens: bool
    ) -> Parsed:
        """This part of the index. Raises: `OSError`."""
        data = bytearray(count * ENTRY_BYTES)
        at = self.header.shape.entry_at(first_record)
        length = read_at(self._fd, memoryview(data), at)
        whole = bytes(data[: length // ENTRY_BYTES * ENTRY_BYTES])
        return parse_entries(whole, first_record, is_sealed=is_sealed, with_tokens=with_tokens)

    @property
    def is_being_written(self) -> bool:
        """Whether its writer lives: it holds a lock on the file. Raises: `OSError`."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return False

    def read(self, entry: Entry, buffer: npt.NDArray[np.uint8]) -> None:
        """A record into `buffer`, uint8 [record_bytes], contiguous, and check it. Any thread.

        Raises: `DamagedSlabError` if it is not what was written; what is in `buffer` then is of no
        use. `OSError`.
        """
        shape = self.header.shape
        assert buffer.nbytes == shape.record_bytes, "a buffer holds one record"
        with self._reading() as fd:
            view = buffer.reshape(-1).data
            length = read_at(fd, view, shape.record_at(entry.record))
        if length != shape.record_bytes:
            raise DamagedRecordError(self.path.name, entry.record, "is cut off")
        if checksum(buffer) != entry.checksum:
            raise DamagedRecordError(
                self.path.name, entry.record, "has another checksum than its entry"
            )

    def read_run(self, first_record: int, buffers: Sequence[npt.NDArray[np.uint8]]) -> int:
        """Neighbouring records from that one on, each into its buffer as for `read`, in one call;
        how many there were whole. Nobody has checked them. Any thread.

        Raises: as `read`.
        """
        shape = self.header.shape
        assert shape.pitch == shape.record_bytes or len(buffers) == 1, "they are neighbours"
        views = [buffer.reshape(-1).data for buffer in buffers]
        with self._reading() as fd:
            length = read_all_at(fd, views, shape.record_at(first_record))
        return length // shape.record_bytes

    @contextlib.contextmanager
    def _reading(self) -> Iterator[int]:
        """The file, which stays open. Raises: `DamagedSlabError` if it is closed, or another one;
        `OSError`."""
        with self._lock:
            if self._is_closed:
                raise DamagedSlabError(f"{self.path.name} is closed")
            if self._fd < 0:
                self._fd = self._opened_again()
            self._num_readers += 1
            fd = self._fd
        try:
            yield fd
        finally:
            with self._lock:
                self._num_readers -= 1
                self._let_go()

    def _opened_again(self) -> int:
        """A parked one. Raises: `DamagedSlabError`, `OSError`."""
        fd = open_to_read(self.path)
        if _identity(os.fstat(fd)) != self._identity:
            os.close(fd)
            raise DamagedSlabError(f"{self.path.name} is another file now")
        return fd

    def _let_go(self) -> None:
        """Close the file, if nobody needs it. Under the lock."""
        is_free = self._is_closed or self._is_parked
        if is_free and not self._num_readers and self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def touch(self, clock: Callable[[], float] = time.monotonic) -> None:
        """It is used: it goes later than others. Written down now and then; never raises."""
        now_s = clock()
        if self._is_closed or now_s - self._touched_s < _TOUCH_S:
            return
        self._touched_s = now_s
        with contextlib.suppress(OSError):  # a store that may be read only, for instance
            os.utime(self.path if self._fd < 0 else self._fd)

    def close(self) -> None:
        """Read nothing more. The file is let go of when reads under way have ended, by the last of
        them. May be repeated."""
        with self._lock:
            self._is_closed = True
            self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Slab {self.path.name} seen={self._num_seen} of {self.header.shape.num_records}>"


def _identity(status: os.stat_result) -> tuple[int, int]:
    """Which file it is."""
    return status.st_dev, status.st_ino
