"""How fast layers come from host memory, by themselves: as one run of neighbours, and as they lie
in a pool that was used for long, against one long copy of as many bytes.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from interlace.bench.figures import Figures
from interlace.bench.kv_blocks import page_shape
from interlace.bench.overlap.link_rig import LinkRig, Loaded
from interlace.bench.overlap.lives import PoolLives
from interlace.bench.overlap.rig import Outcome, Rig, Setting, judged
from interlace.bench.overlap.sizes import Sizes
from interlace.bench.report import Check, Row
from interlace.bench.session import SEED
from interlace.bench.spread import Spread
from interlace.engine.device_thread import DeviceThread, finish_despite_cancel
from interlace.layers.page_copies import Run

T = TypeVar("T")

POOL_FACTOR = 8
"""Blocks of the pool, and records, in those of the prompt."""
SUBMIT_BLOCKS, SUBMIT_LAYERS = 512, 32
"""Of the load that the bar for submitting is about."""
HELD = (0.5, 0.95)
"""Shares of the pool that running requests hold; the bar is about the last one. In the rest lies
what ended ones have left."""


class _Round(NamedTuple):
    """In turns."""

    at_once_s: float
    """One long copy."""
    one_run: Loaded
    in_pool: list[Loaded]
    """For each of `HELD`."""


async def link(rig: Rig) -> Outcome:
    """Rounds of each kind of copy.

    Raises: `ConfigError` or `InterlaceError` if there is no memory for it. Cancelling stops after
    the copy in progress, and gives the memory back.
    """
    loaded, sizes = rig.prepared.loaded, rig.setting.sizes
    shape = page_shape(loaded)
    num_blocks = POOL_FACTOR * sizes.prompt_blocks
    with rig.setting.progress.task("prefixes that come and go", None):
        loads = await asyncio.to_thread(_loads, sizes, num_blocks)
    device, made = rig.prepared.device, list[LinkRig]()

    def make() -> None:
        made.append(LinkRig.make(shape, 1 + num_blocks, num_blocks, loaded.decoder.device))

    try:
        await _on(device, make)
        rounds = await _run(device, made[0], rig.setting, loads)
    finally:  # cancelled or not, it may have been made
        for copies in made:
            await _on(device, copies.close)
    return _outcome(rig.setting, rounds, shape.num_layers)


def _loads(sizes: Sizes, num_blocks: int) -> list[list[Sequence[Run]]]:
    """Of each round, for each of `HELD`; the first round warms up."""
    by_share = []
    for held in HELD:
        lives = PoolLives(num_blocks, sizes.prompt_blocks, held, SEED)
        lives.live(sizes.lives)
        by_share.append([lives.next_load() for _ in range(sizes.repeats + 1)])
    return [list(loads) for loads in zip(*by_share, strict=True)]


async def _run(
    device: DeviceThread,
    copies: LinkRig,
    setting: Setting,
    loads: Sequence[list[Sequence[Run]]],
) -> list[_Round]:
    num_blocks = setting.sizes.prompt_blocks
    rounds = []
    with setting.progress.task("link", len(loads)) as advance:
        for several in loads:
            at_once_s = await _on(device, lambda: copies.copy_at_once(num_blocks))
            one_run = await _on(device, lambda: copies.load([(0, 1, num_blocks)]))
            in_pool = [await _on(device, partial(copies.load, runs)) for runs in several]
            rounds.append(_Round(at_once_s, one_run, in_pool))
            advance(1)
    return rounds[1:]


async def _on(device: DeviceThread, call: Callable[[], T]) -> T:
    return await finish_despite_cancel(device.submit(call))


def _outcome(setting: Setting, rounds: Sequence[_Round], num_layers: int) -> Outcome:
    num_blocks, bars = setting.sizes.prompt_blocks, setting.bars
    at_once_s = [r.at_once_s for r in rounds]
    one_run = [r.one_run for r in rounds]
    num_bytes = one_run[0].num_bytes
    at_once = Row(
        f"one copy of {num_bytes / 1e6:,.0f} MB",
        {"GB/s": Spread.of(num_bytes / s / 1e9 for s in at_once_s)},
    )
    cases = [("one run", one_run, bars.link_one_run)]
    for place, held in enumerate(HELD):
        name = f"pool {held:.0%} held, after {setting.sizes.lives} lives"
        bar = bars.link_full_pool if held == HELD[-1] else None
        cases.append((name, [r.in_pool[place] for r in rounds], bar))
    rows: list[Row] = [at_once]
    checks: list[Check] = []
    for name, loads, bar in cases:
        case = f"{num_layers} layers of {num_blocks} blocks, {name}, {_ways(loads)}"
        figures = _figures(loads, at_once_s)
        rows.append(Row(case, figures))
        checks += judged(f"link: {name}", figures["of one copy"].median, at_least=bar)
    if (num_blocks, num_layers) == (SUBMIT_BLOCKS, SUBMIT_LAYERS):
        submit_ms = statistics.median(one.submit_s for one in one_run) * 1e3
        checks += judged("submitting one run, ms", submit_ms, at_most=bars.submit_ms)
    return tuple(rows), tuple(checks)


def _figures(loads: Sequence[Loaded], at_once_s: Sequence[float]) -> Figures:
    pairs = list(zip(loads, at_once_s, strict=True))
    return {
        "GB/s": Spread.of(one.num_bytes / one.seconds / 1e9 for one in loads),
        "of one copy": Spread.of(s / one.seconds for one, s in pairs),
        "submit ms": Spread.of(one.submit_s * 1e3 for one in loads),
        "runs": Spread.of(one.num_runs for one in loads),
        "of records": Spread.of(one.num_record_runs for one in loads),
        "copies": Spread.of(one.num_copies for one in loads),
    }


def _ways(loads: Sequence[Loaded]) -> str:
    """By which layers were copied, in words."""
    ways = {way.name.lower() for one in loads for way in one.ways}
    return " and ".join(sorted(ways))
