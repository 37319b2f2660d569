"""What waits on one lane: works, records, and the gates that they wait for, in order.

Shared by all kinds of lanes. Not locked: the lane that owns a queue sees to that.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from interlace.engine.errors import LaneClosedError, LaneFullError
from interlace.engine.ports import Gate


class EndableGate(Gate, Protocol):
    """A gate as its lane sees it."""

    def end(self, error: BaseException | None) -> None:
        """Open it, or fail it with `error`. Once."""
        ...


G = TypeVar("G", bound=EndableGate)


@dataclasses.dataclass(slots=True, eq=False)
class Entry(Generic[G]):
    """One work, or one record."""

    gate: G
    after: tuple[Gate, ...]
    """What has to end before it begins."""
    work: Callable[[], None] | None
    """None of a record."""
    keeps: object = None
    """Kept alive until the entry has ended."""
    dropped: LaneClosedError | None = None
    """Set if the work will never run; its gate has failed then."""


class LaneQueue(Generic[G]):
    """Entries in order. One of them at a time is begun, and then ended.

    Bounded: works by `max_pending`; records by two for each work and each closed gate that is
    waited for, since a record with nothing new before it is the one before.
    """

    def __init__(self, name: str, max_pending: int, is_closed: Callable[[Gate], bool]) -> None:
        """`is_closed` tells whether a gate is, without any effect.

        Raises: `ValueError` if `max_pending` is not positive.
        """
        if max_pending < 1:
            raise ValueError(f"max_pending of lane {name!r} must be at least 1, not {max_pending}.")
        self.name = name
        self.is_closed = False
        """It takes no more work."""
        self.running: Entry[G] | None = None
        self.entries: collections.deque[Entry[G]] = collections.deque()
        self._max_pending = max_pending
        self._is_gate_closed = is_closed
        self._num_works = 0  # not ended
        self._waits: list[Gate] = []  # for the next entry
        self._awaited: list[Gate] = []  # closed ones that entries wait for, or the next one will
        self._num_new = 0  # works since the last record
        self._last_record: G | None = None
        self._error: BaseException | None = None  # the first one since the last record that ended

    @property
    def is_idle(self) -> bool:
        """Whether all work has ended."""
        return self._num_works == 0

    @property
    def is_empty(self) -> bool:
        """Whether all work, and every record, has ended."""
        return self.running is None and not self.entries

    def add_work(self, gate: G, work: Callable[[], None], keeps: object = None) -> None:
        """Queue a work. Raises: as `check_room`."""
        self.check_room()
        self._num_works += 1
        self._num_new += 1
        self.entries.append(Entry(gate, self._take_waits(), work, keeps))

    def check_room(self) -> None:
        """Raises: `LaneFullError`, `LaneClosedError` if no work can be queued."""
        if self.is_closed:
            raise LaneClosedError(f"lane {self.name!r} is closed: submit work before that.")
        if self._num_works >= self._max_pending:
            raise LaneFullError(
                f"lane {self.name!r} has {self._num_works} works that have not ended, as many as it"
                " may: drop this one, or wait for a gate and try again."
            )

    def add_record(self, make_gate: Callable[[], G], keeps: object = None) -> G:
        """The gate of a record; one that has nothing to wait for has ended already."""
        is_bare = not self._num_new and not self._closed(self._waits)
        if is_bare and self._last_record is not None and self._is_gate_closed(self._last_record):
            return self._last_record
        gate = make_gate()
        self._last_record = gate if is_bare else None
        self._num_new = 0
        entry = Entry(gate, self._take_waits(), None, keeps)
        if self.is_empty and not entry.after:
            self._end_record(entry)
        else:
            self.entries.append(entry)
        return gate

    def add_wait(self, gate: Gate) -> None:
        """What is queued from now on begins when `gate` is no longer closed."""
        self._awaited = self._closed(self._awaited)
        if self._is_gate_closed(gate) and not any(gate is other for other in self._awaited):
            self._awaited.append(gate)
            self._waits.append(gate)

    def _closed(self, gates: Iterable[Gate]) -> list[Gate]:
        return [gate for gate in gates if self._is_gate_closed(gate)]

    def _take_waits(self) -> tuple[Gate, ...]:
        waits, self._waits = self._waits, []
        return tuple(self._closed(waits))

    # ---------------------------------------------------------------- running

    def obstacles(self) -> list[Gate]:
        """Closed gates that the first entry waits for."""
        return self._closed(self.entries[0].after)

    def begin(self) -> Entry[G]:
        """Take the first entry out, which is not blocked, and run it next."""
        assert self.running is None, "one at a time"
        self.running = self.entries.popleft()
        return self.running

    def end(self, error: BaseException | None) -> None:
        """What was begun has ended. `error` is what it raised."""
        entry, self.running = self.running, None
        assert entry is not None, "it was begun"
        if entry.work is None:
            self._end_record(entry)
            return
        self._num_works -= 1
        self._error = self._error or error or entry.dropped
        if entry.dropped is None:
            entry.gate.end(error)

    def _end_record(self, entry: Entry[G]) -> None:
        error, self._error = self._error, None
        entry.gate.end(error)

    def drop(self) -> None:
        """Take no more, and fail the gates of works that have not begun.

        Records behind a work that runs end with it: until then it may use what it was given.
        """
        self.is_closed = True
        for entry in self.entries:
            if entry.work is not None and entry.dropped is None:
                entry.dropped = LaneClosedError(f"lane {self.name!r} was closed before this ran.")
                entry.work = _never
                entry.gate.end(entry.dropped)
            entry.after = ()
        if self.running is None:
            self.end_dropped()

    def end_dropped(self) -> None:
        """End all entries after `drop`."""
        while self.entries:
            self.begin()
            self.end(None)


def _never() -> None:
    """Stands where the work was, which may keep a buffer alive."""


def without_frames(error: BaseException, lane_name: str) -> BaseException:
    """`error` and what led to it without tracebacks, which would keep every buffer alive that its
    frames know; a note says where it was raised."""
    if error.__traceback__ is not None:
        error.add_note(f"raised on lane {lane_name!r}, {_place(error.__traceback__)}")
    pending, seen = [error], set()
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = None
        pending += [other for other in (one.__cause__, one.__context__) if other is not None]
        if isinstance(one, BaseExceptionGroup):
            pending += one.exceptions
    return error


def _place(traceback: TracebackType) -> str:
    """Function, file and line of the innermost frame."""
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    code = traceback.tb_frame.f_code
    return f"in {code.co_qualname} ({code.co_filename}:{traceback.tb_lineno})"
