"""Runs a few hits that load layer by layer, records a timeline of each, takes the median one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, NamedTuple

from interlace.bench.engine_arm import EngineArm
from interlace.bench.report import Report, Row
from interlace.bench.session import SEED, Prepared
from interlace.bench.spread import Spread
from interlace.bench.step_trace.build import build_trace
from interlace.bench.step_trace.figures import StepFigures, figures_of
from interlace.bench.step_trace.setup import (
    StepRecorder,
    TimelinePlan,
    engine_config,
    make_recorder,
)
from interlace.bench.step_trace.tape import StepTape
from interlace.bench.step_trace.trace import StepTrace, TraceFacts
from interlace.bench.workload import WorkSource
from interlace.engine.errors import ConfigError, InterlaceError
from interlace.engine.events import EventStream, RequestFinished, RequestScheduled, StepScheduled
from interlace.engine.ports import Clock, Progress

if TYPE_CHECKING:
    from interlace.engine.async_engine import AsyncEngine


class Timeline(NamedTuple):
    """What comes out."""

    report: Report
    """Figures of all hits."""
    trace: StepTrace
    """The one that took the median time."""


async def record_timeline(
    prepared: Prepared, plan: TimelinePlan, clock: Clock, progress: Progress
) -> Timeline:
    """Open an engine, store a prefix, and record hits of it.

    Raises: what the engine raises; `ConfigError` for a plan that cannot be had; `InterlaceError` if
    what was recorded is not understood. Cancelling stops after the run in progress.
    """
    from interlace import AsyncEngine

    plan.check()
    layers = prepared.loaded.architecture.num_layers
    plan = dataclasses.replace(plan, group_size=min(plan.group_size, layers))
    tape = None if prepared.gpu is not None else StepTape(clock)
    recorder = make_recorder(prepared, plan, tape)
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(
            AsyncEngine.from_loaded(
                engine_config(prepared, plan, tape),
                prepared.loaded,
                device=prepared.device,
                progress=progress,
                clock=clock,
            )
        )
        hits = _Hits(engine, EngineArm(engine, clock), recorder, prepared, plan)
        traces = await hits.record(progress)
    settings = prepared.settings.facts() | {"dtype": prepared.dtype} | plan.shape()
    figures = [figures_of(trace) for trace in traces]
    row = _row(f"{plan.new_tokens} new", figures)
    report = Report("timeline", settings, prepared.machine, (row,), ())
    return Timeline(report, median_trace(traces))


def median_trace(traces: Sequence[StepTrace]) -> StepTrace:
    """The one that took the median time; of an even number the faster of the two."""
    return sorted(traces, key=lambda trace: trace.end_ns)[(len(traces) - 1) // 2]


def _row(case: str, figures: Sequence[StepFigures]) -> Row:
    return Row(
        case,
        {
            "total ms": Spread.of(one.total_s * 1e3 for one in figures),
            "load ms": Spread.of(one.load_s * 1e3 for one in figures),
            "load GB/s": Spread.of(one.load_gb_per_s for one in figures),
            "compute ms": Spread.of(one.compute_s * 1e3 for one in figures),
            "both ms": Spread.of(one.both_s * 1e3 for one in figures),
            "hidden share": Spread.of(one.hidden_share for one in figures),
            "waits ms": Spread.of(one.wait_s * 1e3 for one in figures),
        },
    )


class _Hits:
    """Hits of one stored prefix. Loop thread."""

    def __init__(
        self,
        engine: AsyncEngine,
        arm: EngineArm,
        recorder: StepRecorder,
        prepared: Prepared,
        plan: TimelinePlan,
    ) -> None:
        self._engine = engine
        self._arm = arm
        self._recorder = recorder
        self._prepared = prepared
        self._plan = plan
        vocab_size = prepared.loaded.architecture.vocab_size
        self._source = WorkSource(vocab_size=vocab_size, seed=SEED)
        self._prefix = self._source.make(1, plan.prefix_tokens, 1)

    async def record(self, progress: Progress) -> list[StepTrace]:
        """A timeline of each, in the order in which they were recorded."""
        traces = []
        with progress.task("timeline", self._plan.repeats + 1) as advance:
            await self._arm.run(self._prefix)  # computed, and stored
            for round_number in range(self._plan.repeats + 1):
                trace = await self._one()
                if round_number > 0:  # round 0 warms up
                    traces.append(trace)
                advance(1)
        return traces

    async def _one(self) -> StepTrace:
        plan = self._plan
        self._arm.forget()
        work = self._source.behind(self._prefix, plan.new_tokens)
        events = self._engine.events()
        try:
            sample, marks = await self._recorder.record(lambda: self._arm.run(work))
            request_id, step_id = await _loading_step(events, plan.new_tokens)
        finally:
            events.close()
        if sample.loaded_tokens != plan.prefix_tokens:
            raise InterlaceError(
                f"{sample.loaded_tokens} of {plan.prefix_tokens} tokens were loaded: give the KV"
                " pool and the host's records room for the whole prompt."
            )
        return build_trace(marks, self._facts(request_id, step_id))

    def _facts(self, request_id: str, step_id: int) -> TraceFacts:
        prepared, plan = self._prepared, self._plan
        return TraceFacts(
            model=prepared.settings.model,
            dtype=prepared.dtype,
            machine=prepared.gpu or str(prepared.machine["cpu"]),
            clock="host" if prepared.gpu is None else "device",
            loaded_tokens=plan.prefix_tokens,
            new_tokens=plan.new_tokens,
            group_size=plan.group_size,
            request_id=request_id,
            step_id=step_id,
        )


async def _loading_step(events: EventStream, new_tokens: int) -> tuple[str, int]:
    """(request, step) of the one request that has just ended. Raises: `ConfigError` if that step
    did not compute all of the new tokens."""
    scheduled: RequestScheduled | None = None
    counts: dict[int, int] = {}
    async for event in events:
        if isinstance(event, RequestScheduled):
            scheduled = event
        elif isinstance(event, StepScheduled):
            counts[event.step_id] = sum(count for _, count in event.num_scheduled_tokens)
        elif isinstance(event, RequestFinished):
            break
    if scheduled is None or counts.get(scheduled.step_id) != new_tokens:
        computed = counts.get(scheduled.step_id, 0) if scheduled is not None else 0
        raise ConfigError(
            f"the step that loads computed {computed} of {new_tokens} new tokens, and a timeline is"
            " of one step: take fewer new tokens, or a larger --max-num-batched-tokens."
        )
    return scheduled.request_id, scheduled.step_id
