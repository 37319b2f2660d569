"""Gates made of CUDA events: of a lane's work, and those that captured graphs wait for.

See `cuda_lanes.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from interlace.layers.cuda_streams import Event, Stream, Streams

if TYPE_CHECKING:
    from interlace.layers.cuda_lane_host import LaneHost
    from interlace.layers.cuda_lanes import CudaLane

_SHORTEST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 1e-3


class CudaGate:
    """A gate of a `CudaLane`, or of the compute stream. Any thread.

    Held back on the host, then on the stream, then ended. On the device thread, asking and waiting
    put on their streams whatever nothing holds back any more.
    """

    def __init__(self, host: LaneHost, lane: CudaLane | None) -> None:
        """For lanes. `lane` is None if it is on its stream at once."""
        self.host = host
        self.lane = lane
        self._event: Event | None = None
        self._error: BaseException | None = None
        self._has_ended = False

    def query(self) -> bool:
        """Whether it is no longer closed."""
        if not self._has_ended:
            self.host.poll()
            self._look()
        return self._has_ended

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is no longer closed; False after `timeout_s` seconds.

        What is held back on the host is waited for too, by way of what holds it back.
        """
        patience = self.host.patience(timeout_s)
        return self.query() or (self.wait_until_queued(patience) and self._wait_for_event(patience))

    @property
    def error(self) -> BaseException | None:
        """What its work raised; `LaneClosedError` if that never ran."""
        self._look()
        return self._error if self._has_ended else None

    @property
    def is_queued(self) -> bool:
        """Whether its event is on the stream, or it has ended: no stream can wait for it before."""
        return self._event is not None or self._has_ended

    def wait_until_queued(self, patience: Patience) -> bool:
        """Whether it is on its stream before the patience ends. Held works get on meanwhile."""
        while not self.is_queued:
            obstacle = self.host.obstacle_of(self.lane)
            if obstacle is None:
                if not patience.pause():
                    break
            elif not obstacle.wait(patience.left_s):
                break
            self.host.poll()
        return self.is_queued

    def _wait_for_event(self, patience: Patience) -> bool:
        if not patience.is_endless:
            while not self._look() and patience.pause():
                pass
        elif self._event is not None:
            self._event.synchronize()
            self._has_ended = True
        return self._has_ended

    def _look(self) -> bool:
        """Whether it has ended; nothing is put on a stream by that."""
        if not self._has_ended and self._event is not None and self._event.query():
            self._has_ended = True
        return self._has_ended

    # ---------------------------------------------------------------- for lanes

    @property
    def has_ended(self) -> bool:
        """As `query`, but nothing is put on a stream by it."""
        return self._look()

    def put(self, event: Event, error: BaseException | None) -> None:
        """It is on the stream now, and will open, or fail, when `event` passes."""
        self._error = error
        self._event = event

    def fail(self, error: BaseException) -> None:
        """It was never on the stream."""
        self._error = error
        self._has_ended = True

    def hold_back(self, stream: Stream) -> None:
        """Let `stream` wait for it."""
        if not self._look():
            assert self._event is not None, "it is queued"
            stream.wait_event(self._event)

    def __repr__(self) -> str:
        if not self.has_ended:
            return "<CudaGate closed>" if self.is_queued else "<CudaGate held back>"
        return f"<CudaGate {'open' if self._error is None else 'failed'}>"


class GraphGate:
    """A gate that captured graphs wait for, armed again for each step. Device thread.

        gate = lanes.graph_gate()                    # before anything is captured
        with torch.cuda.graph(graph):
            ...; gate.wait_here(); attend(...)
        each step: load.submit(copies); load.arm(gate, step_id); graph.replay()

    **Arm, then launch.** A replay waits for the record that was the last one at its launch, so
    the gate may be armed again while the graph runs; and a replay that is launched before its gate
    is armed passes on that of an older step. So whoever launches refuses unless `armed_for` is the
    step's number.
    """

    def __init__(self, streams: Streams) -> None:
        """Records it once, since a wait for an event that was never recorded is left out."""
        self._streams = streams
        self._event = streams.event(is_external=True)
        self._event.record(streams.current())
        self.armed_for: int | None = None
        """The number of the step for which it was armed last."""

    def wait_here(self) -> None:
        """Let the current stream wait for it; while a graph is captured, each of its replays."""
        self._streams.current().wait_event(self._event)

    def record(self, stream: Stream, step_id: int) -> Event:
        """For lanes: arm it behind all that is on `stream`. Returns the event that passes then."""
        self._event.record(stream)
        self.armed_for = step_id
        return self._event


class Patience:
    """How long one wait may still take, and how long it sleeps between two looks."""

    def __init__(
        self, timeout_s: float | None, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        """`timeout_s` None is without an end."""
        self._clock = clock
        self._sleep = sleep
        self._end = None if timeout_s is None else clock() + timeout_s
        self._pause_s = _SHORTEST_PAUSE_S

    @property
    def is_endless(self) -> bool:
        """Whether it has no end."""
        return self._end is None

    @property
    def left_s(self) -> float | None:
        """Seconds, at least 0; None if it has no end."""
        return None if self._end is None else max(0.0, self._end - self._clock())

    def pause(self) -> bool:
        """Sleep, longer each time; False if there is no time left."""
        left_s = self.left_s
        if left_s == 0.0:
            return False
        self._sleep(self._pause_s if left_s is None else min(self._pause_s, left_s))
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return True
