"""A timeline of one of a grid's arms: its median run, recorded by the step tracer."""

from __future__ import annotations

import math
from typing import NamedTuple

from interlace.bench.grid.plan import engine_key
from interlace.bench.grid.points import Point
from interlace.bench.grid.record import ArmRun, GridRun
from interlace.bench.grid.session import PreparedGrid
from interlace.bench.grid.spec import GridSpec
from interlace.bench.spread import Spread
from interlace.bench.step_trace.session import record_timeline
from interlace.bench.step_trace.setup import LoadMode, TimelinePlan
from interlace.bench.step_trace.trace import AnyTrace
from interlace.engine.ports import Clock, Progress

RECORDED = 5
"""Runs, of which the median one is drawn."""


class PlannedTimeline(NamedTuple):
    """What is recorded."""

    point: Point
    plan: TimelinePlan


def timeline_plan(spec: GridSpec, run: GridRun) -> PlannedTimeline | str:
    """Of the arm with the longest prefix that can be recorded, the fastest of several; or why there
    is none."""
    found = [
        (point, arm)
        for point, arm in zip(spec.points, run.arms, strict=True)
        if _can_be_recorded(spec, point)
    ]
    if not found:
        return (
            "it is of one request from host memory, layerwise or hybrid, without delay_ms, and no"
            " arm is so"
        )
    point, _ = min(found, key=lambda one: (-one[0].prefix, _median(one[1])))
    group_size = engine_key(spec, point).group_size if point.load_mode == "layerwise" else None
    mode: LoadMode = "layerwise" if point.load_mode == "layerwise" else "hybrid"
    return PlannedTimeline(point, TimelinePlan(point.prefix, point.new, RECORDED, group_size, mode))


def _can_be_recorded(spec: GridSpec, point: Point) -> bool:
    key = engine_key(spec, point)
    is_short = point.load_mode == "hybrid" and point.prefix < 32
    return (
        point.load_mode in ("layerwise", "hybrid")
        and not is_short
        and point.batch == 1
        and not point.delay_ms
        and key.store == "memory"
        and key.graph_mode is None
        and key.max_num_batched_tokens is None
        and key.max_inflight_steps is None
    )


def _median(arm: ArmRun) -> float:
    taken = arm.measured("first_token_s")
    return Spread.of(taken).median if taken else math.inf


async def record_median(
    prepared: PreparedGrid, planned: PlannedTimeline, clock: Clock, progress: Progress
) -> AnyTrace:
    """Record runs of the arm in an engine of its own: the one that took the median time.

    Raises: what `record_timeline` raises. Cancelling stops after the run in progress.
    """
    model = prepared.of(planned.point)
    return (await record_timeline(model, planned.plan, clock, progress)).trace
