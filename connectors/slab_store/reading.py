"""Reads records from slabs into memory, on lanes that may hang.

Every lane that has nothing to do takes the next records that wait, and reads neighbours by one
call: see `read_queue`. What a read brings is checked before it counts, unless somebody else does
that. A lane whose call takes as long as the deadline is given up: what it reads has failed, as has
what waited as long, and a fresh lane takes its place. The call may still write into its buffers,
whenever the system lets go of it: so a read is *settled*, and its buffer may be used again, only
when its call has returned, or if it never begins.

All methods are for one thread; lanes read.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from interlace.connectors.slab_store.layout import NO_PARENT, DamagedSlabError, Entry
from interlace.connectors.slab_store.read_queue import (
    Buffer,
    Part,
    Read,
    ReadCounts,
    Reader,
    ReadQueue,
)
from interlace.connectors.slab_store.slab import Slab
from interlace.connectors.slab_store.writing import StoredPlace
from interlace.engine.errors import LaneClosedError, LaneFullError
from interlace.engine.ports import Lanes
from interlace.layers.lane_queue import without_frames

MOST_KNOWN = 1024
"""Slabs whose headers are remembered; the oldest are forgotten."""
WORK_BYTES = 16 << 20
"""At most by one call, or one record. Between two calls of the system a thread has to wait for the
interpreter, as all others then have to wait for it."""
MOST_OF_WORK = 8
"""Records by one call: they hang together, and fail together."""


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
        """`deadline_s`: how long one call may take, by `clock` (any thread), in seconds.
        `checks`: whether what has come is compared with its checksum."""
        self._checks = checks
        self._slabs = slabs
        self._lanes = lanes
        self._deadline_s = deadline_s
        self._clock = clock
        self._queue = ReadQueue(num_lanes, clock)
        self._readers = [self._make_reader() for _ in range(num_lanes)]
        self._stuck: list[Reader] = []

    def _make_reader(self) -> Reader:
        return Reader(self._lanes.lane("read"))

    @property
    def counts(self) -> ReadCounts:
        """Of what has ended by now."""
        self.poll()
        return self._queue.counts

    @property
    def num_waiting(self) -> int:
        """Records that wait for a lane."""
        return self._queue.num_waiting

    @property
    def num_hanging(self) -> int:
        """Records that lanes have which were given up."""
        return sum(len(reader.taken) for reader in self._stuck)

    @property
    def is_idle(self) -> bool:
        """Whether no read is under way, not even one that was given up."""
        self.poll()
        return self._queue.is_idle((*self._readers, *self._stuck))

    def read(self, place: StoredPlace, buffer: Buffer) -> Read:
        """Read one record: see `read_all`."""
        (one,) = self.read_all([(place, buffer)])
        return one

    def read_all(
        self, wanted: Sequence[tuple[StoredPlace, Buffer]], *, work_bytes: int = WORK_BYTES
    ) -> list[Read]:
        """Read each record into its buffer, which is nobody else's until the read is settled; the
        first ones first. `work_bytes` at most by one call, which ends as a whole. Never raises: see
        `Read.error`."""
        self.poll()
        record_bytes = wanted[0][1].nbytes if wanted else 1
        most = min(max(1, work_bytes // record_bytes), MOST_OF_WORK)
        reads = self._queue.add(wanted, 1 if self._checks else most)
        self._start()
        return reads

    def _start(self) -> None:
        """As many lanes as there is something for."""
        for reader in self._queue.start(self._readers):
            try:
                reader.gate = reader.lane.submit(functools.partial(self._pump, reader))
            except (LaneFullError, LaneClosedError, RuntimeError) as error:
                # A RuntimeError: the system has no thread for it.
                self._queue.refuse(reader, self._readers, error)

    def poll(self) -> None:
        """Give up on lanes that hang. Never waits."""
        for reader in self._readers:
            if reader.gate is not None:
                reader.gate.query()  # some lanes get on when they are asked
        self._stuck = [reader for reader in self._stuck if reader.taken]
        late = self._queue.give_up(self._readers, self._deadline_s)
        for reader in late:
            reader.lane.close(0.0)
            self._stuck.append(reader)
            self._readers[self._readers.index(reader)] = self._make_reader()
        if late:
            self._start()

    def close(self, timeout_s: float) -> bool:
        """Begin nothing more; False if what has begun takes longer than `timeout_s`."""
        until_s = self._clock() + timeout_s
        self._queue.close()
        ended = [
            one.lane.close(max(0.0, until_s - self._clock()))
            for one in (*self._readers, *self._stuck)
        ]
        return all(ended)

    # ---------------------------------------------------------------- on a lane

    def _pump(self, reader: Reader) -> None:
        """Read what waits, until nothing does."""
        while run := self._queue.take(reader):
            try:
                self._read(run)
            except Exception as error:  # noqa: BLE001 - whatever it is, nothing has come
                for part in run:
                    part.read.fail(without_frames(error, "of a read"))

    def _read(self, run: Sequence[Part]) -> None:
        """Neighbours. Raises: `OSError`, `DamagedSlabError`."""
        if run[-1].read.place.record < run[0].read.place.record:
            run = run[::-1]
        place = run[0].read.place
        slab = self._slabs.get(place.slab)
        shape = slab.header.shape
        if shape.record_bytes != run[0].buffer.nbytes:
            raise DamagedSlabError(f"{place.slab} has records of another size")
        if self._checks:
            (part,) = run  # see `read_all`
            slab.read(Entry(place.record, NO_PARENT, NO_PARENT, place.checksum, 0), part.buffer)
            return
        if shape.pitch != shape.record_bytes and len(run) > 1:
            for part in run:
                self._read([part])
            return
        num_whole = slab.read_run(place.record, [part.buffer for part in run])
        for part in run[num_whole:]:
            part.read.fail(DamagedSlabError(f"{place.slab} is cut off"))
