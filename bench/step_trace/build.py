"""From what was seen of a step, on any clock, to its timeline. Pure."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from interlace.bench.step_trace.facts import TraceFacts
from interlace.bench.step_trace.intervals import Interval
from interlace.bench.step_trace.trace import Piece, Span, StepTrace, parts_of_step
from interlace.connectors.pipeline.layer_groups import LayerGroups
from interlace.engine.errors import InterlaceError


@dataclasses.dataclass(frozen=True, slots=True)
class LayerLoad:
    """What was seen of the load of one layer."""

    begin_ns: int
    end_ns: int
    num_bytes: int
    pieces: tuple[Piece, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class StepMarks:
    """What was seen of one step, on any clock."""

    loads: tuple[LayerLoad, ...]
    """Of each layer; none if the step loads nothing within itself."""
    begin_ns: int
    """When computing began."""
    gates: tuple[Interval, ...]
    """Of each layer: when computing reached its gate, and when it went on."""
    forward_end_ns: int
    """When the last layer ended."""
    end_ns: int
    pieces: tuple[Piece, ...] = ()
    """What the compute lane did, if it is known, in order."""


def build_trace(marks: StepMarks, facts: TraceFacts) -> StepTrace:
    """The timeline of what was seen. Raises: `InterlaceError` if the marks are not in order."""
    if not marks.loads or len(marks.loads) != len(marks.gates):
        raise InterlaceError(
            f"{len(marks.loads)} loads of layers and {len(marks.gates)} gates were seen: a timeline"
            " needs as many of both. Is the prefix loaded layer by layer?"
        )
    zero = min(marks.begin_ns, marks.loads[0].begin_ns)
    load = tuple(_load_spans(marks.loads, zero))
    compute = tuple(compute_spans(marks, zero, facts.group_size))
    check_order(load)
    check_order(compute)
    return StepTrace(load, compute, facts)


def check_order(lane: Sequence[Span]) -> None:
    """Raises: `InterlaceError` if spans of a lane overlap, or end before they begin."""
    for span, after in _neighbours(lane):
        if span.begin_ns > span.end_ns or span.end_ns > after.begin_ns:
            raise InterlaceError(
                f"the {span.lane} lane's blocks {span.label} and {after.label} overlap or run"
                " backwards, so they were told apart wrongly. Record again."
            )


def _neighbours(spans: Sequence[Span]) -> Iterator[tuple[Span, Span]]:
    """Each span with the next one, the last with itself from its end on."""
    last = spans[-1]
    behind = dataclasses.replace(last, begin_ns=last.end_ns, wait=None, pieces=())
    return zip(spans, (*spans[1:], behind), strict=True)


def _load_spans(loads: Sequence[LayerLoad], zero: int) -> Iterator[Span]:
    begin = 0
    for layer, load in enumerate(loads):
        begin, end, pieces = placed(load, begin, zero)
        yield Span("load", "layer", layer, begin, end, load.num_bytes, pieces=pieces)
        begin = end


def placed(load: LayerLoad, earliest: int, zero: int) -> tuple[int, int, tuple[Piece, ...]]:
    """(begin, end, pieces) from `zero` on: the end of a copy and the begin of the next one may be
    told a moment the wrong way round, so nothing begins before `earliest`."""
    begin, end = max(earliest, load.begin_ns - zero), load.end_ns - zero
    (pieces,) = _shared_out(tuple(_moved(load.pieces, zero)), [begin, end])
    return begin, end, pieces


def compute_spans(marks: StepMarks, zero: int, group_size: int = 1) -> Iterator[Span]:
    """The step's blocks on the compute lane, from `zero` on. `group_size`: see `TraceFacts`."""
    reached = [gate.begin_ns for gate in marks.gates]
    bounds = [marks.begin_ns, *reached, marks.forward_end_ns, marks.end_ns]
    pieces = _shared_out(tuple(_moved(marks.pieces, zero)), [bound - zero for bound in bounds])
    for place, (part, layer) in enumerate(parts_of_step(len(reached))):
        begin, end = bounds[place] - zero, bounds[place + 1] - zero
        wait = None if layer is None else _wait(marks, layer, group_size, zero)
        yield Span("compute", part, layer, begin, end, wait=wait, pieces=pieces[place])


def _wait(marks: StepMarks, layer: int, group_size: int, zero: int) -> Interval | None:
    """While computing stood at the layer's gate and its group was not loaded. What may come between
    the gate's opening and the next kernel is no wait, but a host that is late."""
    if not marks.loads:
        return None
    last_of_group = LayerGroups(len(marks.loads), group_size).last_beside(layer)
    reached, passed = marks.gates[layer]
    opened = min(passed, marks.loads[last_of_group].end_ns)
    return Interval(reached - zero, opened - zero) if opened > reached else None


def _moved(pieces: Iterable[Piece], zero: int) -> Iterator[Piece]:
    return (Piece(p.name, p.begin_ns - zero, p.end_ns - zero) for p in pieces)


def _shared_out(pieces: Sequence[Piece], bounds: Sequence[int]) -> list[tuple[Piece, ...]]:
    """The pieces that begin between each two bounds, cut off where those end: viewers want nested
    blocks, and kernels may overlap a little."""
    parts: list[list[Piece]] = [[] for _ in bounds[1:]]
    for piece in pieces:
        place = min(max(bisect.bisect_right(bounds, piece.begin_ns) - 1, 0), len(parts) - 1)
        begin, end = max(piece.begin_ns, bounds[place]), min(piece.end_ns, bounds[place + 1])
        if begin < end:
            parts[place].append(Piece(piece.name, begin, end))
    return [tuple(part) for part in parts]
