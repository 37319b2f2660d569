"""Tracing an engine: what is kept of its events, and that the file comes whatever happens. The
runner is one that may be told to time its steps, or cannot."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from pathlib import Path

import pytest
from engine_kit import PATIENCE_S, GatedRunner, build_engine, greedy, open_engine, until
from trace_kit import a_step, ms, problems_of, read

from interlace.bench.engine_trace.parse import from_json
from interlace.engine.engine_trace import EngineTrace, EngineTraceFacts
from interlace.engine.errors import ConfigError, ConnectorError, EngineDeadError
from interlace.engine.events import (
    LayerCompute,
    RequestFinished,
    RequestFirstToken,
    RequestQueued,
    RequestScheduled,
    StepDone,
    StepLaunched,
    StepScheduled,
    StepTimed,
    TimingsDropped,
)
from interlace.engine.outputs import ModelRunnerOutput
from interlace.engine.ports import Clock
from interlace.engine.scheduler_output import SchedulerOutput
from interlace.engine.step_timings import RecordingFacts, StepTiming, Timings
from interlace.engine.trace_collector import REQUESTS_PER_STEP, TraceCollector
from interlace.engine.trace_file import to_json

PROMPT = [3, 1, 4, 1, 5]
FACTS = EngineTraceFacts("m", "float32", "cpu", "", "host", 3, None, "", "")


def names_in(folder: Path) -> list[str]:
    return [one.name for one in folder.iterdir()]


class Timed(GatedRunner):
    """Says how long each step took, as soon as it has ended; the last one when it is asked."""

    def __init__(self) -> None:
        super().__init__(is_open=True)
        self.calls: list[str] = []
        self.refuses = False
        self.may_begin = threading.Event()
        self.may_begin.set()
        self._clock: Clock | None = None
        self._timing: StepTiming | None = None

    def begin_recording(self, clock: Clock) -> RecordingFacts:
        self.calls.append("begin")
        assert self.may_begin.wait(PATIENCE_S)
        if self.refuses:
            raise ConnectorError("it will not tell")
        self._clock = clock
        return RecordingFacts("host", "a machine", 3)

    def end_recording(self) -> Timings:
        self.calls.append("end")
        self._clock = None
        left, self._timing = self._timing, None
        return Timings(() if left is None else (left,))

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        clock, before = self._clock, self._timing
        output = super().execute(scheduler_output)
        if clock is None or not scheduler_output.num_scheduled_tokens:
            return output
        now_s = clock.monotonic()
        made = a_step(scheduler_output.step_id, 0, (0, 0, 0), 1).timing
        assert made is not None
        tokens = tuple(scheduler_output.num_scheduled_tokens.items())
        self._timing = dataclasses.replace(
            made, num_scheduled_tokens=tokens, layers=(), begin_s=now_s, end_s=now_s
        )
        return dataclasses.replace(output, timings=Timings(() if before is None else (before,)))


# -------------------------------------------------------------------- whole engines


async def test_an_engine_whose_runner_cannot_time_steps_has_its_host_times(tmp_path: Path) -> None:
    async with (
        open_engine(is_open=True) as opened,
        opened.engine.trace(tmp_path / "t") as tracing,
    ):
        assert tracing.path == tmp_path / "t"
        await opened.engine.complete(PROMPT, greedy(4), request_id="one")
    trace = await read(tmp_path / "t")
    assert problems_of(trace) == []
    assert (trace.facts.model, trace.facts.num_layers, trace.facts.machine) == ("toy", 0, "")
    assert len(trace.steps) == 4
    assert all(step.timing is None for step in trace.steps)
    assert all(step.host.scheduled_s is not None for step in trace.steps)
    (request,) = trace.requests
    assert (request.request_id, request.num_generated_tokens) == ("one", 4)
    assert request.finish_reason == "length"


async def test_what_the_runner_tells_at_the_end_is_in_the_trace(tmp_path: Path) -> None:
    runner = Timed()
    async with build_engine(runner) as engine:
        async with engine.trace(tmp_path / "t"):
            await engine.complete(PROMPT, greedy(4))
        await engine.complete(PROMPT, greedy(2))
    assert runner.calls == ["begin", "end"]
    trace = await read(tmp_path / "t")
    assert len(trace.steps) == 4
    assert all(step.timing is not None for step in trace.steps)
    assert trace.facts.machine == "a machine"


async def test_recording_is_on_as_long_as_anybody_looks() -> None:
    runner = Timed()
    async with build_engine(runner) as engine:
        for _ in range(2):
            async with engine.record_steps(), engine.record_steps():
                await engine.complete(PROMPT, greedy(2))
    assert runner.calls == ["begin", "end"] * 2


async def test_readers_of_events_alone_switch_nothing_on() -> None:
    runner = Timed()
    async with build_engine(runner) as engine:
        events = engine.events()
        engine.record_metrics()
        await engine.complete(PROMPT, greedy(2))
        seen = events.take_pending()
    assert runner.calls == []
    assert not [one for one in seen if isinstance(one, StepTimed | LayerCompute)]


async def test_a_recording_that_cannot_begin_is_no_harm(tmp_path: Path) -> None:
    runner = Timed()
    runner.refuses = True
    async with build_engine(runner) as engine:
        with pytest.raises(ConnectorError, match="it will not tell"):
            async with engine.trace(tmp_path / "t"):
                raise AssertionError("it was entered")
        runner.refuses = False
        assert names_in(tmp_path) == []
        async with engine.trace(tmp_path / "t"):
            await engine.complete(PROMPT, greedy(2))
    assert (await read(tmp_path / "t")).steps


async def test_an_engine_that_dies_leaves_what_was_recorded(tmp_path: Path) -> None:
    async def record() -> None:
        async with opened.engine.trace(tmp_path / "t"):
            await opened.engine.complete(PROMPT, greedy(3))
            opened.runner.error = MemoryError("the device is gone")
            await opened.engine.complete([1, 2], greedy(3))

    async with open_engine(is_open=True) as opened:
        with pytest.raises(EngineDeadError, match="the device is gone"):
            await record()
        with pytest.raises(EngineDeadError):
            async with opened.engine.trace(tmp_path / "other"):
                pass
    assert len((await read(tmp_path / "t")).steps) >= 3
    assert not (tmp_path / "other").exists()


async def test_a_trace_that_outlives_its_engine_is_written(tmp_path: Path) -> None:
    engine = build_engine(Timed())
    async with engine:
        tracing = engine.trace(tmp_path / "t")
        await tracing.__aenter__()
        await engine.complete(PROMPT, greedy(3))
    await tracing.__aexit__(None, None, None)
    assert len((await read(tmp_path / "t")).steps) == 3


async def test_cancelling_while_it_begins_ends_the_recording(tmp_path: Path) -> None:
    runner = Timed()
    runner.may_begin.clear()
    async with build_engine(runner) as engine, asyncio.TaskGroup() as group:

        async def record() -> None:
            async with engine.trace(tmp_path / "t"):
                raise AssertionError("it was entered")

        task = group.create_task(record())
        await until(lambda: bool(runner.calls))
        task.cancel()
        runner.may_begin.set()
        await asyncio.wait([task])
    assert runner.calls == ["begin", "end"]
    assert not (tmp_path / "t").exists()


async def test_an_event_that_cannot_be_taken_in_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise KeyError("bug")

    async with open_engine(is_open=True) as opened, opened.engine.trace(tmp_path / "t"):
        monkeypatch.setattr(TraceCollector, "_take_request", refuse)
        await opened.assert_works()
    assert (await read(tmp_path / "t")).left_out.events > 3
    assert len(caplog.records) == 1


@pytest.mark.parametrize("last_steps", [0, -3, 100_000])
async def test_numbers_of_steps_that_cannot_be(last_steps: int, tmp_path: Path) -> None:
    async with open_engine(is_open=True) as opened:
        with pytest.raises(ConfigError, match="last_steps must be from 1 to 2048"):
            async with opened.engine.trace(tmp_path / "t", last_steps=last_steps):
                pass


@pytest.mark.parametrize("name", ["", "none/t"])
async def test_files_that_cannot_be_written(name: str, tmp_path: Path) -> None:
    async with open_engine(is_open=True) as opened:
        with pytest.raises(ConfigError, match=r"cannot be written: .*existing folder"):
            async with opened.engine.trace(tmp_path / name):
                pass
        await opened.assert_works()


# -------------------------------------------------------------------- the collector


def collected(*events: object, last_steps: int = 3) -> EngineTrace:
    collector = TraceCollector(last_steps, ms(100))
    for event in events:
        collector.take(event)  # type: ignore[arg-type]
    return collector.trace(FACTS, 0)


def events_of(step_id: int, at_ms: float) -> list[object]:
    timing = a_step(step_id, at_ms + 0.5, (0, 1, 0), 1, a=2).timing
    assert timing is not None
    return [
        StepScheduled(ms(at_ms), step_id, (("a", 2),)),
        StepLaunched(ms(at_ms + 0.1), step_id),
        *(LayerCompute(ms(at_ms + 9), step_id, layer) for layer in timing.layers),
        StepTimed(ms(at_ms + 9), timing),
        StepDone(ms(at_ms + 9.5), step_id, 1, ("a",), ms(at_ms + 9.4)),
    ]


def test_times_are_counted_from_the_begin() -> None:
    (step,) = collected(*events_of(1, 110)).steps
    assert step.host.scheduled_s == ms(10)
    assert step.host.done_s == ms(19.5)
    assert step.timing is not None
    assert step.timing.begin_s == ms(10.5)
    assert step.timing.layers[1].waited_s == pytest.approx(1e-3)


def test_a_step_that_began_before_is_there_without_its_planning() -> None:
    _, _, *later = events_of(1, 95)
    (step,) = collected(*later).steps
    assert step.host.scheduled_s is None
    assert step.num_scheduled_tokens == (("a", 2),)
    assert step.timing is not None
    assert step.timing.begin_s == 0.0, "it does not begin before the trace"


def test_the_newest_steps_are_kept_with_what_belongs_to_them() -> None:
    requests = [
        RequestQueued(ms(101), "old", 3, 0),
        RequestFinished(ms(125), "old", "length", 2),
        RequestQueued(ms(130), "new", 4, 0),
        RequestScheduled(ms(131), "new", 3, 1, 2),
        RequestScheduled(ms(139), "new", 3, 7, 7),
        RequestFirstToken(ms(141), "new"),
    ]
    steps = [event for i in range(5) for event in events_of(i, 110 + 10 * i)]
    trace = collected(*requests, *steps, TimingsDropped(ms(160), 4), StepLaunched(ms(161), 0))
    assert [step.step_id for step in trace.steps] == [2, 3, 4]
    (request,) = trace.requests
    assert (request.request_id, request.num_local_cached_tokens) == ("new", 1), "the first time"
    assert (request.queued_s, request.first_token_s) == (0.0, ms(11)), "from what is kept on"
    left_out = trace.left_out
    assert (left_out.steps, left_out.requests, left_out.timings) == (2, 1, 4)


def test_a_step_that_was_left_out_does_not_come_back() -> None:
    steps = [event for i in range(5) for event in events_of(i, 110 + 10 * i)]
    timing = a_step(0, 112, (0, 0, 0), 1, a=2).timing
    assert timing is not None
    trace = collected(*steps, StepTimed(ms(170), timing))
    assert [step.step_id for step in trace.steps] == [2, 3, 4]


def test_only_so_many_requests_are_remembered() -> None:
    count = REQUESTS_PER_STEP * 3 + 5
    trace = collected(*(RequestQueued(ms(100 + i), f"{i}", 1, 0) for i in range(count)))
    assert len(trace.requests) == count - 5
    assert trace.left_out.requests == 5


@pytest.mark.xfail(strict=True, reason="the device is waited for only when the last one leaves")
async def test_a_step_under_way_at_the_end_is_waited_for_though_others_look(tmp_path: Path) -> None:
    runner = Timed()
    runner._open = False
    async with build_engine(runner) as engine, engine.record_steps(), asyncio.TaskGroup() as group:
        async with engine.trace(tmp_path / "t"):
            group.create_task(engine.complete(PROMPT, greedy(2)))
            await runner.next_step()
            asyncio.get_running_loop().call_later(0.05, runner.open)
        trace = await read(tmp_path / "t")
        assert [step.timing is not None for step in trace.steps] == [True]


def test_times_of_a_long_trace_begin_with_what_is_kept_of_it() -> None:
    """Counted from the recording's begin they would be too large to be exact, and to be read."""
    far_s = 40 * 86_400.0
    collector = TraceCollector(2, 0.0)
    for step_id in range(5):
        at = far_s + step_id
        collector.take(StepScheduled(at, step_id, (("a", 1),)))
        collector.take(StepDone(at + 0.5, step_id, 1, ("a",), at + 0.25))
    trace = collector.trace(FACTS, 0)
    assert [step.host.scheduled_s for step in trace.steps] == [0.0, 1.0]
    assert from_json("".join(to_json(trace))) == trace
