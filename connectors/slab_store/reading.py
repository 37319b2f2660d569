"""Reads records from slabs into memory, on lanes that may hang.

A work reads some records, on the lane that has least to do; works of a lane run in order. What a
read brings is checked before it counts, unless somebody else does that. A lane on which nothing
ends for the deadline is given up: all of its reads have failed, and later ones go to a fresh lane.
The read under way there may still write into its buffer, whenever the system lets go of it: so a
read is *settled*, and its buffer may be used again, only when its call has returned.

All methods are for one thread; works run on the lanes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from interlace.connectors.slab_store.layout import NO_PARENT, DamagedSlabError, Entry
from interlace.connectors.slab_store.slab import Slab
from interlace.connectors.slab_store.writing import StoredPlace
from interlace.engine.errors import ConnectorError, LaneClosedError, LaneFullError
from interlace.engine.ports import Gate, Lane, Lanes
from interlace.layers.lane_queue import without_frames

MOST_KNOWN = 1024
"""Slabs whose headers are remembered; the oldest are forgotten."""
WORK_BYTES = 16 << 20
"""Of one work, or one record. A work takes who submits it 30 to 60 us, and between two calls of the
system a thread has to wait for the interpreter, as all others then have to wait for it."""
MOST_OF_WORK = 8
"""Records: they hang together, and fail together."""
Buffer: TypeAlias = npt.NDArray[np.uint8]
"""uint8 [record_bytes], contiguous."""


class KnownSlabs:
    """Slabs of one folder that were read from lately, by name: none of them is kept open, so what
    others remove gives its room back at once. Any thread."""

    def __init__(self, folder: Path) -> None:
        """Opens nothing yet."""
        self._folder = folder
        self._slabs: dict[str, Slab] = {}
        self._lock = threading.Lock()

    def get(self, name: str) -> Slab:
        """That one. Raises: `OSError`, `DamagedSlabError`."""
        slab = self._slabs.get(name)
        if slab is None:
            slab = Slab.open(self._folder / name)
            slab.park()
            with self._lock:
                while len(self._slabs) >= MOST_KNOWN:
                    del self._slabs[next(iter(self._slabs))]
                self._slabs[name] = slab
        return slab


class ReadCounts(NamedTuple):
    """Records that were not read, since the start, by why."""

    late: int
    """Given up after the deadline, with those that waited behind them."""
    damaged: int
    """What lies there is not what was written."""
    failed: int
    """For any other reason."""


class Read:
    """One record on its way. `Reads` makes it."""

    def __init__(self, place: StoredPlace) -> None:
        self.place = place
        self.error: BaseException | None = None
        """Why it failed; None until it has."""
        self.is_cancelled = False
        self._gate: Gate | None = None

    def follow(self, gate: Gate) -> None:
        """For `Reads`: it ends with this."""
        self._gate = gate

    def fail(self, error: BaseException) -> None:
        """For `Reads`: nothing comes of it."""
        self.error = self.error or error

    def cancel(self) -> None:
        """Nobody needs it: it is not begun any more. If it has begun it has failed, and goes on."""
        if not self.is_done:
            self.is_cancelled = True
            self.fail(ConnectorError("the read was cancelled: what it was for was computed."))

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or badly."""
        return self.error is not None or self.is_settled

    @property
    def is_settled(self) -> bool:
        """Whether it writes into its buffer no more."""
        return self._gate is None or self._gate.query()


class _Part(NamedTuple):
    """Of a work."""

    read: Read
    buffer: Buffer


class _ReadLane:
    """A lane, and what is on it."""

    def __init__(self, lane: Lane, now_s: float) -> None:
        self.lane = lane
        self.reads: deque[Read] = deque()
        self.since_s = now_s
        """Nothing has ended since then."""


class Reads:
    """See the module's docstring."""

    def __init__(
        self,
        slabs: KnownSlabs,
        lanes: Lanes,
        *,
        num_lanes: int,
        deadline_s: float,
        checks: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`deadline_s`: how long the oldest read of a lane may take, by `clock`, in seconds.
        `checks`: whether what has come is compared with its checksum."""
        self._checks = checks
        self._slabs = slabs
        self._lanes = lanes
        self._deadline_s = deadline_s
        self._clock = clock
        self._busy = [self._make_lane() for _ in range(num_lanes)]
        self._stuck: list[_ReadLane] = []
        self._counts = ReadCounts(0, 0, 0)

    def _make_lane(self) -> _ReadLane:
        return _ReadLane(self._lanes.lane("read"), self._clock())

    @property
    def counts(self) -> ReadCounts:
        """Of what has ended by now."""
        self.poll()
        return self._counts

    @property
    def is_idle(self) -> bool:
        """Whether no read is under way, not even one that was given up."""
        self.poll()
        return not self._stuck and not any(one.reads for one in self._busy)

    def read(self, place: StoredPlace, buffer: Buffer) -> Read:
        """Read one record: see `read_all`."""
        (one,) = self.read_all([(place, buffer)])
        return one

    def read_all(
        self, wanted: Sequence[tuple[StoredPlace, Buffer]], *, work_bytes: int = WORK_BYTES
    ) -> list[Read]:
        """Read each record into its buffer, which is nobody else's until the read is settled; the
        first ones first. `work_bytes` of a work, which ends as a whole. Never raises: see
        `Read.error`."""
        self.poll()
        reads = [Read(place) for place, _ in wanted]
        record_bytes = wanted[0][1].nbytes if wanted else 1
        size = min(max(1, work_bytes // record_bytes), MOST_OF_WORK)
        for first in range(0, len(reads), size):
            part = slice(first, first + size)
            buffers = (buffer for _, buffer in wanted[part])
            self._submit(list(map(_Part, reads[part], buffers)))
        return reads

    def _submit(self, work: Sequence[_Part]) -> None:
        reads = [part.read for part in work]
        lane = min(self._busy, key=lambda busy: len(busy.reads))
        if not lane.reads:
            lane.since_s = self._clock()
        try:
            gate = lane.lane.submit(lambda: self._run(work))
        except (LaneFullError, LaneClosedError) as error:
            for one in reads:
                one.fail(error)
            self._count(reads)
            return
        for one in reads:
            one.follow(gate)
        lane.reads += reads

    def poll(self) -> None:
        """Take note of what has ended, and give up on lanes that hang. Never waits."""
        now_s = self._clock()
        for lane in self._stuck:
            _settle(lane, now_s)  # they were counted when they were given up
        self._stuck = [lane for lane in self._stuck if lane.reads]
        for number, lane in enumerate(self._busy):
            self._count(_settle(lane, now_s))
            if not lane.reads or now_s - lane.since_s < self._deadline_s:
                continue
            self._give_up(lane)
            self._busy[number] = self._make_lane()

    def _give_up(self, lane: _ReadLane) -> None:
        error = ConnectorError(
            f"nothing was read for {self._deadline_s:g} s: what was to be loaded is computed"
            " instead. Does the store's file system hang?"
        )
        for one in lane.reads:
            one.fail(error)
        self._count(lane.reads, late=error)
        lane.lane.close(0.0)  # what has not begun never does
        self._stuck.append(lane)

    def _count(self, ended: Iterable[Read], late: BaseException | None = None) -> None:
        """Each read is counted once. `late` is the error of those that were given up."""
        failed = [one for one in ended if one.error is not None and not one.is_cancelled]
        for error in [one.error for one in failed]:
            counts = self._counts
            if error is late:
                self._counts = counts._replace(late=counts.late + 1)
            elif isinstance(error, DamagedSlabError):
                self._counts = counts._replace(damaged=counts.damaged + 1)
            else:
                self._counts = counts._replace(failed=counts.failed + 1)

    def close(self, timeout_s: float) -> bool:
        """Begin nothing more; False if what has begun takes longer than `timeout_s`."""
        until_s = self._clock() + timeout_s
        ended = [
            one.lane.close(max(0.0, until_s - self._clock())) for one in (*self._busy, *self._stuck)
        ]
        return all(ended)

    def _run(self, work: Sequence[_Part]) -> None:
        """On a lane."""
        left = [part for part in work if part.read.error is None]
        while left:
            run = left[:1] if self._checks else _neighbours(left)
            left = left[len(run) :]
            try:
                self._read(run)
            except Exception as error:  # noqa: BLE001 - whatever it is, nothing has come
                for part in run:
                    part.read.fail(without_frames(error, "of a read"))

    def _read(self, run: Sequence[_Part]) -> None:
        """Neighbours. Raises: `OSError`, `DamagedSlabError`."""
        place = run[0].read.place
        slab = self._slabs.get(place.slab)
        shape = slab.header.shape
        if shape.record_bytes != run[0].buffer.nbytes:
            raise DamagedSlabError(f"{place.slab} has records of another size")
        if self._checks:
            entry = Entry(place.record, NO_PARENT, NO_PARENT, place.checksum, 0)
            slab.read(entry, run[0].buffer)
            return
        if shape.pitch != shape.record_bytes and len(run) > 1:
            for part in run:
                self._read([part])
            return
        num_whole = slab.read_run(place.record, [part.buffer for part in run])
        for part in run[num_whole:]:
            part.read.fail(DamagedSlabError(f"{place.slab} is cut off"))


def _neighbours(parts: Sequence[_Part]) -> Sequence[_Part]:
    """The first ones, as long as each lies behind the one before."""
    first = parts[0].read.place
    for number, part in enumerate(parts):
        place = part.read.place
        if (place.slab, place.record) != (first.slab, first.record + number):
            return parts[:number]
    return parts


def _settle(lane: _ReadLane, now_s: float) -> list[Read]:
    """Take note of what has ended, by now: that is taken off the lane."""
    ended: list[Read] = []
    while lane.reads and lane.reads[0].is_settled:
        ended.append(lane.reads.popleft())
        lane.since_s = now_s
    return ended
