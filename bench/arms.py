"""Arms of a benchmark, run in turns: ours, theirs, ours, theirs, ...

Taking turns spreads what else the machine does over all arms alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from interlace.bench.timeline import Sample
from interlace.bench.workload import Work, WorkSource
from interlace.engine.ports import Progress


class Arm(Protocol):
    """Something that can run a piece of work and time it."""

    @property
    def name(self) -> str:
        """What tables call it."""
        ...

    async def run(self, work: Work) -> Sample:
        """Run `work` from an idle start. Cancelling ends what was begun before it returns."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One arm at one batch size."""

    arm: Arm
    batch_size: int

    @property
    def name(self) -> str:
        """Arm and batch size, for people."""
        return f"{self.arm.name}, batch {self.batch_size}"


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """How large the work is and how often it is done."""

    prompt_tokens: int
    output_tokens: int
    repeats: int


async def run_in_turns(
    cases: Sequence[Case], shape: Shape, source: WorkSource, progress: Progress, title: str
) -> list[list[Sample]]:
    """Run every case once unmeasured, then `shape.repeats` times, all cases in each round.

    Returns for each case its samples, in order. Cases of one batch size get the same prompts in
    a round, and no arm sees a prompt twice. Cancelling stops after the run in progress.
    """
    samples: list[list[Sample]] = [[] for _ in cases]
    with progress.task(title, len(cases) * (shape.repeats + 1)) as advance:
        for round_number in range(shape.repeats + 1):
            work: dict[int, Work] = {}
            for case, taken in zip(cases, samples, strict=True):
                size = case.batch_size
                if size not in work:
                    work[size] = source.make(size, shape.prompt_tokens, shape.output_tokens)
                sample = await case.arm.run(work[size])
                if round_number > 0:  # round 0 warms up
                    taken.append(sample)
                advance(1)
    return samples
