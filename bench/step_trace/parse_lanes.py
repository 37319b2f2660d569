"""Whether the lanes of a timeline that was read hold what they should. They raise `ValueError`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from interlace.bench.step_trace.facts import HybridFacts
from interlace.bench.step_trace.hybrid_build import check_meeting
from interlace.bench.step_trace.trace import Span, parts_of_step


def check_step_lanes(load: Sequence[Span], compute: Sequence[Span]) -> None:
    """Both have all layers in order, after each other."""
    layers = [("layer", layer) for layer in range(len(load))]
    if not layers or [(span.part, span.layer) for span in load] != layers:
        raise ValueError("its load lane does not have one block for each layer, in order")
    _check_compute(compute, len(layers), num_steps=1)
    _check_order(load)


def check_hybrid_lanes(load: Sequence[Span], compute: Sequence[Span], facts: HybridFacts) -> None:
    """One has slices, down to where the other one's steps have come from the front.

    Raises: also `InterlaceError` if the two do not meet.
    """
    slices = [span.blocks for span in load if span.blocks is not None]
    if not load or len(slices) < len(load):
        raise ValueError("its load lane does not have slices of blocks, and nothing else")
    check_meeting(slices, facts)
    _check_compute(compute, facts.num_layers, len(facts.steps))
    _check_order(load)


def _check_compute(compute: Sequence[Span], num_layers: int, num_steps: int) -> None:
    if len(compute) != num_steps * (num_layers + 2):
        raise ValueError(
            f"its compute lane has {len(compute)} blocks, which are not embed, {num_layers} layers"
            f" and head in each of {num_steps} steps"
        )
    if [(span.part, span.layer) for span in compute] != parts_of_step(num_layers) * num_steps:
        raise ValueError("its compute lane is not embed, as many layers as there are, and head")
    if not compute:
        raise ValueError("its compute lane is empty")
    _check_order(compute)


def _check_order(lane: Sequence[Span]) -> None:
    if any(a.end_ns > b.begin_ns for a, b in itertools.pairwise(lane)):
        raise ValueError(f"blocks of its {lane[0].lane} lane overlap")
