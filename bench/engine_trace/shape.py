"""From a trace of an engine to lanes of spans, and to the timeline of a step that loads. Pure.

A group of layers that was copied at once is cut into its layers in equal parts. Waits shorter than
`PASSING_NS` are none: so long passing an open gate takes.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, cast

from interlace.bench.step_trace.facts import TraceFacts
from interlace.bench.step_trace.intervals import Interval, merged
from interlace.bench.step_trace.trace import LaneName, Span, StepTrace
from interlace.engine.engine_trace import EngineTrace
from interlace.engine.errors import ConfigError
from interlace.engine.step_timings import LayerTiming, StepTiming, TransferTiming

PASSING_NS = 10_000
WINDOW_LENGTHS = 2.5
"""Times its own length is shown with a step that was not asked for by number."""
MOST_SHOWN_STEPS = 8


def to_ns(time_s: float) -> int:
    """Whole nanoseconds."""
    return round(time_s * 1e9)


def timed_steps(trace: EngineTrace) -> list[StepTiming]:
    """Those that were timed, in order."""
    return [step.timing for step in trace.steps if step.timing is not None]


def compute_spans(step: StepTiming) -> list[Span]:
    """A step on the compute lane: "embed", its layers, "head"; of one that was timed as a whole one
    span, "head"."""
    begin, end = to_ns(step.begin_s), to_ns(step.end_s)
    if not step.layers:
        return [Span("compute", "head", None, begin, end)]
    return [
        Span("compute", "embed", None, begin, to_ns(step.layers[0].arrived_s)),
        *(_layer_span(layer) for layer in step.layers),
        Span("compute", "head", None, to_ns(step.layers[-1].end_s), end),
    ]


def _layer_span(layer: LayerTiming) -> Span:
    arrived, passed = to_ns(layer.arrived_s), to_ns(layer.passed_s)
    wait = Interval(arrived, passed) if passed - arrived >= PASSING_NS else None
    return Span("compute", "layer", layer.layer, arrived, to_ns(layer.end_s), wait=wait)


def transfer_spans(pieces: Sequence[TransferTiming], lane: LaneName) -> list[Span]:
    """Pieces on one lane, as layers if they are of few, else as slices; in order."""
    spans = [span for piece in pieces for span in _piece_spans(piece, lane)]
    return sorted(spans, key=lambda span: (span.begin_ns, span.end_ns))


def _piece_spans(piece: TransferTiming, lane: LaneName) -> Iterator[Span]:
    begin, end = to_ns(piece.begin_s), to_ns(piece.end_s)
    if piece.step_id is None:
        yield Span(lane, "slice", None, begin, end, piece.num_bytes)
        return
    count = piece.end_layer - piece.first_layer
    bounds = [begin + (end - begin) * i // count for i in range(count + 1)]
    shares = [piece.num_bytes * i // count for i in range(count + 1)]
    for i in range(count):
        layer = piece.first_layer + i
        num_bytes = shares[i + 1] - shares[i]
        yield Span(lane, "layer", layer, bounds[i], bounds[i + 1], num_bytes)


def busy_of(pieces: Sequence[TransferTiming]) -> tuple[Interval, ...]:
    """When lanes copied."""
    return merged(Interval(to_ns(one.begin_s), to_ns(one.end_s)) for one in pieces)


def loads_of(trace: EngineTrace) -> list[TransferTiming]:
    """All pieces that were loaded."""
    return [piece for piece in trace.transfers if piece.way == "load"]


def saves_of(trace: EngineTrace) -> list[TransferTiming]:
    """All pieces that were saved."""
    return [piece for piece in trace.transfers if piece.way == "save"]


# ---------------------------------------------------------------- one step that loads


def step_trace_of(trace: EngineTrace, step: StepTiming) -> StepTrace | None:
    """The timeline of a step that loads all layers within itself; None of any other."""
    pieces = [piece for piece in loads_of(trace) if piece.step_id == step.step_id]
    load = transfer_spans(pieces, "load")
    if [span.layer for span in load] != list(range(trace.facts.num_layers)) or not step.layers:
        return None
    zero = min(load[0].begin_ns, to_ns(step.begin_s))
    facts = trace.facts
    request_ids = sorted({name for piece in pieces for name in piece.request_ids})
    return StepTrace(
        tuple(_moved(span, zero) for span in load),
        tuple(_moved(span, zero) for span in compute_spans(step)),
        TraceFacts(
            model=facts.model,
            dtype=facts.dtype,
            machine=facts.machine or facts.device,
            clock=cast(Literal["device", "host"], facts.clock),
            loaded_tokens=_loaded_tokens(trace, request_ids),
            new_tokens=sum(number for _, number in step.num_scheduled_tokens),
            group_size=_group_size(pieces),
            request_id=", ".join(request_ids),
            step_id=step.step_id,
        ),
    )


def _group_size(pieces: Sequence[TransferTiming]) -> int:
    """That most layers are in."""
    sizes = Counter(piece.end_layer - piece.first_layer for piece in pieces)
    return max(sizes, key=lambda size: (size * sizes[size], size))


def _loaded_tokens(trace: EngineTrace, request_ids: Sequence[str]) -> int:
    requests = (one for one in trace.requests if one.request_id in request_ids)
    return sum(one.num_external_cached_tokens or 0 for one in requests)


def _moved(span: Span, zero: int) -> Span:
    wait = span.wait
    return dataclasses.replace(
        span,
        begin_ns=span.begin_ns - zero,
        end_ns=span.end_ns - zero,
        wait=None if wait is None else Interval(wait.begin_ns - zero, wait.end_ns - zero),
    )


# ---------------------------------------------------------------- some steps


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """Some steps, and what lanes copied meanwhile. Times from its begin."""

    steps: tuple[StepTiming, ...]
    """With times of the trace."""
    lanes: Mapping[str, Sequence[Span]]
    """load, compute, store, as far as they have anything."""
    begins: tuple[int, ...]
    """Of each step, in nanoseconds."""
    end_ns: int


def window_of(trace: EngineTrace, step_id: int | None = None) -> Window:
    """The step with that number, or as much as is readable around the last one that loads.

    Raises: `ConfigError` if there is none.
    """
    steps = timed_steps(trace)
    if step_id is None:
        shown = _around(steps, _place_to_show(trace, steps))
    else:
        shown = [step for step in steps if step.step_id == step_id]
    if not shown:
        known = f"{steps[0].step_id} to {steps[-1].step_id}" if steps else "none"
        wanted = "no step" if step_id is None else f"no step {step_id}"
        raise ConfigError(f"the trace has {wanted} with times of the device; it has {known}.")
    loads, saves = loads_of(trace), saves_of(trace)
    within = [one for one in loads if one.step_id in {step.step_id for step in shown}]
    begin_s = min([*(step.begin_s for step in shown), *(one.begin_s for one in within)])
    begin, end = to_ns(begin_s), to_ns(shown[-1].end_s)
    lanes = {
        "load": _cut(transfer_spans(_within(loads, begin, end), "load"), begin, end),
        "compute": _cut([span for step in shown for span in compute_spans(step)], begin, end),
        "store": _cut(transfer_spans(_within(saves, begin, end), "store"), begin, end),
    }
    return Window(
        tuple(shown),
        {name: spans for name, spans in lanes.items() if spans or name != "store"},
        tuple(to_ns(step.begin_s) - begin for step in shown),
        end - begin,
    )


def _place_to_show(trace: EngineTrace, steps: Sequence[StepTiming]) -> int:
    """Of the last step that loads within itself, or beside which something is loaded, or of all."""
    loads = loads_of(trace)
    ids = {one.step_id for one in loads}
    for place in reversed(range(len(steps))):
        if steps[place].step_id in ids:
            return place
    for place in reversed(range(len(steps))):
        step = steps[place]
        if any(one.begin_s < step.end_s and one.end_s > step.begin_s for one in loads):
            return place
    return len(steps) - 1


def _around(steps: Sequence[StepTiming], place: int) -> list[StepTiming]:
    """That one, and its neighbours before and behind, as long as all of it is readable."""
    if not steps:
        return []
    first = last = place
    most_s = WINDOW_LENGTHS * (steps[place].end_s - steps[place].begin_s)
    while last - first + 1 < MOST_SHOWN_STEPS:
        if first and steps[last].end_s - steps[first - 1].begin_s <= most_s:
            first -= 1
        elif last + 1 < len(steps) and steps[last + 1].end_s - steps[first].begin_s <= most_s:
            last += 1
        else:
            break
    return list(steps[first : last + 1])


def _within(pieces: Sequence[TransferTiming], begin_ns: int, end_ns: int) -> list[TransferTiming]:
    """Those of which something lies between these."""
    return [one for one in pieces if to_ns(one.begin_s) < end_ns and to_ns(one.end_s) > begin_ns]


def _cut(spans: Sequence[Span], begin: int, end: int) -> tuple[Span, ...]:
    """What is between these, with times from `begin` on; overlaps are left to who comes first."""
    found: list[Span] = []
    free = begin
    for span in spans:
        first, last = max(span.begin_ns, free), min(span.end_ns, end)
        if first < last:
            wait = span.wait
            if wait is not None:
                wait = Interval(max(wait.begin_ns, first), min(wait.end_ns, last))
                wait = wait if wait.length_ns > 0 else None
            cut = dataclasses.replace(span, begin_ns=first, end_ns=last, wait=wait)
            found.append(_moved(cut, begin))
            free = last
    return tuple(found)
