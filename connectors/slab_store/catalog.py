"""What lies where, in memory, for one space: kept up to date by looks at the disk.

`look` and `add` may wait for files; looks of several threads wait for each other. Questions may
come from any thread, the event loop included: they read dictionaries, and touch no file.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from interlace.connectors.slab_store import hits
from interlace.connectors.slab_store.layout import DamagedSlabError, Entry
from interlace.connectors.slab_store.slab import SUFFIX, Slab
from interlace.connectors.slab_store.space import Space

logger = logging.getLogger(__name__)

_MOST_LOADS = 4096
"""Are noted between two looks."""


class Place(NamedTuple):
    """Where a block lies."""

    slab: Slab
    entry: Entry


class Catalog:
    """See the module's docstring."""

    def __init__(
        self, folder: Path, space: Space, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Knows nothing yet, and touches nothing. `folder` is the space's, and may be missing."""
        self._folder = folder
        self._space = space
        self._clock = clock
        self.looked_s = -math.inf
        """When the last look was begun. Any thread may read it."""
        self._look_lock = threading.Lock()  # held while somebody looks
        self._lock = threading.Lock()  # held while the dictionaries change
        self._places: dict[bytes, Place] = {}
        self._spares: dict[bytes, list[Place]] = {}
        """Where else a block lies, of those that lie in several places: few."""
        self._hashes: dict[Slab, list[bytes]] = {}
        """Of blocks that were found in a slab."""
        self._slabs: dict[str, Slab] = {}
        self._ignored: set[str] = set()
        self._complained: set[str] = set()
        """Slabs that somebody has been told of."""
        self._forgotten_ns = -1
        self._lost: set[tuple[str, int]] = set()
        """(slab, record) that turned out damaged."""
        self._used_lock = threading.Lock()  # never held for long: the event loop takes it
        self._used: set[Slab] = set()
        self._loads: deque[bytes] = deque(maxlen=_MOST_LOADS)
        """Since the last look."""

    # ---------------------------------------------------------------- questions, on any thread

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._places)

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether the block is stored, as far as is known."""
        return block_hash in self._places

    def find(self, block_hash: bytes) -> Place | None:
        """Where the block lies, as far as is known."""
        return self._places.get(block_hash)

    @property
    def finder(self) -> Callable[[bytes], Place | None]:
        """What answers as `find` does, for who has hundreds of questions."""
        return self._places.get

    def num_stored(self, block_hashes: Sequence[bytes]) -> int:
        """How many of these, from the first on, are stored."""
        places = self._places
        for count, block_hash in enumerate(block_hashes):
            if block_hash not in places:
                return count
        return len(block_hashes)

    def use_slabs(self, slabs: Iterable[Slab]) -> None:
        """What lies there was used: the next look writes that down, of those that are known."""
        with self._used_lock:
            self._used.update(slab for slab in slabs if self._slabs.get(slab.name) is slab)

    def note_load(self, first_hash: bytes) -> None:
        """A prompt that begins with this block was loaded: the next look writes that down."""
        with self._used_lock:
            self._loads.append(first_hash)

    def forget(self, block_hash: bytes, place: Place) -> None:
        """What lies there is damaged: it is not found again, also not by a later look. The block
        still is, if it lies somewhere else too."""
        with self._lock:
            self._lost.add(_key(place))
            others = [one for one in self._all_of(block_hash) if _key(one) != _key(place)]
            self._put(block_hash, others)

    def forget_before(self, saved_ns: int) -> None:
        """What was saved by then, since the epoch, is not found any more, whoever has saved it."""
        with self._lock:
            self._forgotten_ns = max(self._forgotten_ns, saved_ns)
            for block_hash in list(self._places):
                left = [one for one in self._all_of(block_hash) if one.entry.saved_ns > saved_ns]
                self._put(block_hash, left)

    def _all_of(self, block_hash: bytes) -> list[Place]:
        """Where the block lies, the first one first. Under the lock."""
        first = self._places.get(block_hash)
        return [] if first is None else [first, *self._spares.get(block_hash, ())]

    def _put(self, block_hash: bytes, places: list[Place]) -> None:
        """The block lies there, and nowhere else. Under the lock."""
        if places:
            self._places[block_hash] = places[0]
        else:
            self._places.pop(block_hash, None)
        if len(places) > 1:
            self._spares[block_hash] = places[1:]
        else:
            self._spares.pop(block_hash, None)

    # ---------------------------------------------------------------- looks

    def look(self) -> None:
        """Take note of what others have added and removed. Blocking; any thread, one after the
        other. Raises: `OSError` if the folder cannot be read; a file that cannot is left out."""
        with self._look_lock:
            self.looked_s = self._clock()
            self._look()

    def _look(self) -> None:
        for name, slab in list(self._slabs.items()):
            if not self._is_there(slab):
                self._drop(name)
        names = self._names()
        self._tidy(names)
        for name in sorted(names - self._slabs.keys() - self._ignored):
            self._open(name)
        for slab in list(self._slabs.values()):
            self._add_entries(slab)
        self._write_used()
        self._write_loads()

    def _write_used(self) -> None:
        """Who evicts goes by that, whichever process it is."""
        with self._used_lock:
            used, self._used = self._used, set()
        for slab in used:
            slab.touch()

    def _write_loads(self) -> None:
        """For people who look at the store; nothing depends on it."""
        with self._used_lock:
            loads = list(self._loads)
            self._loads.clear()
        with contextlib.suppress(OSError):  # a store that may be read only, for instance
            hits.note(self._folder, loads)

    def _names(self) -> set[str]:
        try:
            names = {path.name for path in self._folder.iterdir()}
        except FileNotFoundError:  # nobody has written yet
            return set()
        return {name for name in names if name.endswith(SUFFIX)}

    def _tidy(self, names: set[str]) -> None:
        """Keep nothing about files that are gone. Not sooner: a slab that is let go of because it
        could not be looked at may come back, and what is damaged in it still is."""
        self._ignored &= names
        self._complained &= names
        with self._lock:
            self._lost = {one for one in self._lost if one[0] in names}

    @staticmethod
    def _is_there(slab: Slab) -> bool:
        """Whether it is what it was; else nothing of it is to be found any more."""
        try:
            return slab.is_whole and not slab.is_removed
        except OSError:
            return False

    def _open(self, name: str) -> None:
        try:
            slab = Slab.open(self._folder / name)
        except FileNotFoundError:  # removed meanwhile
            return
        except OSError as error:  # too many open files, for instance: it may do later
            self._complain(name, f"it cannot be read for now ({error})")
            return
        except DamagedSlabError as error:
            self._ignore(name, str(error))
            return
        shape = slab.header.shape
        if not self._space.is_named_by(slab.header.space):
            self._ignore(name, "its header says that it holds other KV than its folder")
        elif shape.record_bytes != self._space.record_bytes:
            self._ignore(name, f"its records have {shape.record_bytes} bytes")
        else:
            self._slabs[name] = slab
            return
        slab.close()

    def _ignore(self, name: str, why: str) -> None:
        self._ignored.add(name)
        self._complain(name, f"{why}; remove it, unless another Interlace can read it")

    def _complain(self, name: str, why: str) -> None:
        """Once, though it may happen at every look."""
        if name not in self._complained:
            self._complained.add(name)
            logger.warning("%s is left out: %s", self._folder / name, why)

    def _add_entries(self, slab: Slab) -> None:
        try:
            entries = slab.look()
        except OSError as error:
            self._complain(slab.path.name, f"its index cannot be read for now ({error})")
            return
        if entries:
            self.add(slab, entries)
        if slab.is_sealed:
            slab.park()

    def add(self, slab: Slab, entries: Iterable[Entry]) -> None:
        """These have been published. Of a block that is there twice the first one counts, and the
        other one when that is lost."""
        with self._lock:
            lost = {record for name, record in self._lost if name == slab.path.name}
            hashes = self._hashes.setdefault(slab, [])
            for entry in entries:
                if entry.record not in lost and entry.saved_ns > self._forgotten_ns:
                    hashes.append(entry.block_hash)
                    self._add_place(entry.block_hash, Place(slab, entry))

    def _add_place(self, block_hash: bytes, place: Place) -> None:
        """Under the lock."""
        first = self._places.setdefault(block_hash, place)
        if first is not place and _key(place) not in map(_key, self._all_of(block_hash)):
            self._spares.setdefault(block_hash, []).append(place)

    def _drop(self, name: str) -> None:
        slab = self._slabs.pop(name)
        with self._lock:
            for block_hash in self._hashes.pop(slab, ()):
                others = [one for one in self._all_of(block_hash) if one.slab is not slab]
                self._put(block_hash, others)
        with self._used_lock:
            self._used.discard(slab)
        slab.close()

    def close(self) -> None:
        """Find nothing more, and let go of the files. May be repeated."""
        self._write_used()
        self._write_loads()
        for name in list(self._slabs):
            self._drop(name)


def _key(place: Place) -> tuple[str, int]:
    """Which slab, and which record."""
    return place.slab.path.name, place.entry.record
