"""Reading on a lane, so that a read which hangs holds up nobody beyond a deadline.

Knows nothing of folders: it runs callables, one after another.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from interlace.engine.errors import LaneClosedError
from interlace.engine.ports import Lane, Lanes

logger = logging.getLogger(__name__)

MAX_HUNG_LANES = 2
"""So many reads may hang, each on a lane of its own, before further loads fail at once."""
_MAX_PENDING = 4
"""Its users ask for a second reading ahead of the first at most."""

T = TypeVar("T")


class _Pulse:
    """When a lane's work last got on, on the reader's clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.at = clock()

    def beat(self) -> None:
        self.at = self._clock()

    @property
    def age_s(self) -> float:
        return self._clock() - self.at


class Reading(Generic[T]):
    """One callable on its way through a lane. For one thread, but for what the lane runs."""

    def __init__(self, work: Callable[[Callable[[], None]], T], lane: Lane, pulse: _Pulse) -> None:
        """Raises: `LaneFullError`."""
        self.pulse = pulse
        self._result: list[T] = []

        def run() -> None:
            pulse.beat()
            self._result.append(work(pulse.beat))
            pulse.beat()

        self._gate = lane.submit(run)

    @property
    def is_done(self) -> bool:
        """Whether the callable has returned or raised."""
        return self._gate.query()

    def wait(self, timeout_s: float) -> bool:
        """Whether it is done after at most so long."""
        return self._gate.wait(timeout_s)

    def take_result(self) -> T | None:
        """What it returned; None if it raised, which is logged, or never ran."""
        error = self._gate.error
        if error is not None and not isinstance(error, LaneClosedError):
            logger.error("Reading stored KV failed.", exc_info=error)
        return self._result.pop() if self._result else None


class Reader:
    """Runs one callable at a time, in order. For one thread, the device thread."""

    def __init__(
        self,
        lanes: Lanes,
        name: str,
        *,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`deadline_s` is the longest time without a sign of life."""
        self._lanes = lanes
        self._name = name
        self._deadline_s = deadline_s
        self._clock = clock
        self._asked: list[Reading[object]] = []  # on the present lane, not known to be done
        self._hung: list[Reading[object]] = []  # the first one on each lane that was given up
        self._take_lane()

    def _take_lane(self) -> None:
        self._lane = self._lanes.lane(self._name, max_pending=_MAX_PENDING)
        self._pulse = _Pulse(self._clock)

    def ask(self, work: Callable[[Callable[[], None]], T]) -> Reading[T] | None:
        """Run `work(beat)` after what was asked for before; it calls `beat` as it gets on.

        On a fresh lane if the present one hangs; None if too many have been given up, and hang.
        """
        if self.hangs and not self._give_up():
            return None
        if not self._asked:
            self._pulse.beat()
        reading = Reading(work, self._lane, self._pulse)
        self._asked.append(reading)  # type: ignore[arg-type]  # whatever the result's type
        return reading

    def _give_up(self) -> bool:
        """Take a fresh lane; whether there may be one more. What has begun on the old one goes on
        with its own memory, which nobody else sees; the rest of it fails."""
        self._hung = [reading for reading in self._hung if not reading.is_done]
        if len(self._hung) >= MAX_HUNG_LANES:
            return False
        self._lane.close(timeout_s=0.0)
        self._hung.append(self._asked[0])
        self._asked.clear()
        self._take_lane()
        return True

    @property
    def is_busy(self) -> bool:
        """Whether anything that was asked for is not done, also on lanes that were given up."""
        self._forget_done()
        return bool(self._asked) or not all(reading.is_done for reading in self._hung)

    @property
    def hangs(self) -> bool:
        """Whether the present lane is busy, and has not got on within the deadline."""
        self._forget_done()
        return bool(self._asked) and self._pulse.age_s > self._deadline_s

    def _forget_done(self) -> None:
        self._asked = [reading for reading in self._asked if not reading.is_done]

    def wait(self, reading: Reading[T]) -> bool:
        """Whether `reading` is done; False as soon as its lane has not got on within the deadline.

        With lanes that know no time, False if it cannot end.
        """
        while True:
            last_beat = reading.pulse.at
            if reading.wait(max(self._deadline_s - reading.pulse.age_s, 0.0)):
                return True
            if reading.pulse.at == last_beat:
                return False

    def close(self) -> None:
        """Take no more. Does not wait for what hangs."""
        self._lane.close(timeout_s=0.0)
