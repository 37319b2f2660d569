"""What PipelineConnector does for one request: noted on the device thread, read when it is done.

Switched off, it costs a comparison a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from interlace.connectors.pipeline.options import LoadMode
from interlace.connectors.pipeline.scheduler import PipelineScheduler
from interlace.connectors.pipeline.worker_times import Stopwatch, TransferStats

MOST_LOADS = 64
MOST_STEPS = 64
"""Kept of one request: older ones are forgotten."""


class LoadTimes(NamedTuple):
    """One load."""

    num_bytes: int
    seconds: float
    """From its first copy to its last one, on its lane."""
    submit_s: float
    """Of the host, to queue a load within a step; of another one, to begin it."""
    num_copies: int
    num_runs: int
    """Of neighbours, in each layer."""
    read_s: float = 0.0
    """Before the first copy, from files into host memory."""

    @property
    def whole_s(self) -> float:
        """Reading and copying."""
        return self.read_s + self.seconds


class StepTime(NamedTuple):
    """One forward with its sampling, on the device."""

    num_tokens: int
    seconds: float


class Metered(NamedTuple):
    """One request, or several."""

    device_s: float | None
    """From what was queued for it first, a load or a forward, to its sampled token; None if no
    forward ran."""
    loads: tuple[LoadTimes, ...]
    steps: tuple[StepTime, ...] = ()


class Transfer(Protocol):
    """The part of `PipelinedLoad` and `FedTransfer` that is read."""

    @property
    def stats(self) -> TransferStats:
        """What was copied so far."""
        ...


class _Noted(NamedTuple):
    transfer: Transfer
    num_runs: int
    submit_s: Callable[[], float]
    read_s: float


class _Step(NamedTuple):
    num_tokens: int
    begin: Any
    end: Any


class Meter:
    """Shared by the benchmark and both sides of one connector."""

    def __init__(self, load_mode: LoadMode = "auto") -> None:
        self.load_mode: LoadMode = load_mode
        """Of requests that are matched from now on. Event loop."""
        self.link_bytes_per_s = 0.0
        """Of one long copy, as the connector measured it when it was made; 0 if it did not."""
        self.slowdown = 1
        """How many times slower the link is made: see `slow_link.py`. Changed only while nothing is
        under way."""
        self.predicted_s: float | None = None
        """Of the request that was matched last: see `Hit`. Event loop."""
        self.scheduler: PipelineScheduler | None = None
        """The connector's scheduler side, from the handshake on. Event loop."""
        self.is_on = False
        self._watch: Stopwatch | None = None
        self._begin: Any = None
        self._end: Any = None
        self._noted: deque[_Noted] = deque(maxlen=MOST_LOADS)
        self._begun: _Step | None = None
        self._steps: deque[_Step] = deque(maxlen=MOST_STEPS)

    # All that follows is for the device thread.

    def use(self, watch: Stopwatch) -> None:
        """Mark moments with this."""
        self._watch = watch

    def begin(self) -> None:
        """Note what happens from now on."""
        self.is_on = True
        self._begin = self._end = self._begun = None
        self._noted.clear()
        self._steps.clear()

    def note_begin(self, num_tokens: int) -> None:
        """A load, or a forward of so many tokens, is about to be queued."""
        if self._watch is not None:
            mark = self._watch.mark()
            self._begun = _Step(num_tokens, mark, None) if num_tokens else None
            self._begin = mark if self._begin is None else self._begin

    def note_load(
        self,
        transfer: Transfer,
        *,
        num_runs: int,
        submit_s: Callable[[], float],
        read_s: float = 0.0,
    ) -> None:
        """A load was queued; see `LoadTimes`. `submit_s` is asked for when all of it is."""
        self._noted.append(_Noted(transfer, num_runs, submit_s, read_s))

    def note_end(self) -> None:
        """A forward was queued, with its sampling."""
        if self._watch is not None:
            self._end = self._watch.mark()
            if self._begun is not None:
                self._steps.append(self._begun._replace(end=self._end))
                self._begun = None

    def take(self) -> Metered:
        """What was noted, of work that has ended; notes nothing more. Waits for the last forward:
        its token reaches the host before that."""
        self.is_on = False
        device_s = None
        if self._watch is not None and self._begin is not None and self._end is not None:
            self._watch.wait(self._end)
            device_s = self._watch.seconds(self._begin, self._end)
        noted = [(one, one.transfer.stats) for one in self._noted]
        self._noted.clear()
        return Metered(
            device_s,
            tuple(
                LoadTimes(
                    stats.num_bytes,
                    stats.seconds,
                    one.submit_s(),
                    stats.num_copies,
                    one.num_runs,
                    one.read_s,
                )
                for one, stats in noted
                if stats.seconds is not None
            ),
            tuple(self._step_times()),
        )

    def _step_times(self) -> Iterator[StepTime]:
        while self._steps and self._watch is not None:
            step = self._steps.popleft()
            seconds = self._watch.seconds(step.begin, step.end)
            if seconds is not None:
                yield StepTime(step.num_tokens, seconds)
