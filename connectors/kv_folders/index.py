"""Which blocks lie in which folder: dictionaries in memory, kept up to date by a reader thread.

Hashes come from manifests whose identity is ours, never from names. The event loop asks and adds;
it never waits for the thread, which holds the lock only while it changes dictionaries.
"""

from __future__ import annotations

import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from interlace.connectors.kv_folders.counters import Tally
from interlace.connectors.kv_folders.folders import KVFolders, Signature
from interlace.connectors.kv_folders.tensor_file import DamagedFileError

logger = logging.getLogger(__name__)

_SETTLED_NS = 3 * 10**9
"""A listing is trusted once its folder has not changed for so long: time stamps are coarse."""
_BUCKET = re.compile(r"[0-9a-f]{2}")
_FOLDER = re.compile(r"[0-9a-f]{64}")
_UNKNOWN = -1
"""The time stamp of a bucket that could not be had: equal to none, so the bucket is listed."""


class BlockPlace(NamedTuple):
    """Where a block lies."""

    folder: str
    position: int
    """In the folder's run."""


class _Ban(NamedTuple):
    """A folder that failed to load."""

    signature: Signature
    until: float
    """On the index's clock."""


class FolderIndex:
    """Block hash -> place. Any thread may ask."""

    def __init__(
        self,
        folders: KVFolders,
        tally: Tally,
        *,
        refresh_s: float,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Does no I/O and starts nothing."""
        self._folders = folders
        self._tally = tally
        self._refresh_s = refresh_s
        self._clock = clock
        self._ready_at = clock() + deadline_s
        self._is_built = False
        self._lock = threading.Lock()
        self._places: dict[bytes, tuple[BlockPlace, ...]] = {}
        self._hashes: dict[str, tuple[bytes, ...]] = {}  # folder -> its blocks
        self._bans: dict[str, _Ban] = {}
        self._own: dict[str, int] = {}  # folders that were added before they were listed -> round
        self._round = 0
        # The reader thread's own: bucket -> its time stamp, if all in it was seen and will not
        # change unseen; and bucket -> folders that were looked into.
        self._stamps: dict[str, int] = {}
        self._found: dict[str, dict[str, Signature]] = {}
        self._has_complained = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="interlace-kv-index", daemon=True)

    # ---------------------------------------------------------------- asked by the event loop

    @property
    def is_ready(self) -> bool:
        """Whether the first look at the disk has ended, or is not waited for any longer."""
        return self._is_built or self._clock() >= self._ready_at

    def find(self, block_hash: bytes) -> BlockPlace | None:
        """Where the block lies, as far as we know."""
        places = self._places.get(block_hash)
        return places[0] if places else None

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._places

    def add(self, folder: str, hashes: Sequence[bytes]) -> None:
        """A folder was published: known at once. If it is kept out, the next look at the disk
        tells whether it is another one now."""
        with self._lock:
            ban = self._bans.get(folder)
            if ban is None or ban.until <= self._clock():
                self._own[folder] = self._round
                self._add(folder, tuple(hashes))

    def drop(self, folder: str, signature: Signature, for_s: float = math.inf) -> None:
        """A folder failed to load: forgotten, and kept out for so long, or until it is another.

        Then it is looked at again; with `for_s=0`, as soon as anything is.
        """
        with self._lock:
            self._remove(folder)
            self._bans[folder] = _Ban(signature, self._clock() + for_s)

    def _add(self, folder: str, hashes: tuple[bytes, ...]) -> None:
        self._remove(folder)
        self._hashes[folder] = hashes
        for position, block_hash in enumerate(hashes):
            others = self._places.get(block_hash, ())
            self._places[block_hash] = (*others, BlockPlace(folder, position))

    def _remove(self, folder: str) -> None:
        for block_hash in self._hashes.pop(folder, ()):
            places = self._places.pop(block_hash, ())
            places = tuple(place for place in places if place.folder != folder)
            if places:
                self._places[block_hash] = places

    # ---------------------------------------------------------------- the reader thread

    def start(self) -> None:
        """Start the reader thread."""
        self._thread.start()

    def close(self) -> None:
        """Let the thread end. Does not wait: a hung mount must not hold up anyone."""
        self._stop.set()

    def _run(self) -> None:
        while True:
            try:
                self.refresh()
            except Exception as error:  # noqa: BLE001 - what is stored later must still be found
                self._complain(self._folders.base, error)
            self._is_built = True
            if self._stop.wait(self._refresh_s):
                return

    def _complain(self, path: str | Path, error: Exception) -> None:
        """Once. Whatever it is, it is tried again at each look, and hides nothing else."""
        if not self._has_complained:
            self._has_complained = True
            logger.warning(
                "Stored KV in %s cannot be looked up (%s); until that changes, none of it is"
                " loaded. It is tried again each time; further errors are not logged.",
                path,
                error,
                exc_info=not isinstance(error, OSError),
            )

    def refresh(self) -> None:
        """Look once at all folders that changed. File I/O: reader thread or tests only."""
        self._round += 1
        self._lift_bans()
        stamps = self._bucket_stamps()
        with self._lock:
            known = {Path(folder).parent.name for folder in self._own}
        for bucket in (known | self._found.keys() | self._stamps.keys()) - stamps.keys():
            self._take(bucket, {})
            self._stamps.pop(bucket, None)
        for bucket, stamp in stamps.items():
            if self._stop.is_set():
                return
            if self._stamps.get(bucket) != stamp:
                self._look_into(bucket, stamp)

    def _lift_bans(self) -> None:
        """Folders that have been kept out for long enough are looked at again."""
        now = self._clock()
        with self._lock:
            lifted = [folder for folder, ban in self._bans.items() if ban.until <= now]
            for folder in lifted:
                del self._bans[folder]
        for folder in lifted:
            bucket = Path(folder).parent.name
            self._found.get(bucket, {}).pop(folder, None)
            self._stamps.pop(bucket, None)

    def _bucket_stamps(self) -> dict[str, int]:
        """Bucket -> when a folder last came to it or went from it, taken before it is listed."""
        stamps = {}
        try:
            with os.scandir(self._folders.base) as entries:
                for entry in entries:
                    if _BUCKET.fullmatch(entry.name):
                        status = self._status(entry)
                        if status is not None:
                            stamps[entry.name] = status.mtime_ns
        except FileNotFoundError:
            return {}
        return stamps

    def _status(self, entry: os.DirEntry[str]) -> Signature | None:
        """Of a folder; None for what is none. `_UNKNOWN` if the entry cannot be looked at."""
        try:
            if not entry.is_dir():
                return None
            status = entry.stat()
        except FileNotFoundError:  # it goes just now
            return None
        except OSError as error:
            self._complain(entry.path, error)
            return Signature(0, _UNKNOWN)
        return Signature(status.st_ino, status.st_mtime_ns)

    def _look_into(self, bucket: str, stamp: int) -> None:
        """List one bucket. One that cannot be listed keeps what is known of it."""
        try:
            is_whole = self._take(bucket, self._listing(bucket))
        except OSError as error:
            if not isinstance(error, FileNotFoundError):  # that one goes just now
                self._complain(self._folders.base / bucket, error)
            is_whole = False
        if is_whole and stamp != _UNKNOWN and time.time_ns() - stamp > _SETTLED_NS:
            self._stamps[bucket] = stamp
        else:
            self._stamps.pop(bucket, None)

    def _listing(self, bucket: str) -> dict[str, Signature]:
        """Folder -> signature. Raises: `OSError`."""
        with os.scandir(self._folders.base / bucket) as entries:
            statuses = {e.path: self._status(e) for e in entries if _FOLDER.fullmatch(e.name)}
        return {path: status for path, status in statuses.items() if status is not None}

    def _take(self, bucket: str, listing: dict[str, Signature]) -> bool:
        """Make the bucket's part of the index what the listing says; whether all could be seen."""
        found = self._found.pop(bucket, {})
        self._forget((found.keys() | self._listable(bucket)) - listing.keys())
        seen = {
            folder: signature
            for folder, signature in listing.items()
            if found.get(folder) == signature or self._inspect(folder, signature)
        }
        if seen:
            self._found[bucket] = seen
        return len(seen) == len(listing)

    def _listable(self, bucket: str) -> set[str]:
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

    def _forget(self, gone: Iterable[str]) -> None:
        with self._lock:
            for folder in gone:
                self._remove(folder)
                self._bans.pop(folder, None)

    def _inspect(self, folder: str, signature: Signature) -> bool:
        """Read a new folder's manifest and index it; remove the folder if it is damaged.

        Whether that was done: if not, the folder counts as not seen.
        """
        try:
            manifest = self._folders.check(Path(folder))
        except DamagedFileError as error:
            self._forget([folder])
            if self._folders.remove(Path(folder), signature):
                self._tally.add(damaged_folders=1)
                logger.warning("Removed the damaged folder %s: %s.", folder, error)
            return True
        except Exception as error:  # noqa: BLE001 - whatever it is, other folders must be found
            self._forget([folder])
            if not isinstance(error, FileNotFoundError):  # that one goes just now
                self._complain(folder, error)
            return False
        if manifest.identity != self._folders.identity:
            self._tally.add(foreign_folders=1)
            return True
        with self._lock:
            ban = self._bans.get(folder)
            if ban is None or ban.signature != signature:
                self._bans.pop(folder, None)
                self._add(folder, manifest.block_hashes)
        return True
