"""How long the event loop kept others waiting: a timer that notes how late it is called."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable
from typing import Protocol, Self

from interlace.engine.ports import Clock

PERIOD_S = 0.005
"""A block of the loop shows less than this too short. Every millisecond would cost each parallel
operation on a machine with few cores: the probe's thread takes a core from one of its helpers."""


class Timer(Protocol):
    """What `CallLater` returns: asyncio's `TimerHandle`."""

    def cancel(self) -> None:
        """Never call back."""
        ...


CallLater = Callable[[float, Callable[[], None]], Timer]


class LagProbe:
    """Measures the running event loop while the context lasts. Loop thread only.

    A callback is due every `PERIOD_S`. A callback and not a task: an error in the body of the
    context then comes out as it is, and there is nothing to await at the end.
    """

    def __init__(self, clock: Clock, call_later: CallLater | None = None) -> None:
        """`call_later` is the running loop's own unless a test brings another."""
        self.worst_s = 0.0
        """Worst lateness so far, in seconds."""
        self._clock = clock
        self._call_later = call_later
        self._timer: Timer | None = None
        self._due = 0.0

    def __enter__(self) -> Self:
        if self._call_later is None:
            self._call_later = asyncio.get_running_loop().call_later
        self._arm()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        # A callback that is overdue when the context ends is counted too.
        self._note()
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        assert self._call_later is not None
        self._due = self._clock.monotonic() + PERIOD_S
        self._timer = self._call_later(PERIOD_S, self._tick)

    def _tick(self) -> None:
        self._note()
        self._arm()

    def _note(self) -> None:
        self.worst_s = max(self.worst_s, self._clock.monotonic() - self._due)
