"""Lanes made of CUDA streams, gates made of events. See `interlace.engine.ports.Lane`.

    lanes = CudaLanes(CudaStreams(torch.device("cuda")))
    load, compute = lanes.lane("load"), lanes.compute
    load.wait(compute.record())             # the pages are free when the steps so far have ended
    copied = load.submit(queue_copies)      # runs at once, and only queues device work
    compute.wait(copied)                    # kernels queued from now on come after the copies

A work runs on the device thread, within `submit`, while its lane's stream is the current one; its
gate is an event behind it. No stream ever waits for a file or for a CPU thread: a work that comes
after such a gate is held back on the host, with all that is submitted behind it, and put on the
stream when the gate has opened and somebody asks: any call of a lane, `Gate.query` and `Gate.wait`
on the device thread, or `CudaLanes.poll`. So a step that must find the work on its stream waits for
the gate first, or says `compute.wait`.

A work may come in parts, with a gate behind each (`submit_parts`): that takes the host less time
than as many works do.

**Threads.** Lanes belong to the device thread, which makes them; gates may be asked and waited for
by any thread, but while graphs are captured by none.

**Memory.** A lane keeps each work, and so all that it refers to, until its event has passed and
the lane is looked at again. So a tensor may be used on any lane as long as the work itself holds
it. What a work allocates belongs to its lane's stream: whoever uses that on another one keeps it
until then, or says `record_stream`.

An error of the device itself comes out of whatever call meets it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from interlace.engine.errors import LaneClosedError, LaneFullError
from interlace.engine.ports import Gate
from interlace.layers.cuda_gates import CudaGate, GraphGate
from interlace.layers.cuda_lane_host import LaneHost
from interlace.layers.cuda_streams import Stream, Streams
from interlace.layers.lane_queue import without_frames


class CudaLanes:
    """Makes a stream for each lane. Made and used on the device thread."""

    def __init__(
        self,
        streams: Streams,
        *,
        urgent: Collection[str] = ("load",),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Lanes with one of the names `urgent` go before the others, as far as the device lets
        them. `clock` and `sleep`, in seconds, are for waits with a timeout."""
        self._streams = streams
        self._urgent = frozenset(urgent)
        self._host = LaneHost(clock, sleep)
        self.compute = ComputeLane(streams, self._host)
        """The stream of the steps."""

    def lane(self, name: str, *, max_pending: int = 1024) -> CudaLane:
        """A lane of its own. Raises: `ValueError` if `max_pending` is not positive."""
        return CudaLane(
            name,
            self._streams,
            self._streams.stream(is_urgent=name in self._urgent),
            self._host,
            max_pending=max_pending,
        )

    def graph_gate(self) -> GraphGate:
        """A gate for captured graphs. Not while one is captured."""
        return GraphGate(self._streams)

    def poll(self) -> bool:
        """Put on their streams what nothing holds back any more, and let go of what has ended.

        Whether anything is still held back.
        """
        self._host.poll()
        return self._host.holds_back


class ComputeLane:
    """The current stream of the device thread, on which steps are queued by whoever makes them."""

    name = "compute"

    def __init__(self, streams: Streams, host: LaneHost) -> None:
        """For `CudaLanes`."""
        self._streams = streams
        self._host = host

    def record(self) -> CudaGate:
        """A gate that opens when all that is on the stream now has ended."""
        gate = CudaGate(self._host, None)
        event = self._streams.event()
        event.record(self._streams.current())
        gate.put(event, None)
        return gate

    def wait(self, gate: Gate, timeout_s: float | None = None) -> bool:
        """What is queued from now on begins when `gate` is no longer closed.

        The host waits until the gate's work is on a stream, or until a gate of another kind is no
        longer closed: for `timeout_s` seconds at most, then the answer is False, and nothing waits.
        """
        if not isinstance(gate, CudaGate):
            return gate.wait(timeout_s)
        if not gate.query():
            if not gate.wait_until_queued(self._host.patience(timeout_s)):
                return False
            gate.hold_back(self._streams.current())
        return True


class _Part(NamedTuple):
    """Of a work: what it does, and what opens behind it."""

    gate: CudaGate
    work: Callable[[], None]
    armed: GraphGate | None = None


class _Entry(NamedTuple):
    """A work or a record that is not on the stream yet."""

    gate: CudaGate
    """Behind all of it."""
    after: list[Gate]
    """What the stream, or the host, waits for first."""
    parts: tuple[_Part, ...]
    """None of a record."""
    step_id: int | None = None
    """For which graph gates are armed."""


class CudaLane:
    """One stream. Device thread. Works that are held back stay in order with all behind them."""

    def __init__(
        self, name: str, streams: Streams, stream: Stream, host: LaneHost, *, max_pending: int
    ) -> None:
        """`max_pending` bounds works that have not ended, held back or on the stream."""
        if max_pending < 1:
            raise ValueError(f"max_pending of lane {name!r} must be at least 1, not {max_pending}.")
        self._name = name
        self._streams = streams
        self._stream = stream
        self._host = host
        self._max_pending = max_pending
        self._is_closed = False
        self._is_launching = False
        self._held: deque[_Entry] = deque()
        self._num_held_works = 0
        self._running: deque[_Entry] = deque()  # works on the stream
        self._waits: list[Gate] = []  # for the next entry
        self._error: BaseException | None = None  # the first one since the last record
        self._has_new = True  # since the last record
        self._bare_record: CudaGate | None = None  # the last record, if it came after nothing new

    @property
    def name(self) -> str:
        """For people."""
        return self._name

    def submit(self, work: Callable[[], None]) -> CudaGate:
        """Run `work`, at once if nothing is to be waited for on the host. It only queues.

        Raises: `LaneFullError`, and `LaneClosedError` after `close`.
        """
        gate = CudaGate(self._host, self)
        self._add_work((_Part(gate, work),))
        return gate

    def submit_parts(
        self,
        parts: Sequence[Callable[[], None]],
        graph_gates: Sequence[GraphGate],
        step_id: int,
    ) -> list[CudaGate]:
        """Run `parts`, one at least, as one work; a gate for each opens as soon as it has ended.

        With each, one of `graph_gates` is armed for the graphs of this step: see `arm`. They are
        the same events, so when it is armed again before that has ended, the gate here opens later.
        A part that raises fails its own gate; the next ones run, but arm nothing.

        Raises: as `submit`.
        """
        work = tuple(
            _Part(CudaGate(self._host, self), part, armed)
            for part, armed in zip(parts, graph_gates, strict=True)
        )
        self._add_work(work, step_id)
        return [part.gate for part in work]

    def _add_work(self, parts: tuple[_Part, ...], step_id: int | None = None) -> None:
        self._host.poll()
        self._check_room()
        self._num_held_works += 1
        self._has_new = True
        self._add(parts[-1].gate, parts, step_id)

    def record(self) -> CudaGate:
        """A gate for all that was submitted and waited for so far."""
        if not self._has_new and self._bare_record is not None:
            return self._bare_record
        was_bare, self._has_new = not self._has_new, False
        gate = CudaGate(self._host, self)
        self._add(gate)
        self._bare_record = gate if was_bare else None
        return gate

    def wait(self, gate: Gate) -> None:
        """Begin what is submitted from now on when `gate` is no longer closed. Does not wait.

        The stream waits for a CUDA gate that is on a stream; for any other one, the host does.
        """
        if self._is_closed or gate.query():
            return
        if isinstance(gate, CudaGate) and gate.lane is self:
            return  # works of one lane come one after another anyway
        self._has_new = True
        if isinstance(gate, CudaGate) and gate.is_queued and not self._held and not self._waits:
            gate.hold_back(self._stream)
            return
        self._waits = [other for other in self._waits if not _has_ended(other)]
        if not any(gate is other for other in self._waits):
            self._waits.append(gate)

    def arm(self, gate: GraphGate, step_id: int) -> bool:
        """Let `gate` open, for the graphs of this step, when all that was submitted has ended.

        False, and nothing is armed, if something is held back on the host, or a work has raised
        since the last `record`: a graph would pass on what did not come.
        """
        self._host.poll()
        if self._held or self._waits or self._error is not None:
            return False
        gate.record(self._stream, step_id)
        return True

    def query(self) -> bool:
        """Whether all work has ended."""
        self._host.poll()
        return self._num_works == 0

    def close(self, timeout_s: float | None = None) -> bool:
        """Take no more work and wait for what was submitted, for `timeout_s` seconds at most.

        If that takes longer, or if it is called by the lane's own work, the gates of what is held
        back fail; what is on the stream ends in its time. May be repeated.
        """
        self._is_closed = True
        queue = self._held or self._running
        has_ended = not self._is_launching and (not queue or queue[-1].gate.wait(timeout_s))
        if not has_ended:
            self._drop()
        self._host.poll()
        return has_ended

    def __repr__(self) -> str:
        return f"<CudaLane {self._name} held={len(self._held)} running={len(self._running)}>"

    # ---------------------------------------------------------------- queueing

    @property
    def _num_works(self) -> int:
        return self._num_held_works + len(self._running)

    def _check_room(self) -> None:
        if self._is_closed:
            raise LaneClosedError(f"lane {self._name!r} is closed: submit work before that.")
        if self._num_works >= self._max_pending:
            raise LaneFullError(
                f"lane {self._name!r} has {self._num_works} works that have not ended, as many as"
                " it may: drop this one, or wait for a gate and try again."
            )

    def _add(
        self, gate: CudaGate, parts: tuple[_Part, ...] = (), step_id: int | None = None
    ) -> None:
        waits, self._waits = self._waits, []
        self._held.append(_Entry(gate, waits, parts, step_id))
        self._host.note_busy(self)
        self.advance()

    # ---------------------------------------------------------------- for `LaneHost`

    @property
    def is_holding_back(self) -> bool:
        """Whether anything is not on the stream yet."""
        return bool(self._held)

    @property
    def is_idle(self) -> bool:
        """Whether nothing has to be looked after."""
        return not self._held and not self._running

    def obstacle(self) -> Gate | None:
        """The closed gate that holds back the first entry; None if none does."""
        after = self._held[0].after if self._held else []
        return next((gate for gate in after if not _may_pass(gate)), None)

    def advance(self) -> bool:
        """Let go of what has ended; put on the stream what nothing holds back.

        Whether there was any of that. Does nothing while one of its own works runs: that is looked
        at again when the work is over.
        """
        while self._running and self._running[0].gate.has_ended:
            self._running.popleft()
        has_launched = False
        while self._held and not self._is_launching and self.obstacle() is None:
            self._launch(self._held.popleft())
            has_launched = True
        return has_launched

    def _launch(self, entry: _Entry) -> None:
        for gate in entry.after:
            if isinstance(gate, CudaGate):
                gate.hold_back(self._stream)
        if not entry.parts:
            error, self._error = self._error, None
            self._put(entry.gate, error)
            return
        self._is_launching = True
        try:
            with self._streams.on(self._stream):
                for part in entry.parts:
                    self._run(part, entry.step_id)
        except BaseException as raised:
            for part in entry.parts:
                if not part.gate.is_queued:
                    self._put(part.gate, raised)  # it never ran
            raise
        finally:
            self._is_launching = False
            self._num_held_works -= 1
            self._running.append(entry)

    def _run(self, part: _Part, step_id: int | None) -> None:
        error: BaseException | None = None
        try:
            part.work()
        except Exception as raised:  # noqa: BLE001 - whatever it is, it belongs to the gate
            error = without_frames(raised, self._name)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._error = self._error or error
            if part.armed is None or step_id is None or self._error is not None:
                self._put(part.gate, error)
            else:
                part.gate.put(part.armed.record(self._stream, step_id), None)

    def _put(self, gate: CudaGate, error: BaseException | None) -> None:
        event = self._streams.event()
        event.record(self._stream)
        gate.put(event, error)

    def _drop(self) -> None:
        """Fail what is held back; records among it open behind what is on the stream."""
        held, self._held = self._held, deque()
        for entry in held:
            if not entry.parts:
                self._launch(entry._replace(after=[]))
                continue
            dropped = LaneClosedError(f"lane {self._name!r} was closed before this ran.")
            self._error = self._error or dropped
            self._num_held_works -= 1
            for part in entry.parts:
                part.gate.fail(dropped)


def _may_pass(gate: Gate) -> bool:
    """Whether the host need not wait for it: a stream can, or it is no longer closed."""
    return gate.is_queued if isinstance(gate, CudaGate) else gate.query()


def _has_ended(gate: Gate) -> bool:
    return gate.has_ended if isinstance(gate, CudaGate) else gate.query()
