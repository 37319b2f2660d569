"""Looks at the disk and tells `KnownFolders` what lies there. File I/O: never on the event loop.

Hashes come from manifests whose identity is ours, never from names.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from interlace.connectors.kv_folders.counters import Tally
from interlace.connectors.kv_folders.folders import KVFolders, Signature
from interlace.connectors.kv_folders.known import KnownFolders
from interlace.connectors.kv_folders.tensor_file import DamagedFileError

logger = logging.getLogger(__name__)

_SETTLED_NS = 3 * 10**9
"""A listing is trusted once its folder has not changed for so long: time stamps are coarse."""
_BUCKET = re.compile(r"[0-9a-f]{2}")
_FOLDER = re.compile(r"[0-9a-f]{64}")
_UNKNOWN = -1
"""The time stamp of a bucket that could not be had: equal to none, so the bucket is listed."""


class FolderListing:
    """One look after another. `stop` may come from any thread, all else from one at a time."""

    def __init__(self, folders: Sequence[KVFolders], known: KnownFolders, tally: Tally) -> None:
        """`folders` are those of each rank, below one directory. Does no I/O."""
        self._identities = [one.identity for one in folders]
        self._folders = folders[0]
        self._known = known
        self._tally = tally
        # Bucket -> its time stamp, if all in it was seen and will not change unseen; and
        # bucket -> folders that were looked into.
        self._stamps: dict[str, int] = {}
        self._found: dict[str, dict[str, Signature]] = {}
        self._has_complained = False
        self._has_stopped = False

    def stop(self) -> None:
        """End a look that is under way soon."""
        self._has_stopped = True

    def look(self) -> None:
        """Look at all folders that changed. What fails is logged once, and tried again next time:
        what is stored later must still be found."""
        try:
            self._look()
        except Exception as error:  # noqa: BLE001 - as above
            self._complain(self._folders.base, error)

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

    def _look(self) -> None:
        added, lifted = self._known.begin_round()
        for folder in lifted:  # looked at again
            bucket = Path(folder).parent.name
            self._found.get(bucket, {}).pop(folder, None)
            self._stamps.pop(bucket, None)
        stamps = self._bucket_stamps()
        for bucket in (added | self._found.keys() | self._stamps.keys()) - stamps.keys():
            self._take(bucket, {})
            self._stamps.pop(bucket, None)
        for bucket, stamp in stamps.items():
            if self._has_stopped:
                return
            if self._stamps.get(bucket) != stamp:
                self._look_into(bucket, stamp)

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
        """Make the bucket's part of what is known what the listing says; whether all of it could
        be seen."""
        found = self._found.pop(bucket, {})
        self._known.forget((found.keys() | self._known.take_listable(bucket)) - listing.keys())
        seen = {
            folder: signature
            for folder, signature in listing.items()
            if found.get(folder) == signature or self._inspect(folder, signature)
        }
        if seen:
            self._found[bucket] = seen
        return len(seen) == len(listing)

    def _inspect(self, folder: str, signature: Signature) -> bool:
        """Read a new folder's manifest and make it known; remove the folder if it is damaged.

        Whether that was done: if not, the folder counts as not seen.
        """
        try:
            manifest = self._folders.manifest(Path(folder))
            is_ours = manifest.identity in self._identities
            if is_ours:
                self._folders.check_files(Path(folder), manifest)
        except DamagedFileError as error:
            self._known.forget([folder])
            if self._folders.remove(Path(folder), signature):
                self._tally.add(damaged_folders=1)
                logger.warning("Removed the damaged folder %s: %s.", folder, error)
            return True
        except Exception as error:  # noqa: BLE001 - whatever it is, other folders must be found
            self._known.forget([folder])
            if not isinstance(error, FileNotFoundError):  # that one goes just now
                self._complain(folder, error)
            return False
        if is_ours:
            rank = self._identities.index(manifest.identity)
            self._known.found(rank, folder, signature, manifest.block_hashes)
        else:
            self._tally.add(foreign_folders=1)
        return True
