"""Records that wait to be read, who has taken which, and what became of them. Reads nothing itself:
see `reading`.

There is one queue for all readers. Who is free takes the next neighbours: fewer of them the less
waits, so that all readers end at about the same time (guided self-scheduling, Polychronopoulos and
Kuck, 1987).

One lock guards it all. Under it a record is taken, and is written to its buffer from then on until
the call has returned; or it is withdrawn, and never will be. Under it a reader finds that nothing
waits and rests, or its owner finds that it rests and starts it: so nothing waits for nobody.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from interlace.connectors.slab_store.layout import DamagedSlabError
from interlace.connectors.slab_store.writing import StoredPlace
from interlace.engine.errors import ConnectorError, LaneClosedError
from interlace.engine.ports import Gate, Lane

Buffer: TypeAlias = npt.NDArray[np.uint8]
"""uint8 [record_bytes], contiguous."""
_LATE = (
    "nothing was read for {:g} s: what was to be loaded is computed instead. Does the store's file"
    " system hang?"
)


class ReadCounts(NamedTuple):
    """Records that were not read, since the start, by why."""

    late: int
    """Given up after the deadline, with those that waited as long."""
    damaged: int
    """What lies there is not what was written."""
    failed: int
    """For any other reason."""


class LateReadError(ConnectorError):
    """It was given up after the deadline."""


class Read:
    """One record on its way. `Reads` makes it, and its thread asks; what is set by a reader is set
    by one assignment each, which the interpreter's lock makes whole."""

    def __init__(self, place: StoredPlace, lock: threading.Lock) -> None:
        self.place = place
        self.error: BaseException | None = None
        """Why it failed; None until it has."""
        self.is_cancelled = False
        self.is_taken = False
        """For `ReadQueue`, under its lock: a reader has it, or had."""
        self.is_settled = False
        """Whether nobody writes into its buffer any more. `error` is set before."""
        self._lock = lock

    def fail(self, error: BaseException) -> None:
        """For `Reads`: nothing comes of it."""
        self.error = self.error or error

    def cancel(self) -> None:
        """Nobody needs it: it is not begun any more. If it has begun it has failed, and goes on."""
        if self.is_done:
            return
        self.is_cancelled = True
        self.fail(ConnectorError("the read was cancelled: what it was for was computed."))
        with self._lock:
            if not self.is_taken:
                self.is_settled = True

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or badly."""
        return self.error is not None or self.is_settled


class _Order(NamedTuple):
    """Records that were asked for at once."""

    most: int
    """Of them that are taken at a time."""
    since_s: float


class Part(NamedTuple):
    """One of them."""

    read: Read
    buffer: Buffer
    order: _Order


class Reader:
    """A lane, and what it reads. For `ReadQueue`, under its lock, but for `lane` and `gate`."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.gate: Gate | None = None
        """Of what it was last started with."""
        self.is_started = False
        """It takes what waits, until nothing does."""
        self.is_given_up = False
        """It takes nothing more, and what it has has failed."""
        self.taken: Sequence[Part] = ()
        self.since_s = 0.0
        """When it took that, or was started."""


class ReadQueue:
    """See the module's docstring. One thread owns it; `take` is for the readers' threads."""

    def __init__(self, num_readers: int, clock: Callable[[], float]) -> None:
        """`clock` is called on all threads."""
        self._num_readers = num_readers
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: deque[Part] = deque()
        self._closed: LaneClosedError | None = None
        self._counts = ReadCounts(0, 0, 0)

    @property
    def counts(self) -> ReadCounts:
        """Of all that is settled, or was given up."""
        with self._lock:
            return self._counts

    @property
    def num_waiting(self) -> int:
        """Records that nobody has begun to read, cancelled ones included."""
        return len(self._waiting)

    def is_idle(self, readers: Iterable[Reader]) -> bool:
        """Whether nothing waits, and none of these has anything."""
        with self._lock:
            return not self._waiting and not any(reader.taken for reader in readers)

    # ---------------------------------------------------------------- its owner

    def add(self, wanted: Sequence[tuple[StoredPlace, Buffer]], most: int) -> list[Read]:
        """Queue these, of which a reader takes `most` at a time. `start` somebody then."""
        order = _Order(most, self._clock())
        parts = [Part(Read(place, self._lock), buffer, order) for place, buffer in wanted]
        with self._lock:
            if self._closed is None:
                self._waiting += parts
            else:
                self._withdraw(parts, self._closed)
        return [part.read for part in parts]

    def start(self, readers: Iterable[Reader]) -> list[Reader]:
        """Those of them that rest, no more than there is to take: each has to `take` until nothing
        comes, or to be refused."""
        with self._lock:
            started = [one for one in readers if not one.is_started][: len(self._waiting)]
            for reader in started:
                reader.is_started, reader.since_s = True, self._clock()
        return started

    def refuse(self, reader: Reader, readers: Iterable[Reader], error: BaseException) -> None:
        """It was started and cannot take anything. If none of `readers` can, nothing is read."""
        with self._lock:
            reader.is_started = False
            if not any(one.is_started for one in readers):
                self._withdraw_waiting(error)

    def give_up(self, readers: Iterable[Reader], deadline_s: float) -> list[Reader]:
        """Those of them that read for as long as that. What they have has failed; and what waits as
        long has, since it would wait for the same."""
        with self._lock:
            late_s = self._clock() - deadline_s
            late = [one for one in readers if one.is_started and one.since_s <= late_s]
            if late:
                error = LateReadError(_LATE.format(deadline_s))
                for reader in late:
                    reader.is_given_up = True
                    self._fail(reader.taken, error)
                while self._waiting and self._waiting[0].order.since_s <= late_s:
                    self._withdraw([self._waiting.popleft()], error)
        return late

    def close(self) -> None:
        """Nothing more is taken: what waits fails, as does what is added later."""
        with self._lock:
            self._closed = LaneClosedError("the store is closed: nothing more is read from it.")
            self._withdraw_waiting(self._closed)

    # ---------------------------------------------------------------- readers

    def take(self, reader: Reader) -> Sequence[Part]:
        """Neighbours, to be read at once, forwards or backwards; what it had before has been. If
        there are none, or it was given up, it has to be started again."""
        with self._lock:
            self._end(reader)
            reader.taken = () if reader.is_given_up else self._next()
            reader.is_started = bool(reader.taken)
            reader.since_s = self._clock()
            return reader.taken

    # ---------------------------------------------------------------- under the lock

    def _end(self, reader: Reader) -> None:
        if not reader.is_given_up:
            self._count(reader.taken)
        for part in reader.taken:
            part.read.is_settled = True

    def _next(self) -> Sequence[Part]:
        waiting = self._waiting
        while waiting and waiting[0].read.error is not None:  # it was cancelled
            waiting.popleft().read.is_settled = True
        if not waiting:
            return ()
        share = -(-len(waiting) // (2 * self._num_readers))
        most = min(waiting[0].order.most, share)
        taken = [waiting.popleft()]
        step = 0 if not waiting else _step(taken[0], waiting[0])
        while step and len(taken) < most and waiting and _step(taken[-1], waiting[0]) == step:
            taken.append(waiting.popleft())
        for part in taken:
            part.read.is_taken = True
        return taken

    def _withdraw_waiting(self, error: BaseException) -> None:
        self._withdraw(self._waiting, error)
        self._waiting.clear()

    def _withdraw(self, parts: Collection[Part], error: BaseException) -> None:
        """They are not read."""
        self._fail(parts, error)
        for part in parts:
            part.read.is_settled = True

    def _fail(self, parts: Collection[Part], error: BaseException) -> None:
        for part in parts:
            part.read.fail(error)
        self._count(parts)

    def _count(self, parts: Collection[Part]) -> None:
        """Each read once."""
        for read in [part.read for part in parts]:
            counts, error = self._counts, read.error
            if error is None or read.is_cancelled:
                continue
            if isinstance(error, LateReadError):
                self._counts = counts._replace(late=counts.late + 1)
            elif isinstance(error, DamagedSlabError):
                self._counts = counts._replace(damaged=counts.damaged + 1)
            else:
                self._counts = counts._replace(failed=counts.failed + 1)


def _step(one: Part, other: Part) -> int:
    """1 if the other lies behind the first, -1 if before it; 0 if it is no neighbour, was not asked
    for with it, or is not wanted any more."""
    place, next_place = one.read.place, other.read.place
    step = next_place.record - place.record
    is_same = place.slab == next_place.slab and one.order is other.order
    return step if is_same and other.read.error is None and abs(step) == 1 else 0
