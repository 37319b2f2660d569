"""Lanes made of threads: what a CPU has in place of streams. See `interlace.engine.ports.Lane`.

    load, store = lanes.lane("load"), lanes.lane("store")
    copied = load.submit(read_files)
    store.wait(copied)                  # what store does from now on comes after it
    written = store.submit(write_files)
    if not written.wait(timeout_s=5.0): ...
    elif written.error is not None: ...

A lane that waits for a gate of its own waits for nothing, since its work runs in order anyway.
Lanes that wait for each other's gates in a circle cannot come about by `Lane.wait`, since a gate
exists before it is waited for; works that wait for gates while they run can do it, and hang. That
is their author's mistake; `VirtualLanes` finds it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from interlace.engine.ports import Gate
from interlace.layers.lane_queue import Entry, LaneQueue, without_frames


class ThreadGate:
    """A gate of a `ThreadLane`. Any thread."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def query(self) -> bool:
        """Whether it is no longer closed."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is no longer closed; False after `timeout_s` seconds."""
        if timeout_s is not None:
            timeout_s = min(timeout_s, threading.TIMEOUT_MAX)
        return self._ended.wait(timeout_s)

    @property
    def error(self) -> BaseException | None:
        """What its work raised, without a traceback; `LaneClosedError` if that never ran."""
        return self._error

    def end(self, error: BaseException | None) -> None:
        """For the lane."""
        self._error = error
        self._ended.set()

    def __repr__(self) -> str:
        state = "closed" if not self.query() else "open" if self.error is None else "failed"
        return f"<ThreadGate {state}>"


class ThreadLanes:
    """Makes a thread for each lane. Holds nothing itself."""

    def lane(self, name: str, *, max_pending: int = 1024) -> ThreadLane:
        """A lane of its own. Raises: `ValueError` if `max_pending` is not positive."""
        return ThreadLane(name, max_pending=max_pending)


class ThreadLane:
    """One daemon thread, which begins with the first work. All methods may come from any thread.

    A work that hangs keeps the lane busy, its thread, and its own gate closed; everyone else can
    wait with a timeout, and take another lane. A lane that nobody holds any more ends when its
    work has; if the interpreter ends first, the gates of what has not begun fail.
    """

    def __init__(self, name: str, *, max_pending: int = 1024) -> None:
        """`max_pending` bounds works that have not ended."""
        self._name = name
        self._inner = _Inner(name, max_pending)
        # Entries keep the lane, and the thread keeps entries: so this runs when none is left, or
        # at the interpreter's end.
        weakref.finalize(self, self._inner.drop)

    @property
    def name(self) -> str:
        """For people."""
        return self._name

    def submit(self, work: Callable[[], None]) -> ThreadGate:
        """Queue `work`. Raises: `LaneFullError`, and `LaneClosedError` after `close`."""
        return self._inner.submit(work, self)

    def record(self) -> ThreadGate:
        """A gate for all that is queued now, after what the lane was told to wait for."""
        return self._inner.record(self)

    def wait(self, gate: Gate) -> None:
        """Begin what is queued from now on when `gate` is no longer closed. Does not wait."""
        self._inner.wait(gate)

    def query(self) -> bool:
        """Whether all work has ended."""
        return self._inner.is_idle

    def close(self, timeout_s: float | None = None) -> bool:
        """Take no more work and wait for what is queued, for `timeout_s` seconds at most.

        If that takes longer, or if it is called by the lane's own work, the gates of what has not
        begun fail. May be repeated.
        """
        return self._inner.close(timeout_s)

    def __repr__(self) -> str:
        return f"<ThreadLane {self._name}>"


class _Inner:
    """What the thread shares with the lane. It does not hold the lane itself."""

    def __init__(self, name: str, max_pending: int) -> None:
        self._queue: LaneQueue[ThreadGate] = LaneQueue(
            name, max_pending, lambda gate: not gate.query()
        )
        self._changed = threading.Condition()  # a lane may be let go of while it is held
        self._thread: threading.Thread | None = None
        self._is_dropped = False

    @property
    def is_idle(self) -> bool:
        with self._changed:
            return self._queue.is_idle

    def submit(self, work: Callable[[], None], lane: object) -> ThreadGate:
        gate = ThreadGate()
        with self._changed:
            self._queue.check_room()
            self._start()  # first: if there can be no thread, nothing is queued
            self._queue.add_work(gate, work, lane)
            self._changed.notify_all()
        return gate

    def record(self, lane: object) -> ThreadGate:
        with self._changed:
            gate = self._queue.add_record(ThreadGate, lane)
            if not self._queue.is_empty:
                self._start()
                self._changed.notify_all()
        return gate

    def wait(self, gate: Gate) -> None:
        with self._changed:
            if not self._queue.is_closed:
                self._queue.add_wait(gate)

    def _start(self) -> None:
        if self._thread is None:
            name = f"interlace-lane-{self._queue.name}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            thread.start()
            self._thread = thread

    def close(self, timeout_s: float | None) -> bool:
        if timeout_s is not None:
            timeout_s = min(timeout_s, threading.TIMEOUT_MAX)
        is_own = threading.current_thread() is self._thread
        with self._changed:
            self._queue.is_closed = True
            self._changed.notify_all()
            has_ended = not is_own and self._changed.wait_for(self._is_empty, timeout_s)
        if not has_ended:
            self.drop()
        elif self._thread is not None and not self._is_dropped:
            self._thread.join()  # it has nothing left to do
        return has_ended

    def _is_empty(self) -> bool:
        return self._queue.is_empty

    def drop(self) -> None:
        """Fail what has not begun."""
        with self._changed:
            self._is_dropped = True
            self._queue.drop()
            self._changed.notify_all()

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        while (first := self._first()) is not None:
            self._pass_through(first)
            first = None  # while the thread waits for more, it keeps nobody's buffers alive

    def _first(self) -> Entry[ThreadGate] | None:
        """Wait for an entry; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue.entries or self._queue.is_closed)
            return self._queue.entries[0] if self._queue.entries else None

    def _pass_through(self, first: Entry[ThreadGate]) -> None:
        """Wait for what is before the first entry, run it, and end it."""
        for gate in first.after:
            gate.wait()
        with self._changed:
            if not self._queue.entries:
                return  # `drop` has ended it
            work = self._queue.begin().work
        error = self._error_of(work)
        with self._changed:
            self._queue.end(error)
            if self._is_dropped:
                self._queue.end_dropped()
            self._changed.notify_all()

    def _error_of(self, work: Callable[[], None] | None) -> BaseException | None:
        try:
            if work is not None:
                work()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to the gate
            return without_frames(error, self._queue.name)
        return None
