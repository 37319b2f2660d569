"""Sealed slabs in this process's memory, for a device that copies from there.

The CPU never reads a mapping: if somebody cut the file off, that would end the process. A device
reads what was there, without any error, so who lets it copy checks what has come.

Only slabs of the page cache are mapped, since to register what is not there would read it, on the
thread that waits for it. Blocking file I/O: never on the event loop. No torch.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from interlace.connectors.slab_store.files import open_to_read
from interlace.connectors.slab_store.layout import DamagedSlabError
from interlace.connectors.slab_store.slab import SUFFIX, Slab
from interlace.connectors.slab_store.space import Space


class MappedSlab:
    """The records of a sealed slab that were published. One thread at a time."""

    def __init__(self, name: str, fd: int, rows: npt.NDArray[np.uint8]) -> None:
        """For `open`."""
        self.name = name
        self.rows = rows
        """[records, record_bytes]: for their address. Not to be read."""
        self._fd = fd

    @classmethod
    def open(cls, path: Path, *, first_byte: int, num_records: int, record_bytes: int) -> Self:
        """The first `num_records` records, which lie one behind the other from `first_byte` on.

        Raises: `OSError`; `DamagedSlabError` if the file is shorter.
        """
        num_bytes = num_records * record_bytes
        fd = open_to_read(path)
        try:
            if os.fstat(fd).st_size < first_byte + num_bytes:
                raise DamagedSlabError(f"{path.name} was cut off")
            memory = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=first_byte)
        except ValueError as error:  # Python has looked once more
            os.close(fd)
            raise DamagedSlabError(f"{path.name} was cut off") from error
        except BaseException:
            os.close(fd)
            raise
        rows = np.frombuffer(memory, np.uint8).reshape(num_records, record_bytes)
        return cls(path.name, fd, rows)

    @property
    def address(self) -> int:
        """Where it begins."""
        return int(self.rows.ctypes.data)

    @property
    def num_bytes(self) -> int:
        """That are mapped."""
        return self.rows.nbytes

    @property
    def is_resident(self) -> bool:
        """Whether all of it is in memory."""
        return _num_missing_pages(self.address, self.num_bytes) == 0

    @property
    def is_removed(self) -> bool:
        """Whether the file has no name any more: then it keeps its room until `close`. So too if
        its file system does not know it any more."""
        try:
            return os.fstat(self._fd).st_nlink == 0
        except OSError:
            return True

    def close(self) -> None:
        """Nothing reads it any more: it goes with the last who refers to it. May be repeated."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
            self.rows = self.rows[:0].copy()

    def __repr__(self) -> str:
        return f"<MappedSlab {self.name} {self.num_bytes} bytes>"


class _Sealed(NamedTuple):
    """What never changes of a sealed slab."""

    first_byte: int
    num_records: int


class Outlook(NamedTuple):
    """What should be mapped, and what not."""

    fresh: tuple[MappedSlab, ...]
    """Newly mapped, the one used last first. Whoever looks closes them."""
    stale: frozenset[str]
    """Of those that are held, what others were used after: it is to make room."""


class Scout:
    """Finds the slabs of a space that were used last. One thread at a time."""

    def __init__(
        self,
        folder: Path,
        space: Space,
        most_bytes: int,
        *,
        is_resident: Callable[[MappedSlab], bool] = lambda slab: slab.is_resident,
    ) -> None:
        """Of `folder`, which may be missing, at most `most_bytes` are to be mapped. `is_resident`
        is for tests."""
        self._folder = folder
        self._space = space
        self._most_bytes = most_bytes
        self._is_resident = is_resident
        self._sealed: dict[str, _Sealed | None] = {}
        """By name; None of what cannot be used. Those being written are not in it."""

    def look(self, held: Collection[str]) -> Outlook:
        """Which are to be mapped beside those that are `held`, by their names. Raises: `OSError` if
        the folder cannot be read."""
        names = self._names()
        self._sealed = {name: self._sealed[name] for name in names if name in self._sealed}
        wanted: list[str] = []
        room = self._most_bytes
        for name in names:
            sealed = self._facts(name)
            num_bytes = sealed.num_records * self._space.record_bytes if sealed else 0
            if 0 < num_bytes <= room:
                wanted.append(name)
                room -= num_bytes
            if room < self._space.record_bytes:
                break
        fresh = [self._mapped(name) for name in wanted if name not in held]
        return Outlook(
            tuple(slab for slab in fresh if slab is not None), frozenset(held) - set(wanted)
        )

    def _names(self) -> list[str]:
        """Of slabs, the one used last first."""
        used: list[tuple[int, str]] = []
        try:
            with os.scandir(self._folder) as found:
                for one in found:
                    if one.name.endswith(SUFFIX):
                        used.append((_used_ns(one), one.name))
        except FileNotFoundError:  # nobody has written yet
            return []
        return [name for _, name in sorted(used, reverse=True)]

    def _facts(self, name: str) -> _Sealed | None:
        if name not in self._sealed:
            try:
                with Slab.open(self._folder / name) as slab:
                    if slab.is_being_written:
                        return None
                    entries = slab.look()
                    self._sealed[name] = self._usable(
                        slab, max((e.record for e in entries), default=-1) + 1
                    )
            except (OSError, DamagedSlabError):  # who reads it says what is wrong
                return None
        return self._sealed[name]

    def _usable(self, slab: Slab, num_records: int) -> _Sealed | None:
        """None unless its records lie as those in memory do."""
        shape = slab.header.shape
        lie_alike = shape.pitch == shape.record_bytes == self._space.record_bytes
        if not lie_alike or not self._space.is_named_by(slab.header.space) or not num_records:
            return None
        return _Sealed(shape.data_at, num_records)

    def _mapped(self, name: str) -> MappedSlab | None:
        sealed = self._sealed[name]
        assert sealed is not None, "it is wanted"
        try:
            slab = MappedSlab.open(
                self._folder / name,
                first_byte=sealed.first_byte,
                num_records=sealed.num_records,
                record_bytes=self._space.record_bytes,
            )
        except (OSError, DamagedSlabError):  # removed meanwhile, most likely
            return None
        if self._is_resident(slab):
            return slab
        slab.close()
        return None


def _used_ns(one: os.DirEntry[str]) -> int:
    try:
        return one.stat(follow_symlinks=False).st_mtime_ns
    except OSError:  # gone
        return 0


def _num_missing_pages(address: int, num_bytes: int) -> int:
    """Of this memory, which begins at a page, how many pages would have to be read first."""
    num_pages = -(-num_bytes // mmap.PAGESIZE)
    states = np.zeros(num_pages, np.uint8)
    code = ctypes.CDLL(None).mincore(
        ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_void_p(states.ctypes.data)
    )
    return num_pages - int((states & 1).sum()) if code == 0 else num_pages
