"""Prompts whose files have left the page cache, as after a restart of the machine: whether the
connector chooses well, where reading takes long.

Host memory is empty and the files' pages are dropped before each request. "MB in memory" is what
of them was left: all, on a file system that keeps its pages, and then this is no cold read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from interlace.bench.overlap.arms import HitArm, require
from interlace.bench.overlap.modes import best_fixed, chosen_by_best
from interlace.bench.overlap.rig import Outcome, Setting
from interlace.bench.report import Check, Row
from interlace.bench.spread import Spread
from interlace.bench.store.page_cache import drop_pages, resident_bytes, slab_files
from interlace.bench.store.rig import COLD_CHOICE, StoreRig
from interlace.bench.workload import Work
from interlace.connectors.pipeline.options import LoadMode

WAYS: tuple[LoadMode, ...] = ("auto", "recompute", "bulk", "hybrid")


class Taken(NamedTuple):
    """One sample."""

    seconds: float
    """To the first token, as the caller sees it."""
    resident_bytes: int
    """Of all files, before it."""
    loaded_tokens: int


async def cold(store: StoreRig) -> Outcome:
    """Measure each number of new tokens in each way, in turns.

    Raises: `InterlaceError` if files do not come about, `OSError`. Cancelling stops after the
    request in progress.
    """
    return await measure(await store.rig.hit_arm(), store.rig.setting, store.engine_files)


async def measure(arm: HitArm, setting: Setting, folder: Path) -> Outcome:
    """`cold` on an arm that keeps KV in files below `folder`."""
    sizes = setting.sizes
    prefix = setting.work(sizes.prompt_tokens)
    await arm.keep(prefix)
    taken = {count: {way: list[Taken]() for way in WAYS} for count in sizes.new}
    num_runs = len(WAYS) * len(taken) * (sizes.repeats + 1)
    with setting.progress.task("cold", num_runs) as advance:
        for number in range(sizes.repeats + 1):
            for count, by_way in taken.items():
                for way in _turned(number):
                    sample = await _one(arm, setting, prefix, count, way, folder)
                    if number:  # the first round lets the connector learn how long reads take
                        by_way[way].append(sample)
                    advance(1)
    found = [_outcome(f"{sizes.prompt_tokens} + {count} new", one) for count, one in taken.items()]
    return tuple(row for row, _ in found), tuple(check for _, check in found)


def _turned(number: int) -> tuple[LoadMode, ...]:
    """All ways, in each round another one first: none always follows the same one."""
    first = number % len(WAYS)
    return (*WAYS[first:], *WAYS[:first])


async def _one(
    arm: HitArm, setting: Setting, prefix: Work, count: int, way: LoadMode, folder: Path
) -> Taken:
    work, whole = setting.source.behind(prefix, count), prefix.prompt_tokens
    arm.forget()
    resident = await asyncio.to_thread(_drop, folder)
    hit = await arm.run(work, way)
    if way == "bulk":
        require(hit.sample.loaded_tokens, whole, "read from files")
    return Taken(hit.sample.first_token_s, resident, hit.sample.loaded_tokens)


def _drop(folder: Path) -> int:
    """What is left of the pages of these files, in bytes."""
    files = slab_files(folder)
    drop_pages(files)
    return resident_bytes(files)


def _outcome(case: str, by_way: Mapping[LoadMode, Sequence[Taken]]) -> tuple[Row, Check]:
    seconds = {way: [one.seconds for one in samples] for way, samples in by_way.items()}
    ratio, best = chosen_by_best(seconds), best_fixed(seconds)
    figures = {f"{way} ms": Spread.of(s * 1e3 for s in some) for way, some in seconds.items()}
    figures["auto / best"] = Spread.of([ratio])
    figures["tokens from files"] = Spread.of(one.loaded_tokens for one in by_way["auto"])
    figures["MB in memory"] = Spread.of(
        one.resident_bytes * 1e-6 for samples in by_way.values() for one in samples
    )
    row = Row(f"{case}, best {best}", figures)
    return row, Check(f"auto / best forced, cold, {case}", ratio, at_most=COLD_CHOICE)
