"""Whether the connector chooses well: its choice against each way that it could be made to take,
for prefixes and new tokens of several lengths.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple, get_args

from interlace.bench.kv_blocks import BLOCK_SIZE
from interlace.bench.overlap.arms import HitArm, require
from interlace.bench.overlap.rig import Outcome, Rig, Setting, judged
from interlace.bench.report import Check, Row
from interlace.bench.spread import Spread, percentile
from interlace.bench.workload import Work
from interlace.connectors.pipeline.options import LoadMode

PARTS_OF_PROMPT = (16, 4, 2, 1)
"""The prompt's length by these are the prefixes' lengths."""
MODES: tuple[LoadMode, ...] = get_args(LoadMode)


class Point(NamedTuple):
    """One case."""

    prefix: int
    """Tokens that are stored."""
    new: int

    def __str__(self) -> str:
        return f"{self.prefix} + {self.new} new"


Taken = Mapping[Point, Mapping[LoadMode, list[float]]]
"""Seconds to the first token."""


async def modes(rig: Rig) -> Outcome:
    """Measure all points in all modes, in turns.

    Raises: `InterlaceError` if a forced load did not come about. Cancelling stops after the request
    in progress.
    """
    setting = rig.setting
    prefixes = [setting.work(length) for length in prefix_lengths(setting.sizes.prompt_tokens)]
    return await measure_prefixes(await rig.hit_arm(), setting, prefixes)


async def measure_prefixes(arm: HitArm, setting: Setting, prefixes: Sequence[Work]) -> Outcome:
    """`modes` on any arm, with these prefixes."""
    for prefix in prefixes:
        await arm.keep(prefix)
    taken = await _run(arm, setting, prefixes)
    rows = tuple(_row(point, by_mode) for point, by_mode in taken.items())
    return rows, _checks(setting, taken)


def prefix_lengths(prompt_tokens: int) -> list[int]:
    """Different whole blocks, ascending."""
    blocks = sorted({max(1, prompt_tokens // part // BLOCK_SIZE) for part in PARTS_OF_PROMPT})
    return [count * BLOCK_SIZE for count in blocks]


async def _run(arm: HitArm, setting: Setting, prefixes: Sequence[Work]) -> Taken:
    """Seconds by point and mode. The first round warms up, and lets the connector learn how long
    loads and steps take here.

    Prefixes change fastest: what is saved between two uses of one shall not push it out.
    """
    sizes = setting.sizes
    cases = list(itertools.product(sizes.new, MODES, prefixes))
    taken = {
        Point(prefix.prompt_tokens, new): {mode: list[float]() for mode in MODES}
        for prefix, new in itertools.product(prefixes, sizes.new)
    }
    with setting.progress.task("modes", len(cases) * (sizes.repeats + 1)) as advance:
        for number in range(sizes.repeats + 1):
            for new, mode, prefix in cases:
                seconds = await _one(arm, setting, prefix, new, mode)
                if number:
                    taken[Point(prefix.prompt_tokens, new)][mode].append(seconds)
                advance(1)
    return taken


async def _one(arm: HitArm, setting: Setting, prefix: Work, new: int, mode: LoadMode) -> float:
    arm.forget()
    hit = await arm.run(setting.source.behind(prefix, new), mode)
    if mode in ("bulk", "layerwise"):
        require(hit.sample.loaded_tokens, prefix.prompt_tokens, "loaded")
    return hit.sample.first_token_s


def best_fixed(by_mode: Mapping[LoadMode, Sequence[float]]) -> LoadMode:
    """The fixed mode with the least median."""
    fixed = [mode for mode in by_mode if mode != "auto"]
    return min(fixed, key=lambda mode: Spread.of(by_mode[mode]).median)


def chosen_by_best(by_mode: Mapping[LoadMode, Sequence[float]]) -> float:
    """The chosen mode by the best fixed one."""
    chosen, best = (Spread.of(by_mode[mode]).median for mode in ("auto", best_fixed(by_mode)))
    return chosen / best


def _row(point: Point, by_mode: Mapping[LoadMode, Sequence[float]]) -> Row:
    figures = {f"{mode} ms": Spread.of(s * 1e3 for s in by_mode[mode]) for mode in MODES}
    figures["auto / best"] = Spread.of([chosen_by_best(by_mode)])
    return Row(f"{point}, best {best_fixed(by_mode)}", figures)


def _checks(setting: Setting, taken: Taken) -> tuple[Check, ...]:
    ratios = [chosen_by_best(by_mode) for by_mode in taken.values()]
    usual = percentile(ratios, 0.9)
    bars = setting.bars
    return (
        *judged("auto / best fixed mode, at 90% of the points", usual, at_most=bars.mode_usual),
        *judged("auto / best fixed mode, at all points", max(ratios), at_most=bars.mode_worst),
    )
