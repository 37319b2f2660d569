"""Which blocks lie in which folder: dictionaries in memory, kept up to date by a reader thread.

Hashes come from manifests whose identity is ours, never from names. The event loop asks and adds;
it never waits for the thread, which holds the lock only while it changes dictionaries.
"""

from __future__ import annotations

import logging
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


class BlockPlace(NamedTuple):
    """Where a block lies."""

    folder: str
    position: int
    """In the folder's run."""


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
        self._banned: dict[str, Signature] = {}  # folders that failed, and could not be removed
        self._own: dict[str, int] = {}  # folders that were added before they were listed -> round
        self._round = 0
        # The reader thread's own: bucket -> its time stamp, and what was found in it.
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
        """A folder was published: known at once."""
        with self._lock:
            self._banned.pop(folder, None)
            self._own[folder] = self._round
            self._add(folder, tuple(hashes))

    def drop(self, folder: str, signature: Signature) -> None:
        """A folder failed to load: forgotten, and kept out as long as it is the same one."""
        with self._lock:
            self._remove(folder)
            self._banned[folder] = signature

    def _add(self, folder: str, hashes: tuple[bytes, ...]) -> None:
        self._remove(folder)
        self._hashes[folder] = hashes
        for position, block_hash in enumerate(hashes):
            others = self._places.get(block_hash, ())
            self._places[block_hash] = (*others, BlockPlace(folder, position))

    def _remove(self, folder: str) -> None:
        for block_hash in self._hashes.pop(folder, ()):
            places = tuple(p for p in self._places[block_hash] if p.folder != folder)
            if places:
                self._places[block_hash] = places
            else:
                del self._places[block_hash]

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
                self._complain(error)
            self._is_built = True
            if self._stop.wait(self._refresh_s):
                return

    def _complain(self, error: Exception) -> None:
        """Once. The thread lives on, and tries again each time."""
        if not self._has_complained:
            self._has_complained = True
            logger.warning(
                "Stored KV in %s cannot be looked up (%s); until that changes, none is loaded.",
                self._folders.base,
                error,
                exc_info=not isinstance(error, OSError),
            )

    def refresh(self) -> None:
        """Look once at all folders that changed. File I/O: reader thread or tests only."""
        self._round += 1
        stamps = self._bucket_stamps()
        with self._lock:
            known = {Path(folder).parent.name for folder in self._own} | set(self._stamps)
        for bucket in known - set(stamps):
            self._take(bucket, {})
            self._stamps.pop(bucket, None)
        for bucket, stamp in stamps.items():
            if self._stop.is_set():
                return
            if self._stamps.get(bucket) != stamp:
                self._take(bucket, self._listing(bucket))
                settled = time.time_ns() - stamp > _SETTLED_NS
                self._stamps[bucket] = stamp if settled else -1

    def _bucket_stamps(self) -> dict[str, int]:
        """Bucket -> when a folder last came to it or went from it, taken before it is listed."""
        try:
            with os.scandir(self._folders.base) as entries:
                return {e.name: e.stat().st_mtime_ns for e in entries if _BUCKET.fullmatch(e.name)}
        except FileNotFoundError:
            return {}

    def _listing(self, bucket: str) -> dict[str, Signature]:
        """Folder -> signature."""
        try:
            with os.scandir(self._folders.base / bucket) as entries:
                statuses = {e.path: e.stat() for e in entries if _FOLDER.fullmatch(e.name)}
        except FileNotFoundError:  # a bucket or folder that goes while we look: next time
            return self._found.get(bucket, {})
        return {path: Signature(s.st_ino, s.st_mtime_ns) for path, s in statuses.items()}

    def _take(self, bucket: str, listing: dict[str, Signature]) -> None:
        """Make the bucket's part of the index what the listing says."""
        found = self._found.pop(bucket, {})
        self._forget((found.keys() | self._listable(bucket)) - listing.keys())
        for folder, signature in listing.items():
            if found.get(folder) != signature:
                self._inspect(folder, signature)
        if listing:
            self._found[bucket] = listing

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
                self._banned.pop(folder, None)

    def _inspect(self, folder: str, signature: Signature) -> None:
        """Read a new folder's manifest and index it; remove the folder if it is damaged."""
        try:
            manifest = self._folders.check(Path(folder))
        except DamagedFileError as error:
            self._forget([folder])
            if self._folders.remove(Path(folder), signature):
                self._tally.add(damaged_folders=1)
                logger.warning("Removed the damaged folder %s: %s.", folder, error)
            return
        except OSError as error:
            self._forget([folder])
            if isinstance(error, FileNotFoundError):  # removed by another process just now
                return
            logger.warning("Cannot read the folder %s: %s.", folder, error)
            return
        if manifest.identity != self._folders.identity:
            self._tally.add(foreign_folders=1)
            return
        with self._lock:
            if self._banned.get(folder) != signature:
                self._add(folder, manifest.block_hashes)
