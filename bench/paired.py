"""What one thing costs beside another, from runs in pairs that go on until noise is small.

Both arms of a pair run one after the other, in turns first, so that a machine that slows down or
warms up favours neither. Knows arms, not engines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

from interlace.bench.arms import Arm, Shape
from interlace.bench.report import Check
from interlace.bench.spread import Spread
from interlace.bench.timeline import Sample
from interlace.bench.workload import WorkSource
from interlace.engine.ports import Progress

NOISE_SHARE = 1 / 3
"""Enough pairs were run when the noise is this share of the bar."""


class CachingArm(Arm, Protocol):
    """An arm whose cache can be emptied, so that each run finds the device as the first did."""

    def forget(self) -> None:
        """Forget all KV on the device."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Paired:
    """The measured pairs of one comparison."""

    base: Sequence[Sample]
    other: Sequence[Sample]
    cost: Spread
    """Of each pair, percent: how much longer the other arm took."""

    def checks(self, name: str, bar: float) -> tuple[Check, Check]:
        """The cost against `bar` percent, and its noise, which must be below the same bar."""
        return (
            Check(name, self.cost.median, at_most=bar),
            Check(f"noise of {name}", self.noise, at_most=bar),
        )

    @property
    def noise(self) -> float:
        """Standard error of the median cost, percent."""
        return self.cost.median_error


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """What is compared: seconds of a run, up to `bar` percent more."""

    title: str
    seconds: Callable[[Sample], float]
    bar: float
    least: int = 2
    """Pairs for each of the repeats asked for; even, since either order is as frequent then."""
    most: int = 8


async def compare(
    comparison: Comparison,
    arms: tuple[CachingArm, CachingArm],
    shape: Shape,
    source: WorkSource,
    progress: Progress,
) -> Paired:
    """Run base and other on the same new prompt, pair after pair; the first pair warms up.

    Ends when the noise is small beside the bar, or after `comparison.most` x `shape.repeats` pairs.
    Cancelling stops after the run in progress.
    """
    samples: tuple[list[Sample], list[Sample]] = ([], [])
    most = comparison.most * shape.repeats
    with progress.task(comparison.title, most + 1) as advance:
        for number in range(most + 1):
            work = source.make(1, shape.prompt_tokens, shape.output_tokens)
            for index in (0, 1) if number % 2 else (1, 0):
                arms[index].forget()
                samples[index].append(await arms[index].run(work))
            advance(1)
            if number == 0:
                samples[0].clear()
                samples[1].clear()
            elif number >= comparison.least * shape.repeats and number % 2 == 0:
                paired = _paired(*samples, comparison.seconds)
                if paired.noise <= NOISE_SHARE * comparison.bar:
                    break
    return _paired(*samples, comparison.seconds)


def _paired(
    base: Sequence[Sample], other: Sequence[Sample], seconds: Callable[[Sample], float]
) -> Paired:
    pairs = zip(base, other, strict=True)
    return Paired(base, other, Spread.of((seconds(b) / seconds(a) - 1) * 100 for a, b in pairs))
