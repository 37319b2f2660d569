"""An arm of a known speed that stores prefixes, and settings for `interlace bench overlap`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from bench_kit import CountingProgress, tiny_dummy

from interlace.bench.bars import NO_OVERLAP_BARS, OverlapBars
from interlace.bench.overlap.arms import Hit
from interlace.bench.overlap.meter import LoadTimes
from interlace.bench.overlap.rig import Setting
from interlace.bench.overlap.sizes import Sizes
from interlace.bench.session import Prepared, prepare
from interlace.bench.settings import Settings
from interlace.bench.timeline import Sample
from interlace.bench.workload import Work, WorkSource
from interlace.connectors.pipeline.options import LoadMode
from interlace.layers.checkpoint.loading import Silent

LOAD_S = 0.020
TOKEN_S = 0.001
HOST_S = 0.002
PREFIX = 32
TOKEN_BYTES = 1_000_000

SMALL = Sizes(
    128,
    (16, 3),
    1,
    most_new=32,
    num_decoders=2,
    decoder_prompt=16,
    decoder_tokens=400,
    settle_steps=2,
    short_hit=64,
    hits_a_round=1,
    beside_loads=2,
    arrivals=2,
    arrivals_per_s=20.0,
    pair_tokens=5,
    host_steps=10,
    lives=20,
)
"""For a tiny model on a CPU: every part takes about a second, or less."""


@contextlib.contextmanager
def tiny_prepared(folder: Path) -> Iterator[Prepared]:
    """A tiny model on the CPU; its configuration is written to `folder`."""
    settings = Settings(tiny_dummy(folder))
    with contextlib.closing(prepare(settings, Silent())) as found:
        yield found


class StoringArm:
    """Computes a token in a millisecond, and loads a prefix of 32 tokens, if it has stored it, in
    20; the host adds two to each request. A hybrid load takes as long as one in bulk."""

    link_bytes_per_s = 2.0 * PREFIX * TOKEN_BYTES / LOAD_S

    def __init__(
        self, *, stores: bool = True, auto: LoadMode = "layerwise", load_s: float = LOAD_S
    ) -> None:
        self._stores = stores
        self._auto = auto
        self._load_s = load_s
        self._slowdown = 1
        self._stored: set[tuple[int, ...]] = set()
        self._cached: set[tuple[int, ...]] = set()
        self.runs: list[tuple[LoadMode, int]] = []

    def forget(self) -> None:
        self._cached.clear()

    async def keep(self, prefix: Work) -> None:
        await self.run(prefix)

    def slow_down(self, times: int) -> None:
        self._slowdown = times

    async def run(self, work: Work, mode: LoadMode = "auto") -> Hit:
        (prompt,) = work.prompts
        self.runs.append((mode, len(prompt)))
        way = self._auto if mode == "auto" else mode
        prefix = prompt[:PREFIX]
        cached = PREFIX if prefix in self._cached else 0
        may_load = not cached and prefix in self._stored and way != "recompute"
        loaded = PREFIX if may_load else 0
        compute_s = TOKEN_S * (len(prompt) - cached - loaded)
        load_s = self._load_s * self._slowdown if loaded else 0.0
        device_s = max(compute_s, load_s) if way == "layerwise" else compute_s + load_s
        self._cached.add(prefix)
        if self._stores:
            self._stored.add(prefix)
        sample = Sample(
            1,
            len(prompt),
            device_s + HOST_S,
            0.0,
            0,
            0,
            cached_tokens=cached,
            loaded_tokens=loaded,
        )
        load = LoadTimes(loaded * TOKEN_BYTES, load_s, 0.0005, 4, 2)
        predicted_s = self.balanced_s(load_s, compute_s) if way == "hybrid" else None
        return Hit(sample, device_s, (load,) if loaded else (), predicted_s)

    @staticmethod
    def balanced_s(load_s: float, rest_s: float) -> float:
        """Loading and computing the prefix at a time, and then the rest."""
        compute_s = TOKEN_S * PREFIX
        return load_s * compute_s / (load_s + compute_s) + rest_s


def setting(
    *, bars: OverlapBars = NO_OVERLAP_BARS, new: tuple[int, ...] = (10, 30), repeats: int = 3
) -> Setting:
    """For `StoringArm`."""
    return Setting(
        WorkSource(vocab_size=1000, seed=1),
        CountingProgress(),
        Sizes(PREFIX, new, repeats),
        bars,
        TOKEN_BYTES,
    )
