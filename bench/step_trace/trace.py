"""One pipelined step as a timeline: what its load lane and its compute lane did, layer by layer.

    load     [ layer 0 ][ layer 1 ][ layer 2 ][ layer 3 ]
    compute  [embed][...wait... layer 0     ][ layer 1 ][ layer 2 ][..layer 3][head]
                               ^ gate 0

A layer's block on the compute lane goes from its gate to the next one: it waits for its KV,
attends, and computes what follows, the projections of the next layer included. What comes before
the first gate is the block "embed", what comes after the last layer "head". Times are whole
nanoseconds from the step's first event. Plain values; knows neither engines nor devices.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple, TypeAlias

from interlace.bench.step_trace.intervals import Interval, merged

LaneName: TypeAlias = Literal["load", "compute"]
Part: TypeAlias = Literal["embed", "layer", "head"]


class Piece(NamedTuple):
    """A kernel or a copy."""

    name: str
    begin_ns: int
    end_ns: int


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """One block of one lane."""

    lane: LaneName
    part: Part
    layer: int | None
    """None unless the part is a layer."""
    begin_ns: int
    end_ns: int
    num_bytes: int = 0
    """Loaded."""
    wait: Interval | None = None
    """While the layer's KV was not there yet; it begins with the block."""
    pieces: tuple[Piece, ...] = ()
    """What was done in it. Without any, all but the wait was work."""

    @property
    def label(self) -> str:
        """Its part, or the layer's number."""
        return self.part if self.layer is None else str(self.layer)

    @property
    def busy(self) -> tuple[Interval, ...]:
        """When the lane worked, ascending, without overlaps."""
        if self.pieces:
            return merged(Interval(piece.begin_ns, piece.end_ns) for piece in self.pieces)
        begin = self.begin_ns if self.wait is None else self.wait.end_ns
        return merged([Interval(begin, self.end_ns)])


@dataclasses.dataclass(frozen=True, slots=True)
class TraceFacts:
    """What was run, and on what."""

    model: str
    dtype: str
    machine: str
    """Name of the GPU, or of the processor."""
    clock: Literal["device", "host"]
    """Who told the times."""
    loaded_tokens: int
    new_tokens: int
    """Computed in the step."""
    group_size: int
    """Layers that share a gate, but for the first and the last one: see `LayerGroups`."""
    request_id: str
    step_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class StepTrace:
    """A whole timeline. Each lane's spans are in order, and do not overlap."""

    facts: TraceFacts
    load: tuple[Span, ...]
    """One for each layer, in order."""
    compute: tuple[Span, ...]
    """"embed", one for each layer, "head"."""

    @property
    def spans(self) -> tuple[Span, ...]:
        """Of both lanes."""
        return (*self.load, *self.compute)

    @property
    def end_ns(self) -> int:
        """When the last span ends."""
        return max(span.end_ns for span in self.spans)
