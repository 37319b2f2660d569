"""Writes records to slabs on a lane of its own, behind everybody's back.

A write may be dropped, never fail anybody: a full queue, a full disk and every error of the file
system are counted, and the lane goes on. All methods are for one thread; works run on the lane.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from interlace.connectors.slab_store.directory import NoRoomError, SlabDirectory, is_no_room
from interlace.connectors.slab_store.layout import SlabHeader, SlabShape
from interlace.connectors.slab_store.slab_writer import NewRecord, SlabWriter
from interlace.connectors.slab_store.space import Space
from interlace.engine.errors import LaneClosedError, LaneFullError
from interlace.engine.ports import Gate, Lane

logger = logging.getLogger(__name__)

_TEND_S = 10.0
_AGAIN_S = 1.0
"""After a slab could not be made, nobody tries again for so long."""


class StoredPlace(NamedTuple):
    """Where a record lies, as plain values."""

    slab: str
    """Name of the file in the space's folder."""
    record: int
    checksum: int


class WriteCounts(NamedTuple):
    """Records, since the start."""

    written: int
    dropped_queue_full: int
    dropped_no_room: int
    dropped_error: int


class Write:
    """Some records on their way. `WriteBehind` makes it."""

    def __init__(self, records: Sequence[NewRecord]) -> None:
        self.records = tuple(records)
        self.places: tuple[StoredPlace, ...] = ()
        """Of the first ones, when it has ended: as many as were written."""
        self._gate: Gate | None = None
        self.num_bytes = sum(one.data.nbytes for one in records)

    @property
    def is_done(self) -> bool:
        """Whether it reads its records no more. What was not written then never will be."""
        return self._gate is None or self._gate.query()

    def follow(self, gate: Gate) -> None:
        """For `WriteBehind`: it ends with this."""
        self._gate = gate


class WriteBehind:
    """See the module's docstring."""

    def __init__(
        self,
        directory: SlabDirectory,
        space: Space,
        lane: Lane,
        *,
        slab_bytes: int,
        most_queued_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Writes slabs of about `slab_bytes` into the space, and keeps at most `most_queued_bytes`
        waiting. `clock`, seconds, is for pauses after errors. No I/O here."""
        shape = SlabShape.within(slab_bytes, space.record_bytes)
        self._header = SlabHeader(space.facts, shape)
        self._folder_name = space.folder_name
        self._directory = directory
        self._lane = lane
        self._most_queued_bytes = most_queued_bytes
        self._clock = clock
        self._tended_s = clock()
        self._waiting: collections.deque[Write] = collections.deque()
        self._lock = threading.Lock()  # for the counts
        self._counts = WriteCounts(0, 0, 0, 0)
        self.busy_s = 0.0
        """How long writing took so far, of writes that wrote something. The lane adds to it."""
        # The lane's own.
        self._writer: SlabWriter | None = None
        self._again_s = float("-inf")

    @property
    def counts(self) -> WriteCounts:
        """What became of records so far. Any thread."""
        return self._counts

    @property
    def num_queued_bytes(self) -> int:
        """Of records that wait to be written."""
        while self._waiting and self._waiting[0].is_done:
            self._waiting.popleft()
        return sum(one.num_bytes for one in self._waiting)

    def write(self, records: Sequence[NewRecord]) -> Write:
        """Write these, in order, at least one; their data must stay what it is until the write is
        done. If the queue is full, it is done at once, and nothing is written."""
        write = Write(records)
        if self.num_queued_bytes + write.num_bytes > self._most_queued_bytes:
            self._count(dropped_queue_full=len(records))
            return write
        try:
            write.follow(self._lane.submit(lambda: self._run(write)))
        except (LaneFullError, LaneClosedError):
            self._count(dropped_queue_full=len(records))
            return write
        self._waiting.append(write)
        return write

    def tend(self) -> None:
        """Now and then: see on the lane whether the limits are kept, since others fill the file
        system too."""
        now_s = self._clock()
        if now_s - self._tended_s < _TEND_S:
            return
        self._tended_s = now_s
        with contextlib.suppress(LaneFullError, LaneClosedError):
            self._lane.submit(self._collect)

    def close(self, timeout_s: float) -> bool:
        """Write what is queued, and seal the slab; False if that takes longer: then what has not
        begun is dropped, and only whole records are published. May be repeated."""
        with contextlib.suppress(LaneFullError, LaneClosedError):  # the system lets go of it then
            self._lane.submit(self._seal)
        return self._lane.close(timeout_s)

    # ---------------------------------------------------------------- on the lane

    def _collect(self) -> None:
        try:
            self._directory.collect()
        except (NoRoomError, OSError) as error:
            logger.warning("the limits of %s are not kept: %s", self._directory.root, error)

    def _run(self, write: Write) -> None:
        places: list[StoredPlace] = []
        left = collections.deque(write.records)
        begun_s = self._clock()
        while left and (writer := self._open_writer(len(left))) is not None:
            error = self._add(writer, left[0], places)
            if error is not None:
                reason = "dropped_no_room" if is_no_room(error) else "dropped_error"
                self._count(**{reason: len(left)})
                break
            left.popleft()
        write.places = tuple(places)
        self.busy_s += self._clock() - begun_s if places else 0.0
        self._count(written=len(places))

    def _open_writer(self, num_wanted: int) -> SlabWriter | None:
        """One with room; None if there is none to be had, for `num_wanted` records."""
        if self._writer is not None and self._writer.num_free:
            return self._writer
        self._seal()
        if self._clock() < self._again_s:
            self._count(dropped_no_room=num_wanted)
            return None
        try:
            self._writer = self._directory.create_slab(self._folder_name, self._header)
        except NoRoomError as error:
            self._count(dropped_no_room=num_wanted)
            self._pause(f"nothing more is stored in {self._directory.root} for now: {error}")
        except OSError as error:
            self._count(dropped_error=num_wanted)
            self._pause(f"no slab can be made in {self._directory.root}: {error}")
        return self._writer

    def _pause(self, why: str) -> None:
        self._again_s = self._clock() + _AGAIN_S
        logger.warning("%s", why)

    def _add(
        self, writer: SlabWriter, record: NewRecord, places: list[StoredPlace]
    ) -> Exception | None:
        """One at a time: so what there was room for is published."""
        try:
            (entry,) = writer.add([record])
        except Exception as error:  # noqa: BLE001 - whatever it is, what is on the disk is not known
            self._pause(f"{writer.path} cannot be written to, and is sealed: {error}")
            self._writer = None
            writer.discard()
            if is_no_room(error):
                self._directory.note_full()
            return error
        places.append(StoredPlace(writer.path.name, entry.record, entry.checksum))
        return None

    def _seal(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _count(
        self,
        written: int = 0,
        dropped_queue_full: int = 0,
        dropped_no_room: int = 0,
        dropped_error: int = 0,
    ) -> None:
        added = (written, dropped_queue_full, dropped_no_room, dropped_error)
        with self._lock:
            self._counts = WriteCounts(*map(sum, zip(self._counts, added, strict=True)))
