"""One pipelined step, or one prompt from both ends, as a timeline: what its load lane and its
compute lane did.

    load     [ layer 0 ][ layer 1 ][ layer 2 ][ layer 3 ]
    compute  [embed][...wait... layer 0     ][ layer 1 ][ layer 2 ][..layer 3][head]
                               ^ gate 0

A layer's block on the compute lane goes from its gate to the next one: it waits for its KV,
attends, and computes what follows, the projections of the next layer included. What comes before
the first gate is the block "embed", what comes after the last layer "head".

    load     [ blocks 40-63 ][ blocks 16-39 ]
    compute  [embed][layer 0][layer 1][head]      [embed][layer 0][layer 1][head]

From both ends, slices of many blocks over all layers come on the load lane, the last ones first,
while steps compute the front on the other: no layer waits for any of them.

Times are whole nanoseconds from the first event. Plain values; knows neither engines nor devices.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple, TypeAlias

from interlace.bench.step_trace.facts import HybridFacts, TraceFacts
from interlace.bench.step_trace.intervals import Interval, merged

LaneName: TypeAlias = Literal["load", "compute", "store"]
Part: TypeAlias = Literal["embed", "layer", "head", "slice"]


class Blocks(NamedTuple):
    """Some neighbours among the blocks of a prompt, which are counted from 0."""

    first: int
    end: int
    """Behind the last one."""

    @property
    def num_blocks(self) -> int:
        """How many."""
        return self.end - self.first


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
    blocks: Blocks | None = None
    """None unless the part is a slice."""

    @property
    def label(self) -> str:
        """Its part, or the number of the layer, or those of the slice's first and last block."""
        if self.blocks is not None:
            first, end = self.blocks
            return str(first) if end == first + 1 else f"{first}-{end - 1}"
        return self.part if self.layer is None else str(self.layer)

    @property
    def busy(self) -> tuple[Interval, ...]:
        """When the lane worked, ascending, without overlaps."""
        if self.pieces:
            return merged(Interval(piece.begin_ns, piece.end_ns) for piece in self.pieces)
        begin = self.begin_ns if self.wait is None else self.wait.end_ns
        return merged([Interval(begin, self.end_ns)])


@dataclasses.dataclass(frozen=True, slots=True)
class LaneTrace:
    """Both lanes. Each one's spans are in order, and do not overlap."""

    load: tuple[Span, ...]
    compute: tuple[Span, ...]

    @property
    def spans(self) -> tuple[Span, ...]:
        """Of both lanes."""
        return (*self.load, *self.compute)

    @property
    def end_ns(self) -> int:
        """When the last span ends."""
        return max(span.end_ns for span in self.spans)


@dataclasses.dataclass(frozen=True, slots=True)
class StepTrace(LaneTrace):
    """Of one step that loads: "embed", each layer, "head" beside a load of each layer, in order."""

    facts: TraceFacts

    @property
    def num_layers(self) -> int:
        """On each lane."""
        return len(self.load)


@dataclasses.dataclass(frozen=True, slots=True)
class HybridTrace(LaneTrace):
    """Of one prompt from both ends: "embed", each layer, "head" for each step in turn, beside
    slices of blocks, the last ones first."""

    facts: HybridFacts

    @property
    def num_layers(self) -> int:
        """Of each step."""
        return self.facts.num_layers


AnyTrace: TypeAlias = StepTrace | HybridTrace


def parts_of_step(num_layers: int) -> list[tuple[Part, int | None]]:
    """(part, layer) of each block of a step on the compute lane, in order."""
    layers: list[tuple[Part, int | None]] = [("layer", layer) for layer in range(num_layers)]
    return [("embed", None), *layers, ("head", None)]
