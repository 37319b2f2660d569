"""What a prompt from both ends does, written down as it happens: see `hybrid_connector.py`.

On a CPU the notes have the times too. On a GPU they say what was queued, and in which order; when
that was done is told by the device. Every note is an `append` or an assignment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from interlace.bench.step_trace.build import LayerLoad, StepMarks
from interlace.bench.step_trace.facts import RanStep
from interlace.bench.step_trace.hybrid_build import HybridMarks, SliceLoad
from interlace.bench.step_trace.intervals import Interval
from interlace.bench.step_trace.taped import now_ns
from interlace.bench.step_trace.trace import Blocks
from interlace.engine.errors import InterlaceError
from interlace.engine.ports import Clock

if TYPE_CHECKING:
    from interlace.layers.page_copies import Run


class NotedSlice(NamedTuple):
    """A work of the lane "bulk"."""

    runs: Sequence[Run]
    begin_ns: int
    end_ns: int
    """On a GPU both are of the host, which queued it."""
    num_bytes: int
    num_copies: int
    """Strided ones, or one for each block of a layer; or one for the kernel that copies all."""


@dataclasses.dataclass(slots=True)
class _NotedStep:
    ran: RanStep
    begin_ns: int
    reached: list[int] = dataclasses.field(default_factory=list)  # of each layer
    forward_end_ns: int | None = None
    end_ns: int | None = None


class _NotedLoad(NamedTuple):
    request_id: str
    places: dict[int, int]
    """Block id -> the block's number in the prompt."""


class HybridTape:
    """Notes of one request from both ends since the last `clear`, on an engine with no other."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.clear()

    def clear(self) -> None:
        """Forget it all. Only while nothing is under way."""
        self._loads: list[_NotedLoad] = []
        self._slices: list[NotedSlice] = []
        self._steps: list[_NotedStep] = []

    def now_ns(self) -> int:
        """The clock in nanoseconds. Any thread."""
        return now_ns(self._clock)

    # ---------------------------------------------------------------- device thread

    def note_load(self, request_id: str, runs: Sequence[Run]) -> None:
        """A load from the back is ordered; `runs` are all that is stored, from the prompt's
        beginning on."""
        ids = [block_id + i for _, block_id, count in runs for i in range(count)]
        self._loads.append(
            _NotedLoad(request_id, {block_id: place for place, block_id in enumerate(ids)})
        )

    def begin(self, ran: RanStep) -> None:
        """A step begins to compute."""
        self._steps.append(_NotedStep(ran, self.now_ns()))

    def reach(self) -> None:
        """The next layer begins."""
        if self._steps:
            self._steps[-1].reached.append(self.now_ns())

    def end_forward(self) -> None:
        """The last layer was computed."""
        if self._steps:
            self._steps[-1].forward_end_ns = self.now_ns()

    def end(self) -> None:
        """A step has ended: one that computes, or, with nothing more to note, an empty one."""
        step = self._steps[-1] if self._steps else None
        if step is not None and step.forward_end_ns is not None and step.end_ns is None:
            step.end_ns = self.now_ns()

    # ---------------------------------------------------------------- lane "bulk"

    def add_slice(self, one: NotedSlice) -> None:
        """A slice was copied, or queued."""
        self._slices.append(one)

    # ---------------------------------------------------------------- afterwards

    @property
    def ran(self) -> tuple[RanStep, ...]:
        """Steps that have computed, in order."""
        return tuple(step.ran for step in self._steps)

    @property
    def slices(self) -> tuple[NotedSlice, ...]:
        """In order."""
        return tuple(self._slices)

    def marks(self, steps: Sequence[StepMarks], loads: Sequence[LayerLoad]) -> HybridMarks:
        """With these times of the noted steps and slices. Raises: `InterlaceError` if there was not
        one load from the back, or if blocks were copied that are none of its."""
        if len(self._loads) != 1:
            raise InterlaceError(
                f"{len(self._loads)} loads from the back were seen, not one: is the prefix stored,"
                " and at least two blocks long?"
            )
        ((request_id, places),) = self._loads
        slices = [
            SliceLoad(_blocks(one.runs, places), load)
            for one, load in zip(self._slices, loads, strict=True)
        ]
        return HybridMarks(request_id, len(places), tuple(slices), self.ran, tuple(steps))

    def timed_marks(self) -> HybridMarks:
        """With the noted times, as a CPU has them. Raises: `InterlaceError`, also if a step was not
        seen whole."""
        loads = [LayerLoad(one.begin_ns, one.end_ns, one.num_bytes) for one in self._slices]
        return self.marks([_step_marks(step) for step in self._steps], loads)


def _step_marks(step: _NotedStep) -> StepMarks:
    if not step.reached or step.forward_end_ns is None or step.end_ns is None:
        raise InterlaceError(
            f"step {step.ran.step_id} was not seen whole ({len(step.reached)} layers): record"
            " again."
        )
    gates = tuple(Interval(time, time) for time in step.reached)
    return StepMarks((), step.begin_ns, gates, step.forward_end_ns, step.end_ns)


def _blocks(runs: Sequence[Run], places: dict[int, int]) -> Blocks:
    """Where in the prompt the blocks of a slice are. Raises: `InterlaceError`."""
    found = [places.get(block_id + i, -1) for _, block_id, count in runs for i in range(count)]
    if not found or found != [*range(found[0], found[0] + len(found))] or found[0] < 0:
        raise InterlaceError(
            "a slice was copied that is no stretch of the prompt, so its load cannot be drawn:"
            " record again, with no other request running."
        )
    return Blocks(found[0], found[0] + len(found))
