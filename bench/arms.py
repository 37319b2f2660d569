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
    """One arm with one number of requests and one length of prompts."""

    arm: Arm
    batch_size: int
    prompt_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """How large the work is and how often it is done."""

    prompt_tokens: int
    output_tokens: int
    repeats: int


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """Work of several sizes: each batch size with each length of prompts."""

    batch_sizes: Sequence[int]
    prompt_tokens: Sequence[int]
    output_tokens: int
    repeats: int

    def name(self, case: Case) -> str:
        """What tables call a case: its arm, batch size, and the prompt's length if it varies."""
        name = f"{case.arm.name}, batch {case.batch_size}"
        return name if len(self.prompt_tokens) == 1 else f"{name}, {case.prompt_tokens} tokens"


async def run_in_turns(
    cases: Sequence[Case], grid: Grid, source: WorkSource, progress: Progress, title: str
) -> list[list[Sample]]:
    """Run every case once unmeasured, then `grid.repeats` times, all cases in each round.

    Returns for each case its samples, in order. Cases of one size get the same prompts in a
    round, and no arm sees a prompt twice. Cancelling stops after the run in progress.
    """
    samples: list[list[Sample]] = [[] for _ in cases]
    with progress.task(title, len(cases) * (grid.repeats + 1)) as advance:
        for round_number in range(grid.repeats + 1):
            work: dict[tuple[int, int], Work] = {}
            for case, taken in zip(cases, samples, strict=True):
                size = (case.batch_size, case.prompt_tokens)
                if size not in work:
                    work[size] = source.make(*size, grid.output_tokens)
                sample = await case.arm.run(work[size])
                if round_number > 0:  # round 0 warms up
                    taken.append(sample)
                advance(1)
    return samples
