"""How much of a load hides behind computing: a long prefix in host memory, new tokens behind it.

    cached      the prefix lies on the device: computing alone
    bulk        it is loaded first, and then computed on: one after the other
    layer-wise  each layer is loaded while those before it compute
    computed    it is computed again, with nothing loaded

All to the first token, in turns. Loading takes what bulk takes beyond cached, computing what
cached takes. The host's part is in both, so the hidden share, of the shorter one, is rather too
low. Knows arms, not engines: `bench/overlap_session.py` opens those.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from interlace.bench.engine_arm import EngineArm
from interlace.bench.figures import Figures
from interlace.bench.report import Check, Row
from interlace.bench.spread import Spread
from interlace.bench.workload import Work, WorkSource
from interlace.engine.errors import InterlaceError
from interlace.engine.ports import Progress

Outcome = tuple[tuple[Row, ...], tuple[Check, ...]]
HIDDEN_BAR: Final = 0.93
"""Least hidden share where loading takes as long as computing."""


@dataclasses.dataclass(frozen=True, slots=True)
class OverlapBench:
    """Two engines over one model, which differ in how they load."""

    bulk: EngineArm
    layerwise: EngineArm
    source: WorkSource
    progress: Progress
    prefix_bytes: int
    """Of the prefix's KV."""
    first_token_bars: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """Most milliseconds to the first token, layer-wise, by new tokens; empty: nothing is asked."""
    hidden_bars: frozenset[int] = frozenset()
    """Numbers of new tokens for which `HIDDEN_BAR` is asked."""


@dataclasses.dataclass(slots=True)
class _Times:
    """Seconds to the first token with one number of new tokens, a round after the other."""

    cached: list[float] = dataclasses.field(default_factory=list)
    bulk: list[float] = dataclasses.field(default_factory=list)
    layerwise: list[float] = dataclasses.field(default_factory=list)
    computed: list[float] = dataclasses.field(default_factory=list)

    def rounds(self) -> Iterator[tuple[float, float, float]]:
        """(cached, bulk, layer-wise) of each."""
        return zip(self.cached, self.bulk, self.layerwise, strict=True)


async def overlap(
    bench: OverlapBench, prefix_tokens: int, new: Sequence[int], repeats: int
) -> Outcome:
    """Measure each number of `new` tokens behind the prefix, in turns.

    Raises: `InterlaceError` if the prefix was not found where it should be. Cancelling stops after
    the run in progress.
    """
    work = bench.source.make(1, prefix_tokens, 1)
    times = {count: _Times() for count in new}
    with bench.progress.task("overlap", len(new) * (repeats + 1)) as advance:
        for arm in (bench.bulk, bench.layerwise):
            await arm.run(work)  # computed, and stored
        for round_number in range(repeats + 1):
            for count, taken in times.items():
                seen = taken if round_number else _Times()  # round 0 warms up
                await _one_round(bench, work, count, seen)
                advance(1)
    rows = tuple(_row(bench, count, taken) for count, taken in times.items())
    checks = [check for count, taken in times.items() for check in _checks(bench, count, taken)]
    return rows, tuple(checks)


async def _one_round(bench: OverlapBench, prefix: Work, count: int, taken: _Times) -> None:
    whole = prefix.prompt_tokens
    for arm, times in ((bench.bulk, taken.bulk), (bench.layerwise, taken.layerwise)):
        arm.forget()
        sample = await arm.run(_behind(bench, prefix, count))
        _require(sample.loaded_tokens, whole, "loaded")
        times.append(sample.first_token_s)
    sample = await bench.layerwise.run(_behind(bench, prefix, count))
    _require(sample.cached_tokens, whole, "cached on the device")
    taken.cached.append(sample.first_token_s)
    sample = await bench.layerwise.run(bench.source.make(1, whole + count, 1))
    taken.computed.append(sample.first_token_s)


def _behind(bench: OverlapBench, prefix: Work, count: int) -> Work:
    """The prefix and `count` tokens never seen before."""
    (first,), (suffix,) = prefix.prompts, bench.source.make(1, count, 1).prompts
    return Work(((*first, *suffix),), 1)


def _require(found: int, whole: int, what: str) -> None:
    if found < whole:
        raise InterlaceError(
            f"only {found} of {whole} tokens were {what}: choose a multiple of the block size, and"
            " give the KV pool and the host's records room for the whole prompt."
        )


def _row(bench: OverlapBench, count: int, taken: _Times) -> Row:
    load = Spread.of(bulk - cached for cached, bulk, _ in taken.rounds())
    figures: Figures = {
        "cached ms": _ms(taken.cached),
        "bulk ms": _ms(taken.bulk),
        "layer-wise ms": _ms(taken.layerwise),
        "computed ms": _ms(taken.computed),
        "load ms": _ms(load.samples),
        "load GB/s": Spread.of(
            bench.prefix_bytes / s / 1e9 if s > 0 else 0.0 for s in load.samples
        ),
        "hidden share": Spread.of(_hidden(taken)),
        "added, in loads": Spread.of(
            (layerwise - cached) / load.median if load.median > 0 else 0.0
            for cached, _, layerwise in taken.rounds()
        ),
    }
    return Row(f"{count} new", figures)


def _hidden(taken: _Times) -> list[float]:
    """Of each round, what layer-wise loading saves by the shorter of loading and computing."""
    shares = []
    for cached, bulk, layerwise in taken.rounds():
        least = min(bulk - cached, cached)
        shares.append((bulk - layerwise) / least if least > 0 else 0.0)
    return shares


def _checks(bench: OverlapBench, count: int, taken: _Times) -> Iterator[Check]:
    median = Spread.of(taken.layerwise).median
    if count in bench.first_token_bars:
        bar = bench.first_token_bars[count]
        yield Check(f"first token, layer-wise, {count} new, ms", median * 1e3, at_most=bar)
    if count in bench.hidden_bars:
        share = Spread.of(_hidden(taken)).median
        yield Check(f"hidden share, {count} new", share, at_least=HIDDEN_BAR)
    yield Check(f"layer-wise / bulk, {count} new", median / Spread.of(taken.bulk).median, at_most=1)


def _ms(seconds: Sequence[float]) -> Spread:
    return Spread.of(s * 1e3 for s in seconds)
