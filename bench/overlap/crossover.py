"""Where loading takes as long as computing: the number of new tokens, found by halving, and how
much is hidden there. It is where hiding is worth most, and hardest.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

from interlace.bench.overlap.arms import HitArm, require
from interlace.bench.overlap.first_token import hidden_check, only_load, row, run_rounds
from interlace.bench.overlap.rig import Outcome, Rig, Setting
from interlace.bench.workload import Work

ASKED = 3
"""Requests for each number that is tried; their median counts."""
NEAR = 1 / 32
"""The number is found when it is known up to this share of it."""


class Found(NamedTuple):
    """What was found."""

    new: int
    case: str
    """For tables."""
    is_crossing: bool
    """Whether loading and computing take equally long there; else it is the nearest number that
    can be tried."""


async def crossover(rig: Rig) -> Outcome:
    """Find the number, and measure there as `first_token` does.

    Raises: `InterlaceError` if the prefix was not found where it should be. Cancelling stops after
    the request in progress.
    """
    sizes = rig.setting.sizes
    room = rig.prepared.loaded.max_model_len - sizes.prompt_tokens - 1
    return await measure(await rig.hit_arm(), rig.setting, max(1, min(sizes.most_new, room)))


async def measure(arm: HitArm, setting: Setting, most: int) -> Outcome:
    """`crossover` on any arm, with up to `most` new tokens."""
    prefix = setting.work(setting.sizes.prompt_tokens)
    await arm.run(prefix)
    found = await find(arm, setting, prefix, most)
    rounds = await run_rounds(arm, setting, prefix, [found.new], "at the crossover", is_whole=False)
    taken = rounds[found.new]
    checks = hidden_check(setting, found.case, taken) if found.is_crossing else ()
    return (row(found.case, setting, arm, taken),), checks


async def find(arm: HitArm, setting: Setting, prefix: Work, most: int) -> Found:
    """The number of new tokens behind `prefix` at which computing takes as long as loading."""
    with setting.progress.task("finding the crossover", None):
        load_s = await _load_s(arm, setting, prefix)
        if await _compute_s(arm, setting, prefix, 1) >= load_s:
            return Found(1, "1 new (computing takes longer)", is_crossing=False)
        if await _compute_s(arm, setting, prefix, most) < load_s:
            return Found(most, f"{most} new (loading takes longer)", is_crossing=False)
        low, high = 1, most
        while high - low > max(1, NEAR * high):
            middle = (low + high) // 2
            if await _compute_s(arm, setting, prefix, middle) < load_s:
                low = middle
            else:
                high = middle
    return Found(high, f"{high} new (load = compute)", is_crossing=True)


async def _load_s(arm: HitArm, setting: Setting, prefix: Work) -> float:
    """Of the prefix alone, warmed up."""
    seconds = []
    for _ in range(ASKED + 1):
        arm.forget()
        hit = await arm.run(setting.source.behind(prefix, 1), "layerwise")
        require(hit.sample.loaded_tokens, prefix.prompt_tokens, "loaded")
        seconds.append(only_load(hit).seconds)
    return statistics.median(seconds[1:])


async def _compute_s(arm: HitArm, setting: Setting, prefix: Work, count: int) -> float:
    """Of so many tokens behind the prefix, which lies on the device."""
    seconds = []
    for _ in range(ASKED):
        hit = await arm.run(setting.source.behind(prefix, count))
        require(hit.sample.cached_tokens, prefix.prompt_tokens, "cached on the device")
        seconds.append(hit.device_s)
    return statistics.median(seconds)
