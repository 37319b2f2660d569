"""From what was seen of a prompt from both ends, on any clock, to its timeline. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from interlace.bench.step_trace.build import (
    LayerLoad,
    StepMarks,
    check_order,
    compute_spans,
    placed,
)
from interlace.bench.step_trace.facts import HybridFacts, RanStep
from interlace.bench.step_trace.trace import Blocks, HybridTrace, Span
from interlace.engine.errors import InterlaceError


@dataclasses.dataclass(frozen=True, slots=True)
class SliceLoad:
    """What was seen of the load of some blocks over all layers."""

    blocks: Blocks
    load: LayerLoad
    """Its times, bytes and pieces, of all layers."""


@dataclasses.dataclass(frozen=True, slots=True)
class HybridMarks:
    """What was seen of one request, on any clock."""

    request_id: str
    num_blocks: int
    """That were stored of its prompt."""
    slices: tuple[SliceLoad, ...]
    """In the order in which they came."""
    ran: tuple[RanStep, ...]
    steps: tuple[StepMarks, ...]
    """Of each in `ran`."""

    @property
    def num_loaded_blocks(self) -> int:
        """In all slices."""
        return sum(one.blocks.num_blocks for one in self.slices)


def build_hybrid_trace(marks: HybridMarks, facts: HybridFacts) -> HybridTrace:
    """The timeline of what was seen.

    Raises: `InterlaceError` if the marks are not in order, or if the two ends do not meet.
    """
    if not marks.slices or not marks.steps:
        raise InterlaceError(
            f"{len(marks.slices)} slices were loaded and {len(marks.steps)} steps computed: a"
            " timeline from both ends needs some of both. Is the prefix stored?"
        )
    check_meeting([one.blocks for one in marks.slices], facts)
    zero = min(marks.steps[0].begin_ns, marks.slices[0].load.begin_ns)
    load = tuple(_load_spans(marks.slices, zero))
    compute = tuple(_compute_spans(marks.steps, zero))
    check_order(load)
    check_order(compute)
    return HybridTrace(load, compute, facts)


def check_meeting(slices: Sequence[Blocks], facts: HybridFacts) -> None:
    """Raises: `InterlaceError` unless the slices go down from the end of what was stored to where
    computing from the front has ended, each token coming once."""
    behind = facts.num_blocks
    for blocks in slices:
        if blocks.end != behind or blocks.num_blocks < 1:
            raise InterlaceError(
                f"blocks {blocks.first} to {blocks.end - 1} were loaded where the one before"
                f" {behind} was next: from the back, slices go down. Record again."
            )
        behind = blocks.first
    computed = sum(step.num_tokens for step in facts.steps)
    are_whole = not (
        facts.front_tokens % facts.block_size or facts.loaded_tokens % facts.block_size
    )
    if behind != facts.meeting_block or not are_whole:
        raise InterlaceError(
            f"{facts.front_tokens} tokens were computed from the front and {facts.loaded_tokens}"
            f" loaded, in blocks of {facts.block_size} from number {behind} on: the two do not"
            " meet. Record again."
        )
    if computed != facts.front_tokens + facts.new_tokens:
        raise InterlaceError(
            f"steps computed {computed} tokens, not the {facts.front_tokens} of the front and"
            f" {facts.new_tokens} new ones. Record again."
        )


def _load_spans(slices: Iterable[SliceLoad], zero: int) -> Iterator[Span]:
    begin = 0
    for one in slices:
        begin, end, pieces = placed(one.load, begin, zero)
        yield Span(
            "load",
            "slice",
            None,
            begin,
            end,
            one.load.num_bytes,
            pieces=pieces,
            blocks=one.blocks,
        )
        begin = end


def _compute_spans(steps: Iterable[StepMarks], zero: int) -> Iterator[Span]:
    return (span for marks in steps for span in compute_spans(marks, zero))
