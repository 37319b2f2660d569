"""How long work took on its lane: by a clock on the host, or by events on a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from interlace.layers.page_copies import Copied, CopyWay


class Stopwatch(Protocol):
    """Marks moments of whatever the current thread, or the current stream, works on."""

    def mark(self) -> Any:
        """The moment when what was queued so far has ended."""
        ...

    def seconds(self, begin: Any, end: Any) -> float | None:
        """Between two marks; None if they have not both passed. Never waits."""
        ...

    def wait(self, mark: Any) -> None:
        """Until it has passed: for measurements."""
        ...


class ClockStopwatch:
    """Where work is done when it was called."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds."""
        self._clock = clock

    def mark(self) -> float:
        """Now. Any thread."""
        return self._clock()

    def seconds(self, begin: float, end: float) -> float | None:
        """See `Stopwatch`."""
        return end - begin

    def wait(self, mark: float) -> None:
        """See `Stopwatch`: it has."""


class EventStopwatch:
    """Marks are events on the current stream. Device thread."""

    def mark(self) -> Any:
        """See `Stopwatch`."""
        import torch

        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float | None:
        """See `Stopwatch`."""
        if not (begin.query() and end.query()):
            return None
        return float(begin.elapsed_time(end)) / 1000

    def wait(self, mark: Any) -> None:
        """See `Stopwatch`."""
        mark.synchronize()


@dataclasses.dataclass(frozen=True, slots=True)
class TransferStats:
    """What became of one transfer, as far as it has come."""

    ways: frozenset[CopyWay]
    num_copies: int
    num_bytes: int
    seconds: float | None
    """From its first copy to its last one, on its lane; None while that goes on."""

    @property
    def gb_per_s(self) -> float | None:
        """10^9 bytes per second; None while it goes on."""
        return self.num_bytes / self.seconds / 1e9 if self.seconds else None


class TransferMeter:
    """Adds up what a transfer's works copy. One work at a time."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._ways: list[CopyWay] = []  # seldom more than one
        self._num_copies = 0
        self._num_bytes = 0
        self._begin: Any = None
        self._end: Any = None
        self._seconds: float | None = None

    def begin(self) -> None:
        """The first work begins; what comes later changes nothing."""
        if self._begin is None:
            self._begin = self._watch.mark()

    def end(self) -> None:
        """A work was queued, the last one so far."""
        self._end = self._watch.mark()
        self._seconds = None

    def add(self, copied: Copied) -> None:
        """A work copied this."""
        if copied.way not in self._ways:
            self._ways.append(copied.way)
        self._num_copies += copied.num_copies
        self._num_bytes += copied.num_bytes

    @property
    def num_bytes(self) -> int:
        """So far. Any thread."""
        return self._num_bytes

    def seen(self) -> TransferStats:
        """So far. Any thread, beside works: changes nothing, and never waits."""
        begin, end = self._begin, self._end
        seconds = None if begin is None or end is None else self._watch.seconds(begin, end)
        return TransferStats(frozenset(), self._num_copies, self._num_bytes, seconds)

    def stats(self) -> TransferStats:
        """So far."""
        if self._seconds is None and self._begin is not None and self._end is not None:
            self._seconds = self._watch.seconds(self._begin, self._end)
        return TransferStats(
            frozenset(self._ways), self._num_copies, self._num_bytes, self._seconds
        )
