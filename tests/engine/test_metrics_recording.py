"""Histograms from events, by a clock that the test turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from metrics_kit import Values, read
from prometheus_client import CollectorRegistry
from scheduling import ManualClock

from interlace.engine.events import (
    BlockCleared,
    EventBus,
    RequestFinished,
    RequestFirstToken,
    RequestPreempted,
    RequestQueued,
    RequestScheduled,
    StepDone,
    StepLaunched,
    StepScheduled,
)
from interlace.engine.metrics_recording import LAG_PERIOD_S, MetricsRecording


@dataclasses.dataclass
class Timers:
    """asyncio's `call_later`, by hand."""

    pending: list[Callable[[], None]] = dataclasses.field(default_factory=list)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timers:
        assert delay_s == LAG_PERIOD_S
        self.pending.append(callback)
        return self

    def cancel(self) -> None:
        self.pending.clear()


class Bench:
    def __init__(self) -> None:
        self.clock, self.timers, self.bus = ManualClock(), Timers(), EventBus()
        self.recording = MetricsRecording(
            CollectorRegistry(), self.bus.subscribe(), self.clock, self.timers.call_later
        )

    def step(
        self,
        number: int,
        begun_s: float,
        done_s: float,
        *req_ids: str,
        num_tokens: int = 1,
        samples: bool = True,
    ) -> None:
        take = self.recording.take
        take(StepScheduled(begun_s - 0.5, number, tuple((one, num_tokens) for one in req_ids)))
        take(StepLaunched(begun_s, number))
        sampled = req_ids if samples else ()
        take(StepDone(done_s + 100, number, len(sampled), sampled, done_s))

    def histogram(self, name: str) -> tuple[float, float]:
        """(count, sum)."""
        values = self.values
        assert values[f"interlace_{name}_bucket{{le=+Inf}}"] == values[f"interlace_{name}_count"]
        return values[f"interlace_{name}_count"], values[f"interlace_{name}_sum"]

    @property
    def values(self) -> Values:
        return read(self.recording.registry)


def test_a_step_lasts_from_its_launch_or_from_the_end_of_the_one_before() -> None:
    bench = Bench()
    bench.step(1, 10.0, 12.0, "a", num_tokens=5)
    bench.step(2, 11.0, 15.0, "a")  # behind the first one: from 12
    bench.step(3, 20.0, 21.0, "a")
    bench.step(4, 22.0, 29.0)  # asks a connector
    assert bench.histogram("step_seconds") == (3, 2 + 3 + 1)
    assert bench.histogram("step_tokens") == (3, 5 + 1 + 1)
    assert not bench.recording._step_begun_s


def test_gaps_between_tokens_of_each_request() -> None:
    bench = Bench()
    bench.step(1, 0.0, 1.0, "a", "b")
    bench.step(2, 1.0, 1.25, "a", "b")
    bench.step(3, 2.0, 3.0, "b", num_tokens=64, samples=False)  # recomputed, samples nothing
    bench.step(4, 3.0, 3.25, "a", "c")
    bench.step(5, 3.25, 3.5, "a", "b", "c")
    # 1.25 - 1 twice; a's 3.25 - 1.25; then a's and c's 0.25, and b's 3.5 - 1.25.
    assert bench.histogram("inter_token_latency_seconds") == (6, 0.25 * 2 + 2 + 0.25 * 2 + 2.25)
    values = bench.values
    assert values["interlace_inter_token_latency_seconds_bucket{le=0.15}"] == 0
    assert values["interlace_inter_token_latency_seconds_bucket{le=0.25}"] == 4
    assert values["interlace_inter_token_latency_seconds_bucket{le=2.5}"] == 6


def test_one_count_for_all_requests_in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    req_ids = [f"r{number}" for number in range(256)]
    bench.step(1, 0.0, 1.0, *req_ids)
    calls: list[int] = []
    add = bench.recording._inter_token.add

    def note(value: float, number: int = 1) -> None:
        calls.append(number)
        add(value, number)

    monkeypatch.setattr(bench.recording._inter_token, "add", note)
    bench.step(2, 1.0, 2.0, *req_ids)
    assert calls == [256]


def test_the_life_of_a_request() -> None:
    bench = Bench()
    take = bench.recording.take
    take(RequestQueued(1.0, "a", 10, 0))
    take(RequestScheduled(1.5, "a", 1, 0, 0))
    take(RequestFirstToken(2.0, "a"))
    take(RequestPreempted(2.5, "a", 1))
    take(RequestScheduled(3.0, "a", 2, 0, 0))  # not again
    take(BlockCleared(3.0))
    take(RequestFinished(5.0, "a", "length", 3))
    take(RequestQueued(6.0, "b", 10, 0))
    take(RequestFinished(6.25, "b", "abort", 0))
    assert bench.histogram("request_queue_time_seconds") == (1, 0.5)
    assert bench.histogram("time_to_first_token_seconds") == (1, 1.0)
    assert bench.histogram("e2e_request_latency_seconds") == (2, 4.25)
    finished = "interlace_requests_finished_total{{finish_reason={}}}"
    values = bench.values
    assert [values[finished.format(r)] for r in ("stop", "length", "abort", "error")] == [
        *(0, 1, 1, 0)
    ]


def test_what_began_before_is_left_out() -> None:
    bench = Bench()
    take = bench.recording.take
    take(StepLaunched(0.5, 7))
    take(RequestScheduled(1.0, "a", 1, 0, 0))
    take(RequestFirstToken(2.0, "a"))
    take(StepDone(2.0, 7, 1, ("a",), 2.0))
    take(RequestFinished(3.0, "a", "stop", 1))
    for name in ("request_queue_time", "time_to_first_token", "e2e_request_latency", "step"):
        assert bench.histogram(f"{name}_seconds") == (0, 0)
    assert bench.values["interlace_requests_finished_total{finish_reason=stop}"] == 1


def test_nothing_is_remembered_of_requests_that_ended() -> None:
    bench = Bench()
    take = bench.recording.take
    for number in range(20):
        name = f"r{number}"
        take(RequestQueued(1.0, name, 10, 0))
        if number % 2:
            bench.step(number, 1.0, 2.0, name)
        take(RequestFinished(3.0, name, "stop", 1))  # before its last step is told of
        bench.step(100 + number, 3.0, 4.0, *([name] if number % 2 else []))
    recording = bench.recording
    left = (recording._queued_s, recording._unscheduled_s, recording._newest_token_s)
    assert not any((*left, recording._ended))
    assert bench.histogram("inter_token_latency_seconds") == (10, 20.0)


def test_the_loops_lateness() -> None:
    bench = Bench()
    for late_s in (0.0, 0.004, 0.3):
        bench.clock.now_s += LAG_PERIOD_S + late_s
        (look,) = bench.timers.pending
        bench.timers.pending.clear()
        look()
    count, total = bench.histogram("event_loop_lag_seconds")
    assert count == 3
    assert total == pytest.approx(0.304)
    bench.recording.close()
    assert not bench.timers.pending
    assert bench.histogram("event_loop_lag_seconds")[0] == 3, "it can still be read"


async def test_it_reads_the_bus_until_it_is_closed() -> None:
    bench = Bench()
    bench.bus.emit(RequestQueued(1.0, "a", 10, 0))
    bench.recording.close()
    bench.recording.close()
    assert not bench.bus.active, "nothing is recorded while nobody reads"
    bench.bus.emit(RequestQueued(1.0, "b", 10, 0))
    await bench.recording.run()
    assert list(bench.recording._queued_s) == ["a"]


async def test_its_own_failure_ends_the_recording_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench()
    bench.bus.emit(RequestQueued(1.0, "a", 10, 0))
    monkeypatch.setattr(bench.recording, "take", lambda _: 1 / 0)
    await bench.recording.run()
    assert bench.recording.is_closed
    assert "metrics are not recorded any more" in caplog.text


def test_lost_events_are_told() -> None:
    bench = Bench()
    stream = bench.bus.subscribe(1)
    recording = MetricsRecording(CollectorRegistry(), stream, bench.clock, bench.timers.call_later)
    for number in range(4):
        bench.bus.emit(StepLaunched(1.0, number))
    assert read(recording.registry)["interlace_metrics_lost_events_total"] == 3
