"""Two engines that do the same work in turns, until the noise of the ratio is small."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from interlace.bench.engine_arm import EngineArm
from interlace.bench.overlap.rig import judged
from interlace.bench.paired import NOISE_SHARE, CachingArm
from interlace.bench.report import Check, Row
from interlace.bench.spread import Spread
from interlace.bench.timeline import Sample
from interlace.bench.workload import Work
from interlace.engine.ports import Progress

LEAST, MOST = 2, 4
"""Pairs for each of the repeats asked for; even, since either order is as frequent then."""
ENOUGH = 0.01
"""The bar where there is none, to tell what noise is small."""

Arms = tuple[EngineArm, EngineArm] | tuple[CachingArm, CachingArm]


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """What is compared: seconds of a run."""

    title: str
    make_work: Callable[[], Work]
    """For each pair."""
    seconds: Callable[[Sample], float]
    forgets: bool
    """Whether each run finds a device that has forgotten all KV."""
    at_most: float | None = None
    """The bar for the ratio, None if there is none."""


async def in_pairs(
    what: Comparison, arms: Arms, repeats: int, progress: Progress
) -> tuple[Row, tuple[Check, ...]]:
    """The arms in turns: one without what is asked about, one with it. The ratio and its noise.

    The first pair warms up. Raises: what the arms raise. Cancelling stops after the run in
    progress.
    """
    samples: tuple[list[Sample], list[Sample]] = ([], [])
    most = MOST * repeats
    ratio: Spread | None = None
    with progress.task(what.title, most + 1) as advance:
        for number in range(most + 1):
            work = what.make_work()
            for index in (0, 1) if number % 2 else (1, 0):
                if what.forgets:
                    arms[index].forget()
                samples[index].append(await arms[index].run(work))
            advance(1)
            if number == 0:
                samples[0].clear()
                samples[1].clear()
            elif number >= LEAST * repeats and number % 2 == 0:
                ratio = _ratio(what, *samples)
                if ratio.median_error <= NOISE_SHARE * ((what.at_most or 1 + ENOUGH) - 1):
                    break
    assert ratio is not None, "there is at least one repeat"
    figures = {
        name: Spread.of(what.seconds(sample) * 1e3 for sample in taken)
        for name, taken in zip(("without ms", "with ms"), samples, strict=True)
    }
    figures |= {"ratio": ratio, "noise of ratio": Spread.of([ratio.median_error])}
    return Row(what.title, figures), judged(what.title, ratio.median, at_most=what.at_most)


def _ratio(what: Comparison, base: list[Sample], other: list[Sample]) -> Spread:
    pairs = zip(base, other, strict=True)
    return Spread.of(what.seconds(b) / what.seconds(a) for a, b in pairs)
