"""Which blocks lie in which folder, of each worker's, as far as this process knows.

Dictionaries in memory: the event loop asks and adds while a lane lists the disk. The lock is only
held while they change; questions take none.
"""

from __future__ import annotations

import collections
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from interlace.connectors.kv_folders.folders import Signature

MAX_LOST = 4096
"""Lost folders that nobody has asked for; beyond it the oldest are forgotten."""


class BlockPlace(NamedTuple):
    """Where a block lies."""

    folder: str
    position: int
    """In the folder's run."""


class _Ban(NamedTuple):
    """A folder that failed to load."""

    signature: Signature
    until: float
    """On the clock."""


class _Content(NamedTuple):
    rank: int
    hashes: tuple[bytes, ...]


_NOTHING = _Content(0, ())


class KnownFolders:
    """Block hash -> place, for each rank. Any thread may call any method."""

    def __init__(self, num_ranks: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._places: list[dict[bytes, tuple[BlockPlace, ...]]] = [{} for _ in range(num_ranks)]
        self._contents: dict[str, _Content] = {}
        self._bans: dict[str, _Ban] = {}
        self._own: dict[str, int] = {}  # folders that were added before they were listed -> round
        self._round = 0
        self._lost: collections.deque[tuple[bytes, ...]] = collections.deque(maxlen=MAX_LOST)

    # ---------------------------------------------------------------- asked by the event loop

    def find(self, block_hash: bytes, rank: int = 0) -> BlockPlace | None:
        """Where that rank's part of the block lies."""
        places = self._places[rank].get(block_hash)
        return places[0] if places else None

    def __contains__(self, block_hash: bytes) -> bool:
        return all(block_hash in places for places in self._places)

    def add(self, rank: int, folder: str, hashes: Sequence[bytes]) -> None:
        """A folder was published: known at once. If it is kept out, the next look at the disk
        tells whether it is another one now."""
        with self._lock:
            ban = self._bans.get(folder)
            if ban is None or ban.until <= self._clock():
                self._own[folder] = self._round
                self._add(folder, _Content(rank, tuple(hashes)))

    def drop(self, folder: str, signature: Signature, for_s: float = math.inf) -> None:
        """A folder failed to load: forgotten, and kept out for so long, or until it is another.

        Then it is looked at again; with `for_s=0`, as soon as anything is.
        """
        with self._lock:
            self._lose(folder)
            self._bans[folder] = _Ban(signature, self._clock() + for_s)

    def take_lost(self) -> list[tuple[bytes, ...]]:
        """Blocks, by folder, that could be found and cannot any more, since the last call."""
        with self._lock:
            lost = list(self._lost)
            self._lost.clear()
        return lost

    # ---------------------------------------------------------------- told by who lists the disk

    def begin_round(self) -> tuple[set[str], list[str]]:
        """A look at all folders begins: parents of folders that were added since the last one, and
        folders whose ban has ended."""
        with self._lock:
            self._round += 1
            now = self._clock()
            lifted = [folder for folder, ban in self._bans.items() if ban.until <= now]
            for folder in lifted:
                del self._bans[folder]
            return {Path(folder).parent.name for folder in self._own}, lifted

    def take_listable(self, bucket: str) -> set[str]:
        """Folders that were added before this round, so that its listing must have them."""
        with self._lock:
            own = {
                folder
                for folder, added_in in self._own.items()
                if added_in < self._round and Path(folder).parent.name == bucket
            }
            for folder in own:
                del self._own[folder]
        return own

    def forget(self, gone: Iterable[str]) -> None:
        """These folders are there no longer."""
        with self._lock:
            for folder in gone:
                self._lose(folder)
                self._bans.pop(folder, None)

    def found(self, rank: int, folder: str, signature: Signature, hashes: Sequence[bytes]) -> None:
        """A folder of ours is there, unless it is the one that is kept out."""
        with self._lock:
            ban = self._bans.get(folder)
            if ban is None or ban.signature != signature:
                self._bans.pop(folder, None)
                self._add(folder, _Content(rank, tuple(hashes)))

    def _add(self, folder: str, content: _Content) -> None:
        self._remove(folder)
        self._contents[folder] = content
        known = self._places[content.rank]
        for position, block_hash in enumerate(content.hashes):
            known[block_hash] = (*known.get(block_hash, ()), BlockPlace(folder, position))

    def _lose(self, folder: str) -> None:
        _, hashes = self._contents.get(folder, _NOTHING)
        before = [block_hash for block_hash in hashes if block_hash in self]
        self._remove(folder)
        lost = tuple(block_hash for block_hash in before if block_hash not in self)
        if lost:
            self._lost.append(lost)

    def _remove(self, folder: str) -> None:
        rank, hashes = self._contents.pop(folder, _NOTHING)
        known = self._places[rank]
        for block_hash in hashes:
            places = tuple(p for p in known.pop(block_hash, ()) if p.folder != folder)
            if places:
                known[block_hash] = places
