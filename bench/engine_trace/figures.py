"""The figures of a trace: of each step, and where the time went over all of them. Pure."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from interlace.bench.engine_trace.shape import (
    busy_of,
    compute_spans,
    loads_of,
    saves_of,
    timed_steps,
)
from interlace.bench.step_trace.intervals import Interval, common, merged, total_ns
from interlace.bench.step_trace.trace import Span
from interlace.engine.engine_trace import EngineTrace, TracedStep
from interlace.engine.step_timings import StepTiming, TransferTiming


class Wait(NamedTuple):
    """At a gate."""

    layer: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Copied:
    """Pieces of transfers. Times in seconds."""

    num_bytes: int
    busy_s: float
    """In which lanes copied."""
    beside_s: float
    """Of that, while computing went on."""

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes a second; 0 if it took no time."""
        return self.num_bytes / self.busy_s / 1e9 if self.busy_s else 0.0

    @property
    def hidden_share(self) -> float:
        """Beside computing, of the time in which lanes copied; 0 if they did not."""
        return self.beside_s / self.busy_s if self.busy_s else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class StepRow:
    """One step. Times in seconds."""

    step_id: int
    request_ids: tuple[str, ...]
    num_tokens: int
    mode: str
    """NONE, PIECEWISE, FULL, or "GATED": FULL, with gates."""
    pause_s: float
    """Before it: the device had no step since the one before, of those that are there."""
    step_s: float
    compute_s: float
    """Less waits."""
    wait_s: float
    longest_wait: Wait | None
    """None if no layer waited, or if layers were not timed."""
    load: Copied
    """What it loads within itself, and what was begun beside it, or in the pause before it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Totals:
    """All steps. Times in seconds."""

    num_steps: int
    total_s: float
    """From the begin of the first one to the end of the last one."""
    compute_s: float
    wait_s: float
    pause_s: float
    num_waiting_layers: int
    longest_wait: tuple[int, Wait] | None
    """(step, wait): of one layer in one step."""
    most_waited: Wait | None
    """The layer that waited longest in all of them."""
    load: Copied
    save: Copied
    plan_s: float | None
    """Median of what passes from planned to handed to the device thread; None if unknown."""
    apply_s: float | None
    """Median of what passes from a step's tokens to its end."""


def rows_of(trace: EngineTrace) -> list[StepRow]:
    """Of the steps that were timed, in order."""
    traced = {step.step_id: step for step in trace.steps}
    steps, computing = timed_steps(trace), _computing(timed_steps(trace))
    loads = _loads_by_step(loads_of(trace), steps)
    rows = []
    for before, step in zip([None, *steps], steps, strict=False):
        since_s = step.begin_s if before is None else before.end_s
        own = loads.get(step.step_id, [])
        rows.append(_row(traced[step.step_id], step, since_s, own, computing))
    return rows


def _loads_by_step(
    loads: Sequence[TransferTiming], steps: Sequence[StepTiming]
) -> dict[int, list[TransferTiming]]:
    """Number of a step -> what it loads, and what was begun beside it or in the pause before."""
    ends = [step.end_s for step in steps]
    found: dict[int, list[TransferTiming]] = defaultdict(list)
    for piece in loads:
        place = bisect.bisect_right(ends, piece.begin_s)
        if piece.step_id is not None:
            found[piece.step_id].append(piece)
        elif place < len(steps):
            found[steps[place].step_id].append(piece)
    return found


def _row(
    traced: TracedStep,
    step: StepTiming,
    since_s: float,
    loads: Sequence[TransferTiming],
    computing: Sequence[Interval],
) -> StepRow:
    spans = compute_spans(step)
    waits = _waits(spans)
    wait_s = sum(wait.seconds for wait in waits)
    return StepRow(
        step_id=step.step_id,
        request_ids=tuple(request_id for request_id, _ in step.num_scheduled_tokens),
        num_tokens=traced.num_tokens,
        mode="GATED" if step.is_gated else step.mode,
        pause_s=max(0.0, step.begin_s - since_s),
        step_s=step.end_s - step.begin_s,
        compute_s=step.end_s - step.begin_s - wait_s,
        wait_s=wait_s,
        longest_wait=max(waits, key=lambda wait: wait.seconds, default=None),
        load=_copied(loads, computing),
    )


def totals_of(trace: EngineTrace) -> Totals:
    """See `Totals`; zeros if no step was timed."""
    steps, rows = timed_steps(trace), rows_of(trace)
    computing = _computing(steps)
    by_layer: dict[int, float] = defaultdict(float)
    for step in steps:
        for wait in _waits(compute_spans(step)):
            by_layer[wait.layer] += wait.seconds
    worst = max(by_layer, key=lambda layer: by_layer[layer], default=None)
    longest = [(row.step_id, row.longest_wait) for row in rows if row.longest_wait is not None]
    return Totals(
        num_steps=len(steps),
        total_s=steps[-1].end_s - steps[0].begin_s if steps else 0.0,
        compute_s=sum(row.compute_s for row in rows),
        wait_s=sum(row.wait_s for row in rows),
        pause_s=sum(row.pause_s for row in rows),
        num_waiting_layers=len(by_layer),
        longest_wait=max(longest, key=lambda one: one[1].seconds, default=None),
        most_waited=None if worst is None else Wait(worst, by_layer[worst]),
        load=_copied(loads_of(trace), computing),
        save=_copied(saves_of(trace), computing),
        plan_s=_median([(s.host.scheduled_s, s.host.launched_s) for s in trace.steps]),
        apply_s=_median([(s.host.tokens_s, s.host.done_s) for s in trace.steps]),
    )


def _median(pairs: Sequence[tuple[float | None, float | None]]) -> float | None:
    known = [end - begin for begin, end in pairs if begin is not None and end is not None]
    return statistics.median(known) if known else None


def _waits(spans: Sequence[Span]) -> list[Wait]:
    return [
        Wait(span.layer, span.wait.length_ns / 1e9)
        for span in spans
        if span.wait is not None and span.layer is not None
    ]


def _computing(steps: Sequence[StepTiming]) -> tuple[Interval, ...]:
    spans = itertools.chain.from_iterable(compute_spans(step) for step in steps)
    return merged(interval for span in spans for interval in span.busy)


def _copied(pieces: Sequence[TransferTiming], computing: Sequence[Interval]) -> Copied:
    busy = busy_of(pieces)
    num_bytes = sum(piece.num_bytes for piece in pieces)
    if not busy:
        return Copied(num_bytes, 0.0, 0.0)
    # Of all computing only what lies beside these.
    first = max(0, bisect.bisect_left(computing, Interval(busy[0].begin_ns, 0)) - 1)
    last = bisect.bisect_left(computing, Interval(busy[-1].end_ns, 0))
    beside = common(busy, computing[first:last])
    return Copied(num_bytes, total_ns(busy) / 1e9, total_ns(beside) / 1e9)
