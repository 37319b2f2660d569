"""The directory of a store: what it is, how much it may hold, and who goes to make room.

Several processes share it. Whoever makes a slab holds a lock meanwhile, so the limits hold for all
of them together. Blocking file I/O: never on the event loop; one thread at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import math
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from interlace.connectors.new_folder import check_writable
from interlace.connectors.slab_store.files import open_to_read
from interlace.connectors.slab_store.layout import HEADER_BYTES, VERSION, SlabHeader
from interlace.connectors.slab_store.slab import SUFFIX
from interlace.connectors.slab_store.slab_writer import NEW_SUFFIX, SlabWriter
from interlace.engine.errors import ConfigError

logger = logging.getLogger(__name__)

MARKER = "interlace-slabs.json"
_LOCK = "interlace-slabs.lock"
_LOCK_S = 2.0
"""For so long others are waited for who make a slab."""
_PAUSE_S = 0.01
_LEFTOVER_S = 60.0
"""So old is a slab being made whose maker is gone."""
_AGAIN_S = 60.0
"""After this time a slab that could not be removed is tried again."""
_BLOCK_BYTES = 512
"""Of `st_blocks`, whatever the file system's blocks are."""
_LET_GO_S = 2.0
"""Within this time processes let go of slabs that were removed: then their room is free."""


class SlabFile(NamedTuple):
    """A file in one of the spaces."""

    path: Path
    num_bytes: int
    """That count: what it holds on the disk, but its whole size while somebody writes to it."""
    used_ns: int
    """When it was last written to, or read: since the epoch."""
    is_new: bool
    """Whether it is being made."""
    reserved_bytes: int = 0
    """Of `num_bytes`, those that its writer has not taken yet."""

    @property
    def disk_bytes(self) -> int:
        """What it holds on the disk."""
        return self.num_bytes - self.reserved_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of the whole directory, with what other processes write there."""

    capacity_bytes: int | None = None
    """None: the file system's."""
    min_free_bytes: int = 0
    """That the file system keeps, whoever else fills it."""


class NoRoomError(Exception):
    """A slab does not fit the limits, and nothing can be removed."""


class Plan(NamedTuple):
    """What goes so that limits are kept."""

    leftovers: tuple[SlabFile, ...]
    victims: tuple[SlabFile, ...]
    """Slabs, the least recently used first. If not enough can go for a slab, none does, or the next
    one would find an empty store, and no room."""
    missing_bytes: int
    """That no slab can be removed for."""

    @property
    def files(self) -> tuple[SlabFile, ...]:
        """All that goes."""
        return self.leftovers + self.victims

    @property
    def shortfall(self) -> str:
        """What to do about missing bytes."""
        return (
            f"{self.missing_bytes} bytes are missing, and not so much can be removed: give the"
            " store more capacity, a lower floor of free bytes, or smaller slabs, or end processes"
            " that write to it."
        )


class SlabDirectory:
    """See the module's docstring."""

    def __init__(
        self,
        root: Path,
        limits: Limits,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Touches nothing yet. `clock` and `sleep`, seconds, are for waits; `now_ns` is since the
        epoch."""
        self.root = root
        self._limits = limits
        self._clock = clock
        self._sleep = sleep
        self._now_ns = now_ns
        self._undeletable: dict[Path, float] = {}
        """Until when, by the clock, it is not tried again."""
        self._unreadable: set[Path] = set()
        self._sealed: set[Path] = set()
        """Slabs with holes that nobody writes to, now or later."""
        self._has_looked = False
        self._is_full = False
        """Whether the file system had no room for the last record, or slab."""
        self._going_bytes = 0
        """Of slabs that were removed lately: others may still have them open."""
        self._gone_by_s = -math.inf
        self.num_evicted = 0
        """Slabs that were removed for others, or had gone when it was their turn; no leftovers."""

    @property
    def num_undeletable(self) -> int:
        """Slabs that could not be removed: they stay, and count."""
        return len(self._undeletable)

    def prepare(self) -> None:
        """Make the directory, or see whether it is one of ours.

        Raises: `ConfigError` if it is something else, or of another version; `OSError`.
        """
        with self._as_directory():
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self._is_ours():
            self._write(self.root / MARKER)

    def check(self) -> None:
        """Whether `prepare` would do, as far as can be told: changes nothing. Raises: as that."""
        with self._as_directory():
            if self.root.is_dir() and self._is_ours():
                return
            check_writable(self.root)

    @contextlib.contextmanager
    def _as_directory(self) -> Iterator[None]:
        """Raises: `ConfigError` for errors that say that it is none."""
        try:
            yield
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(
                f"{self.root} is no directory, and cannot become one ({error}): give the store"
                " another one."
            ) from error

    def _is_ours(self) -> bool:
        """False if it is empty, so that it can become ours. Raises: as `prepare`."""
        marker = self.root / MARKER
        try:
            self._check(marker.read_bytes())
        except FileNotFoundError:
            if all(path.name.startswith(".") for path in self.root.iterdir()):
                return False
            self._check_again(marker)
        return True

    def _check_again(self, marker: Path) -> None:
        """Another process may have made it just now."""
        try:
            self._check(marker.read_bytes())
        except FileNotFoundError:
            raise ConfigError(
                f"{self.root} holds other things than a store of slabs (it has no {MARKER}), for"
                " instance ExampleConnector's folders: give the store a directory of its own."
            ) from None

    def _check(self, data: bytes) -> None:
        try:
            version = json.loads(data)["version"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"{self.root / MARKER} cannot be read ({error}): give the store another directory,"
                " or remove this one."
            ) from error
        if version != VERSION:
            raise ConfigError(
                f"{self.root} holds slabs of version {version}, and this Interlace reads and writes"
                f" version {VERSION}: give the store another directory."
            )

    def _write(self, marker: Path) -> None:
        text = json.dumps({"format": "interlace slabs", "version": VERSION}).encode()
        new = marker.with_name(f".{marker.name}-{secrets.token_hex(4)}")
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(text)
            new.replace(marker)
        except BaseException:
            with contextlib.suppress(OSError):
                new.unlink()
            raise

    # ---------------------------------------------------------------- what there is

    def spaces(self) -> list[Path]:
        """Folders of slabs. Raises: `OSError`."""
        with os.scandir(self.root) as found:
            return [
                Path(one.path)
                for one in found
                if one.is_dir(follow_symlinks=False) and not one.name.startswith(".")
            ]

    def slabs(self) -> list[SlabFile]:
        """All slabs of all spaces, the least recently used first. A space that cannot be read is
        passed over. Raises: `OSError` if the directory cannot."""
        files = [file for space in self.spaces() for file in self._slabs_of(space)]
        self._sealed &= {file.path for file in files}
        return sorted(files, key=lambda file: (file.used_ns, file.path.name))

    def _slabs_of(self, space: Path) -> list[SlabFile]:
        try:
            with os.scandir(space) as found:
                return [file for one in found if (file := self._slab_file(one)) is not None]
        except FileNotFoundError:
            return []
        except OSError as error:  # somebody else's, for instance
            if space not in self._unreadable:
                self._unreadable.add(space)
                logger.warning("%s cannot be read, and does not count: %s", space, error)
            return []

    def _slab_file(self, one: os.DirEntry[str]) -> SlabFile | None:
        is_new = one.name.endswith(SUFFIX + NEW_SUFFIX)
        if not is_new and not one.name.endswith(SUFFIX):
            return None
        path = Path(one.path)
        try:
            status = one.stat(follow_symlinks=False)
            size = status.st_size
            # Blocks beyond its size only describe it, or are what the file system rounds up to.
            held = min(status.st_blocks * _BLOCK_BYTES, size)
            if not stat.S_ISREG(status.st_mode):
                return None
            if held < size and self._may_grow(path, is_new=is_new):
                return SlabFile(path, size, status.st_mtime_ns, is_new, size - held)
        except OSError:  # gone, most likely
            return None
        if held < min(size, HEADER_BYTES):
            # It has a header, so the file system does not tell what it holds, or not yet.
            held = size
        return SlabFile(path, held, status.st_mtime_ns, is_new)

    def _may_grow(self, path: Path, *, is_new: bool) -> bool:
        """Whether somebody writes to a slab with holes, as far as can be told. Of one that is
        sealed nobody is asked again. Raises: `FileNotFoundError`."""
        if path in self._sealed:
            return False
        try:
            if has_writer(path):
                return True
        except FileNotFoundError:
            raise
        except OSError:  # too many open files, for instance
            return True
        if not is_new:
            self._sealed.add(path)
        return False

    # ---------------------------------------------------------------- room

    def create_slab(self, space: str, header: SlabHeader) -> SlabWriter:
        """A new slab in the space of that name; others go for it, if they have to.

        Raises: `NoRoomError` if the limits leave no room, or the file system does not; `OSError`.
        """
        try:
            return self._create_slab(self.root / space, header)
        except OSError as error:
            if is_no_room(error):
                self.note_full()
                raise NoRoomError(
                    f"the file system has no room ({error}): give the store a smaller capacity, or"
                    " more of the disk."
                ) from error
            raise

    def _create_slab(self, folder: Path, header: SlabHeader) -> SlabWriter:
        folder.mkdir(mode=0o700, exist_ok=True)
        with self._locked():
            self._make_room(header.shape.file_bytes)
            return SlabWriter.create(folder, header, self._now_ns)

    def note_full(self) -> None:
        """The file system had no room for a record, whatever it says is free, a quota for instance:
        the next slab takes the room of others, as far as there are any."""
        self._is_full = True

    def collect(self) -> list[SlabFile]:
        """Let go what exceeds the limits, and what was left over; what was removed.

        Raises: `NoRoomError` if the limits cannot be kept; `OSError`.
        """
        with self._locked():
            return self._make_room(0)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Nobody else makes a slab, or room for one. Raises: `NoRoomError`, `OSError`."""
        if not self._has_looked:  # this asks for the writer of each slab with holes: nobody waits
            self._has_looked = True
            self.slabs()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self.root / _LOCK, flags, 0o600)
        try:
            until_s = self._clock() + _LOCK_S
            while not _try_lock(fd):
                if self._clock() >= until_s:
                    raise NoRoomError(
                        f"others have been making a slab for {_LOCK_S:g} s: if that goes on, end"
                        f" the process that holds a lock on {self.root / _LOCK}."
                    )
                self._sleep(_PAUSE_S)
            yield
        finally:
            # A child that was forked meanwhile has the file open too, for as long as it lives.
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def _make_room(self, num_bytes: int) -> list[SlabFile]:
        """Remove leftovers, and what else has to go so that so many bytes more fit."""
        files = self.slabs()
        for path in self._undeletable.keys() - {file.path for file in files}:
            del self._undeletable[path]
        excess = self._excess(files, num_bytes)
        removed: list[SlabFile] = []
        while True:
            plan = self._plan(files, excess, num_bytes)
            gone = [file for file in plan.leftovers if self._remove(file)]
            if plan.missing_bytes and not plan.victims:
                raise NoRoomError(plan.shortfall)
            evicted = [file for file in plan.victims if self._remove(file)]
            self.num_evicted += len(evicted)
            self._note_going(_total(evicted))
            gone += evicted
            removed += gone
            excess -= _total(gone)
            left = set(files).difference(gone)
            files = [file for file in files if file in left]
            if not plan.missing_bytes and len(gone) == len(plan.files):
                break
        if num_bytes:
            self._is_full = False
            self._check_floor(files, num_bytes)
        return removed

    def plan(self, num_bytes: int = 0) -> Plan:
        """What has to go so that so many bytes more fit. Removes nothing. Raises: `OSError`."""
        files = self.slabs()
        return self._plan(files, self._excess(files, num_bytes), num_bytes)

    def _plan(self, files: list[SlabFile], excess: int, num_bytes: int) -> Plan:
        leftovers = [file for file in files if self.is_leftover(file)]
        excess -= _total(leftovers)
        old = [file for file in files if not file.is_new]
        victims = self._choose(old, excess)
        if self._is_full and _total(victims) < num_bytes:
            more = self._choose(old, num_bytes)
            victims = more if _total(more) >= num_bytes else victims
        missing_bytes = max(0, excess - _total(victims))
        if missing_bytes and num_bytes:
            victims = []
        return Plan(tuple(leftovers), tuple(victims), missing_bytes)

    def is_leftover(self, file: SlabFile) -> bool:
        """Whether it was being made by a process that is gone."""
        is_old = self._now_ns() - file.used_ns > _LEFTOVER_S * 1e9
        return file.is_new and is_old and self._may_go(file)

    def _choose(self, files: list[SlabFile], num_bytes: int) -> list[SlabFile]:
        """Which of these go, from the first on, to have so many bytes, or what there is."""
        chosen: list[SlabFile] = []
        held = 0
        for file in files:
            if held >= num_bytes:
                break
            if self._may_go(file):
                chosen.append(file)
                held += file.num_bytes
        return chosen

    def _excess(self, files: list[SlabFile], num_bytes: int) -> int:
        """Bytes that must go so that so many more fit."""
        excess = self._limits.min_free_bytes + num_bytes - self._free_bytes(files)
        # What is about to be free need not be made free again.
        excess -= self._going_bytes if self._clock() < self._gone_by_s else 0
        if self._limits.capacity_bytes is not None:
            held = _total(files)
            excess = max(excess, held + num_bytes - self._limits.capacity_bytes)
        return excess

    def _free_bytes(self, files: Iterable[SlabFile]) -> int:
        """That no writer is about to take."""
        status = os.statvfs(self.root)
        # Looked at again, and now: what they have taken since they were listed is not free any
        # more, and would be missing twice.
        reserved = sum(_reserved_bytes(file) for file in files if file.reserved_bytes)
        return status.f_bavail * status.f_frsize - reserved

    def _note_going(self, num_bytes: int) -> None:
        if self._clock() >= self._gone_by_s:
            self._going_bytes = 0
        self._going_bytes += num_bytes
        self._gone_by_s = self._clock() + _LET_GO_S

    def _check_floor(self, files: list[SlabFile], num_bytes: int) -> None:
        """What was removed is free only when nobody has it open. Raises: `NoRoomError`."""
        if self._free_bytes(files) - num_bytes < self._limits.min_free_bytes:
            raise NoRoomError(
                "other processes have not let go of removed slabs yet: try again in a second."
            )
        self._going_bytes = 0

    def _may_go(self, file: SlabFile) -> bool:
        """Unless somebody writes to it, or it cannot be removed."""
        if file.reserved_bytes:
            return False
        if self._clock() < self._undeletable.get(file.path, -math.inf):
            return False
        try:
            return not has_writer(file.path)
        except FileNotFoundError:
            return True
        except OSError as error:
            self._keep(file, error)
            return False

    def _remove(self, file: SlabFile) -> bool:
        """What is gone already counts too."""
        try:
            file.path.unlink(missing_ok=True)
        except OSError as error:
            self._keep(file, error)
            return False
        return True

    def _keep(self, file: SlabFile, error: OSError) -> None:
        if file.path not in self._undeletable:
            logger.warning("%s cannot be removed, and stays: %s", file.path, error)
        self._undeletable[file.path] = self._clock() + _AGAIN_S


def _total(files: Iterable[SlabFile]) -> int:
    return sum(file.num_bytes for file in files)


def _reserved_bytes(file: SlabFile) -> int:
    """As it is now."""
    try:
        held = file.path.stat(follow_symlinks=False).st_blocks * _BLOCK_BYTES
    except OSError:  # gone, most likely
        return 0
    return max(0, file.num_bytes - held)


def _try_lock(fd: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_no_room(error: Exception) -> bool:
    """Whether there was no room: on the disk, in a quota, or for a file of such a size."""
    codes = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return isinstance(error, OSError) and error.errno in codes


def has_writer(path: Path) -> bool:
    """Whether a living process writes to the slab. Never waits. Raises: `OSError`."""
    fd = open_to_read(path)
    try:
        # Shared: readers ask in the same way, and must not take each other for a writer.
        return not _try_lock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)
