"""Marks of moments, and when they were: by a clock on a CPU, by events on a GPU.

A GPU's events tell how far they are apart, to half a microsecond, and nothing of a clock. So one of
them is an *anchor*, whose time is known: recorded on a stream of its own, which has nothing else to
do, and looked at until it has passed, which takes some ten microseconds and holds up no work of the
device. Their distance is told in milliseconds with 24 bits, so a fresh anchor is taken every few
seconds; times that are to be compared closely, those of one step, are told from the same one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

from interlace.layers.cuda_streams import Streams, TimedEvent

ANCHOR_S = 4.0
"""Between two anchors: a distance is right to 0.5 us then."""
_MOST_LOOKS = 200
"""At an anchor's event, a microsecond each: then it is tried again with the next step. The first
one is waited for."""
_FIRST_TRIES = 3
"""Of which the narrowest counts."""
_MOST_SPARE_EVENTS = 4096
"""Kept to be used again: making one takes longer than recording it."""


class Moments(Protocol):
    """Device thread, unless it is said otherwise."""

    @property
    def told_by(self) -> Literal["device", "host"]:
        """Who tells the times."""
        ...

    @property
    def anchor(self) -> Any:
        """From which times are told now: to be kept with marks, and given back with them."""
        ...

    def refresh(self) -> None:
        """A step begins: take a fresh anchor if it is time. Waits for 0.2 ms at most."""
        ...

    def mark(self) -> Any:
        """When all that the current stream has been given by now has ended, or now. On a CPU any
        thread."""
        ...

    def has_passed(self, mark: Any) -> bool:
        """Whether that moment is over. Never waits."""
        ...

    def wait(self, mark: Any) -> None:
        """Until it is."""
        ...

    def time_s(self, mark: Any, anchor: Any) -> float:
        """Of a mark that has passed, on the engine's clock."""
        ...

    def release(self, mark: Any) -> None:
        """It is not needed any more."""
        ...


class ClockMoments:
    """Where work is done when it was called. Any thread."""

    told_by: Literal["device", "host"] = "host"
    anchor = None

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds; any thread may call it."""
        self._clock = clock

    def refresh(self) -> None:
        """Nothing: see `Moments`, as for all others."""

    def mark(self) -> float:
        """Now."""
        return self._clock()

    def has_passed(self, mark: float) -> bool:
        """Yes."""
        return True

    def wait(self, mark: float) -> None:
        """It has."""

    def time_s(self, mark: float, anchor: None) -> float:
        """Itself."""
        return mark

    def release(self, mark: float) -> None:
        """Nothing is held."""


class Anchor(NamedTuple):
    """An event, and when it passed."""

    event: TimedEvent
    time_s: float
    give_s: float
    """How far that may be off, both ways."""


class EventMoments:
    """Events on a GPU's streams. Device thread."""

    told_by: Literal["device", "host"] = "device"

    def __init__(self, streams: Streams, clock: Callable[[], float]) -> None:
        """`clock`: the engine's, in seconds. Waits for the first anchor."""
        self._streams = streams
        self._clock = clock
        self._idle_stream = streams.stream(is_urgent=True)
        self._spare: deque[TimedEvent] = deque()
        self.anchor = self._first_anchor()

    def refresh(self) -> None:
        """See `Moments`."""
        if self._clock() - self.anchor.time_s >= ANCHOR_S:
            self.anchor = self._look() or self.anchor

    def _first_anchor(self) -> Anchor:
        found = [self._look() for _ in range(_FIRST_TRIES)]
        narrowest = min((one for one in found if one), key=lambda one: one.give_s, default=None)
        return narrowest or self._waited_for()

    def _look(self) -> Anchor | None:
        """A new anchor; None if its event does not pass at once."""
        event = self._streams.timed_event()
        before_s = self._clock()
        event.record(self._idle_stream)
        for _ in range(_MOST_LOOKS):
            if event.query():
                after_s = self._clock()
                return Anchor(event, (before_s + after_s) / 2, (after_s - before_s) / 2)
        return None

    def _waited_for(self) -> Anchor:
        event = self._streams.timed_event()
        event.record(self._idle_stream)
        event.synchronize()
        return Anchor(event, self._clock(), 0.0)

    def mark(self) -> TimedEvent:
        """See `Moments`: an event on the current stream."""
        event = self._spare.pop() if self._spare else self._streams.timed_event()
        event.record(self._streams.current())
        return event

    def external_event(self) -> TimedEvent:
        """For a captured graph, each replay of which records it again. Not while one is captured:
        it is recorded once here, so that it exists."""
        event = self._streams.timed_event(is_external=True)
        event.record(self._streams.current())
        return event

    def record(self, event: TimedEvent) -> TimedEvent:
        """An `external_event`, on the current stream."""
        event.record(self._streams.current())
        return event

    def has_passed(self, mark: TimedEvent) -> bool:
        """See `Moments`."""
        return mark.query()

    def wait(self, mark: TimedEvent) -> None:
        """See `Moments`."""
        mark.synchronize()

    def time_s(self, mark: TimedEvent, anchor: Anchor) -> float:
        """See `Moments`."""
        return anchor.time_s + anchor.event.elapsed_time(mark) / 1e3

    def release(self, mark: TimedEvent) -> None:
        """See `Moments`. Not of an external event."""
        if len(self._spare) < _MOST_SPARE_EVENTS:
            self._spare.append(mark)
