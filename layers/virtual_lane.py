"""One lane and its gates, as `VirtualLanes` drives them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from interlace.engine.errors import VirtualLaneError
from interlace.engine.ports import Gate
from interlace.layers.lane_queue import LaneQueue


class Driver(Protocol):
    """Decides which lane advances: `VirtualLanes`."""

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held by whoever changes a lane. One thread may take it repeatedly."""
        ...

    def poll(self, asked: VirtualGate | VirtualLane) -> None:
        """Somebody asks whether this has ended: some work may run."""
        ...

    def run_until_ended(self, asked: VirtualGate | VirtualLane, *, may_give_up: bool) -> bool:
        """Somebody waits for this. False if nothing can run any more.

        Raises: `VirtualLaneError` then, unless it may give up.
        """
        ...

    def changed(self) -> None:
        """Something was queued, or has ended without being run."""
        ...


class VirtualGate:
    """A gate of a `VirtualLane`. Asking and waiting make lanes advance."""

    def __init__(self, lane: VirtualLane, label: str) -> None:
        self.label = label
        """As in the trace; of a record with "@"."""
        self.lane = lane
        self.num_polls = 0
        self.has_ended = False
        """Whether it is no longer closed. To look at this makes nothing run."""
        self._error: BaseException | None = None

    def query(self) -> bool:
        """Whether it is no longer closed, after some work may have run."""
        self.lane.world.poll(self)
        return self.has_ended

    def wait(self, timeout_s: float | None = None) -> bool:
        """Let work run until it is no longer closed.

        With a timeout of 0 as `query`; with another one False if nothing can run any more.
        Raises: `VirtualLaneError` then, without a timeout.
        """
        if timeout_s is not None and timeout_s <= 0:
            return self.query()
        return self.lane.world.run_until_ended(self, may_give_up=timeout_s is not None)

    @property
    def error(self) -> BaseException | None:
        """Why it failed."""
        return self._error

    def end(self, error: BaseException | None) -> None:
        """For the lane."""
        self.has_ended, self._error = True, error

    def __repr__(self) -> str:
        state = "closed" if not self.has_ended else "open" if self._error is None else "failed"
        return f"<VirtualGate {self.label} {state}>"


class VirtualLane:
    """One queue. All methods are for the thread that drives its `VirtualLanes`."""

    def __init__(self, world: Driver, name: str, label: str, max_pending: int) -> None:
        self.world = world
        self.label = label
        """The name, and a number if there are several of it."""
        self.queue: LaneQueue[VirtualGate] = LaneQueue(name, max_pending, _is_closed)
        self.num_polls = 0
        self._num_works = 0
        self._num_records = 0

    @property
    def name(self) -> str:
        """As it was asked for."""
        return self.queue.name

    def submit(self, work: Callable[[], None]) -> VirtualGate:
        """Queue `work`. Raises: `LaneFullError`, and `LaneClosedError` after `close`."""
        with self.world.lock:
            gate = VirtualGate(self, f"{self.label}#{self._num_works + 1}")
            self.queue.add_work(gate, work)
            self._num_works += 1
            self.world.changed()
        return gate

    def record(self) -> VirtualGate:
        """A gate for all that is queued now, after what the lane was told to wait for."""
        with self.world.lock:
            gate = self.queue.add_record(self._record_gate)
            self.world.changed()
        return gate

    def _record_gate(self) -> VirtualGate:
        self._num_records += 1
        return VirtualGate(self, f"{self.label}@{self._num_records}")

    def wait(self, gate: Gate) -> None:
        """Begin what is queued from now on when `gate` is no longer closed. Nothing advances.

        Raises: `VirtualLaneError` for a gate of another kind, which no seed could replay.
        """
        if not isinstance(gate, VirtualGate) or gate.lane.world is not self.world:
            raise VirtualLaneError(
                f"lane {self.label!r} was told to wait for {gate!r}, which is not a gate of the"
                " same VirtualLanes: take all lanes of one run from one object."
            )
        with self.world.lock:
            if not self.queue.is_closed:
                self.queue.add_wait(gate)

    def query(self) -> bool:
        """Whether all work has ended, after some of it may have run."""
        self.world.poll(self)
        return self.queue.is_idle

    def close(self, timeout_s: float | None = None) -> bool:
        """Take no more work, and run what is queued.

        If it cannot run to its end, the gates of what is left fail, and the answer is False.
        Raises: `VirtualLaneError` then, without a timeout.
        """
        with self.world.lock:
            self.queue.is_closed = True
            has_ended = self.world.run_until_ended(self, may_give_up=timeout_s is not None)
            if not has_ended:
                self.queue.drop()
                self.world.changed()
        return has_ended

    @property
    def has_ended(self) -> bool:
        """Whether it has nothing left to do."""
        return self.queue.is_empty

    @property
    def lane(self) -> VirtualLane:
        """Itself, as a gate has one."""
        return self

    @property
    def can_advance(self) -> bool:
        """Whether its first entry can begin."""
        queue = self.queue
        return queue.running is None and bool(queue.entries) and not queue.obstacles()

    @property
    def waits_for(self) -> list[VirtualLane]:
        """Lanes whose gates keep it from advancing."""
        gates = self.queue.obstacles() if self.queue.entries else []
        return [_virtual(gate).lane for gate in gates]

    def describe(self) -> str:
        """Label, how much is queued, and why it does not advance."""
        text = f"{self.label} has {len(self.queue.entries)} queued"
        if self.queue.running is not None:
            text += f" and runs {self.queue.running.gate.label}"
        if self.queue.entries and (obstacles := self.queue.obstacles()):
            text += f", behind {', '.join(_virtual(gate).label for gate in obstacles)}"
        return text

    def __repr__(self) -> str:
        return f"<VirtualLane {self.describe()}>"


def _virtual(gate: Gate) -> VirtualGate:
    assert isinstance(gate, VirtualGate), "lanes refuse others"
    return gate


def _is_closed(gate: Gate) -> bool:
    return not _virtual(gate).has_ended
