"""The lag probe, with time and timers that the test turns, and once on a real loop."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from interlace.bench.lag_probe import PERIOD_S, LagProbe
from interlace.engine.clock import MonotonicClock


class Clock:
    now = 50.0

    def monotonic(self) -> float:
        return self.now


class Handle:
    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Timers:
    """Keeps the callbacks that were asked for."""

    def __init__(self) -> None:
        self.pending: list[tuple[float, Callable[[], None]]] = []
        self.handles: list[Handle] = []

    def call_later(self, delay: float, callback: Callable[[], None]) -> Handle:
        self.pending.append((delay, callback))
        self.handles.append(Handle())
        return self.handles[-1]


def test_the_worst_lateness_counts() -> None:
    clock, timers = Clock(), Timers()
    with LagProbe(clock, timers.call_later) as probe:
        for late in (0.0, 0.004, 0.002):
            delay, callback = timers.pending.pop()
            assert delay == PERIOD_S
            clock.now += delay + late
            callback()
    assert probe.worst_s == pytest.approx(0.004)
    assert [handle.cancelled for handle in timers.handles] == [False, False, False, True]


def test_a_callback_that_is_overdue_at_the_end_counts() -> None:
    clock, timers = Clock(), Timers()
    with LagProbe(clock, timers.call_later) as probe:
        clock.now += 0.5
    assert probe.worst_s == pytest.approx(0.5 - PERIOD_S)


def test_an_early_end_is_no_lag_and_an_error_comes_out_as_it_is() -> None:
    clock, timers = Clock(), Timers()
    probe = LagProbe(clock, timers.call_later)
    with pytest.raises(KeyError), probe:
        raise KeyError("x")
    assert probe.worst_s == 0.0
    assert timers.handles[-1].cancelled


async def test_on_a_real_loop() -> None:
    with LagProbe(MonotonicClock()) as probe:
        end = time.monotonic() + 0.03
        while time.monotonic() < end:  # holds the loop without sleeping
            pass
    assert probe.worst_s >= 0.028 - PERIOD_S
