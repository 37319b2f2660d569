"""Runs a few hits of one stored prefix, makes a timeline of each, takes the median one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import NamedTuple, TypeVar

from interlace.bench.engine_arm import EngineArm
from interlace.bench.report import Report, Row
from interlace.bench.session import SEED, Prepared
from interlace.bench.shown import shown
from interlace.bench.spread import Spread
from interlace.bench.step_trace.figures import figures_of
from interlace.bench.step_trace.hybrid import HybridHits
from interlace.bench.step_trace.layerwise import LayerwiseHits
from interlace.bench.step_trace.setup import HitTracer, Run, TimelinePlan, engine_config
from interlace.bench.step_trace.trace import AnyTrace, HybridTrace, LaneTrace
from interlace.bench.workload import WorkSource
from interlace.engine.ports import Clock, Progress

L = TypeVar("L", bound=LaneTrace)


class Timeline(NamedTuple):
    """What comes out."""

    report: Report
    """Figures of all hits."""
    trace: AnyTrace
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
    tracer = _tracer(prepared, plan, clock)
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(
            AsyncEngine.from_loaded(
                engine_config(prepared, plan, tracer.connector),
                prepared.loaded,
                device=prepared.device,
                progress=progress,
                clock=clock,
            )
        )
        await stack.enter_async_context(
            shown(engine, "timeline", prepared.metrics, prepared.traces)
        )
        hits = _Hits(EngineArm(engine, clock), prepared.loaded.architecture.vocab_size, plan)
        traces = []
        with progress.task("timeline", plan.repeats + 1) as advance:
            await hits.store()
            for round_number in range(plan.repeats + 1):
                trace = await tracer.trace(engine, hits.next())
                if round_number > 0:  # round 0 warms up
                    traces.append(trace)
                advance(1)
    settings = prepared.settings.facts() | {"dtype": prepared.dtype}
    settings |= plan.shape() | tracer.shape()
    row = _row(f"{plan.new_tokens} new", traces)
    report = Report("timeline", settings, prepared.machine, (row,), ())
    return Timeline(report, median_trace(traces))


def _tracer(prepared: Prepared, plan: TimelinePlan, clock: Clock) -> HitTracer:
    if plan.is_hybrid:
        return HybridHits(prepared, plan, clock)
    return LayerwiseHits(prepared, plan, clock)


def median_trace(traces: Sequence[L]) -> L:
    """The one that took the median time; of an even number the faster of the two."""
    return sorted(traces, key=lambda trace: trace.end_ns)[(len(traces) - 1) // 2]


def _row(case: str, traces: Sequence[AnyTrace]) -> Row:
    """Waits are of loads layer by layer; tokens and steps of prompts from both ends."""
    figures = [figures_of(trace) for trace in traces]
    spreads = {
        "total ms": Spread.of(one.total_s * 1e3 for one in figures),
        "load ms": Spread.of(one.load_s * 1e3 for one in figures),
        "load GB/s": Spread.of(one.load_gb_per_s for one in figures),
        "compute ms": Spread.of(one.compute_s * 1e3 for one in figures),
        "both ms": Spread.of(one.both_s * 1e3 for one in figures),
        "hidden share": Spread.of(one.hidden_share for one in figures),
    }
    facts = [trace.facts for trace in traces if isinstance(trace, HybridTrace)]
    if not facts:
        return Row(case, spreads | {"waits ms": Spread.of(one.wait_s * 1e3 for one in figures)})
    return Row(
        case,
        spreads
        | {
            "front tokens": Spread.of(float(one.front_tokens) for one in facts),
            "back tokens": Spread.of(float(one.loaded_tokens) for one in facts),
            "steps": Spread.of(float(len(one.steps)) for one in facts),
        },
    )


class _Hits:
    """Hits of one prefix. Loop thread."""

    def __init__(self, arm: EngineArm, vocab_size: int, plan: TimelinePlan) -> None:
        self._arm = arm
        self._plan = plan
        self._source = WorkSource(vocab_size=vocab_size, seed=SEED)
        self._prefix = self._source.make(1, plan.prefix_tokens, 1)

    async def store(self) -> None:
        """Compute the prefix, which stores it."""
        await self._arm.run(self._prefix)

    def next(self) -> Run:
        """What hits it once, with other new tokens behind it than ever, the device having forgotten
        it. Raises: `InterlaceError` if the engine is not idle."""
        self._arm.forget()
        work = self._source.behind(self._prefix, self._plan.new_tokens)
        return lambda: self._arm.run(work)
