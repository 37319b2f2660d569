"""Writes runs of blocks on a lane, in two steps: aside, and later visible or gone.

Knows nothing of requests. A save may be dropped, never fail: a full queue and every error of the
file system are counted, and the lane goes on.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import logging
import threading
from pathlib import Path

from interlace.connectors.kv_folders.counters import Tally
from interlace.connectors.kv_folders.folders import KVFolders, Run
from interlace.connectors.kv_folders.manifest import Manifest
from interlace.engine.ports import Lanes

logger = logging.getLogger(__name__)

MAX_SAVES = 64
"""Most runs that wait for the lane or for their verdict."""


class SaveEnd(enum.Enum):
    """How a save ended. The value is the counter that it adds to."""

    PUBLISHED = "blocks_saved"
    QUEUE_FULL = "saves_dropped_queue_full"
    ERROR = "saves_dropped_error"
    DISCARDED = "saves_dropped_bad_blocks"


@dataclasses.dataclass(frozen=True, slots=True)
class EndedSave:
    """The last word of one worker on a save. All but the first three only if PUBLISHED."""

    save_id: int
    end: SaveEnd
    rank: int = 0
    num_blocks: int = 0
    """Of the run that was handed in."""
    folder: str = ""
    block_hashes: tuple[bytes, ...] = ()
    """Of what is visible in the folder now: another process may have been faster."""

    def count(self, tally: Tally) -> None:
        """Published blocks count each; a run that was dropped counts as one."""
        num = self.num_blocks if self.end is SaveEnd.PUBLISHED else 1
        tally.add(**{self.end.value: num})


@dataclasses.dataclass(frozen=True, slots=True)
class _Written:
    """A run that was written aside."""

    folder: Path
    manifest: Manifest
    num_bytes: int


class FolderWriter:
    """Every reserved save ends exactly once in `take_ended`, if it is published or discarded.

    The methods are for one thread, the device thread.
    """

    def __init__(self, folders: KVFolders, tally: Tally, lanes: Lanes, *, queue_bytes: int) -> None:
        """Its lane begins with what dead processes left. No I/O here."""
        self._folders = folders
        self._tally = tally
        self._queue_bytes = queue_bytes
        self._lock = threading.Lock()
        self._bytes_waiting = 0
        self._open: set[int] = set()  # reserved and not ended
        self._ended: collections.deque[EndedSave] = collections.deque()
        self._written: dict[int, _Written] = {}  # the lane's own
        self._has_complained = False
        self._is_closed = False
        # Two works for each open save, and what comes first and last.
        self._lane = lanes.lane("store", max_pending=2 * MAX_SAVES + 2)
        self._lane.submit(folders.remove_leftovers)

    # ---------------------------------------------------------------- the device thread

    def reserve(self, save_id: int, num_bytes: int) -> bool:
        """Ask for room before copying. If there is none, the save has ended."""
        with self._lock:
            full = (
                len(self._open) >= MAX_SAVES or self._bytes_waiting + num_bytes > self._queue_bytes
            )
            if not full:
                self._open.add(save_id)
                self._bytes_waiting += num_bytes
        if full:
            self._complain(f"the writer is behind, {self._bytes_waiting} bytes are waiting")
            self._end(save_id, SaveEnd.QUEUE_FULL)
        return not full

    def write(self, save_id: int, run: Run) -> None:
        """Write a run of the reserved size aside. The rows are the lane's until it releases
        them."""
        self._lane.submit(lambda: self._write(save_id, run))

    def publish(self, save_id: int) -> None:
        """Make a run visible that was handed to `write`. Does nothing if its save has ended."""
        if self._is_open(save_id):
            self._lane.submit(lambda: self._publish(save_id))

    def discard(self, save_id: int) -> None:
        """End a save without making it visible. Does nothing if it has ended."""
        if self._is_open(save_id):
            self._lane.submit(lambda: self._discard(save_id))

    def _is_open(self, save_id: int) -> bool:
        with self._lock:
            return save_id in self._open

    def take_ended(self) -> tuple[EndedSave, ...]:
        """Saves that ended since the last call."""
        self._lane.query()  # where nothing runs by itself, something does now
        return tuple(self._ended.popleft() for _ in range(len(self._ended)))

    def close(self, timeout_s: float) -> None:
        """Do what is queued, drop what has no verdict, and end the lane; may be repeated.

        Waits for at most `timeout_s`, since a hung mount must not keep the process.
        """
        if not self._is_closed:
            self._is_closed = True
            self._lane.submit(self._discard_rest)
        self._lane.close(timeout_s)

    # ---------------------------------------------------------------- on the lane

    def _write(self, save_id: int, run: Run) -> None:
        try:
            self._written[save_id] = _Written(*self._folders.write(run), run.rows.nbytes)
        except Exception as error:  # noqa: BLE001 - whatever it is, the save ends, and is reported
            self._fail(save_id, error)
        finally:
            run.release()
            with self._lock:
                self._bytes_waiting -= run.rows.nbytes

    def _publish(self, save_id: int) -> None:
        written = self._written.pop(save_id, None)
        if written is None:
            return
        try:
            folder, visible = self._folders.publish(written.folder, written.manifest)
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(save_id, error)
            return
        num_blocks = len(written.manifest.block_hashes)
        self._tally.add(bytes_saved=written.num_bytes)
        self._end(save_id, SaveEnd.PUBLISHED, num_blocks, str(folder), visible.block_hashes)

    def _discard(self, save_id: int) -> None:
        written = self._written.pop(save_id, None)
        if written is None:
            return
        self._folders.discard(written.folder)
        self._end(save_id, SaveEnd.DISCARDED)

    def _discard_rest(self) -> None:
        for written in self._written.values():
            self._folders.discard(written.folder)
        self._written.clear()

    # ---------------------------------------------------------------- either

    def _fail(self, save_id: int, error: Exception) -> None:
        self._complain(str(error) or repr(error))
        self._end(save_id, SaveEnd.ERROR)

    def _end(
        self,
        save_id: int,
        end: SaveEnd,
        num_blocks: int = 0,
        folder: str = "",
        block_hashes: tuple[bytes, ...] = (),
    ) -> None:
        rank = self._folders.identity.rank
        ended = EndedSave(save_id, end, rank, num_blocks, folder, block_hashes)
        with self._lock:
            self._open.discard(save_id)
        ended.count(self._tally)
        self._ended.append(ended)

    def _complain(self, why: str) -> None:
        """Once; the counters tell the rest."""
        if not self._has_complained:
            self._has_complained = True
            logger.warning(
                "KV was not saved to %s: %s. Further runs that are not saved are only counted.",
                self._folders.base,
                why,
            )
