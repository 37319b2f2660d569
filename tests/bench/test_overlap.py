"""Loads that hide behind computing, on arms of a known speed, and once for real."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import pytest
from bench_kit import CountingProgress

from interlace.bench.overlap import OverlapBench, overlap
from interlace.bench.overlap_session import run_overlap
from interlace.bench.session import prepare
from interlace.bench.settings import Settings
from interlace.bench.timeline import Sample
from interlace.bench.workload import Work, WorkSource
from interlace.engine.clock import MonotonicClock
from interlace.engine.errors import InterlaceError
from interlace.layers.checkpoint.loading import Silent

LOAD_S = 0.020
TOKEN_S = 0.001


class StoringArm:
    """Computes a token in a millisecond, and loads whatever it has stored in 20.

    `hides`: it loads while it computes.
    """

    def __init__(self, *, hides: bool, stores: bool = True) -> None:
        self.name = "arm"
        self._hides = hides
        self._stores = stores
        self._stored: set[tuple[int, ...]] = set()
        self._cached: set[tuple[int, ...]] = set()
        self.num_runs = 0

    def forget(self) -> None:
        self._cached.clear()

    async def run(self, work: Work) -> Sample:
        self.num_runs += 1
        (prompt,) = work.prompts
        prefix = prompt[:32]
        cached = 32 if prefix in self._cached else 0
        loaded = 32 if not cached and prefix in self._stored else 0
        compute_s = TOKEN_S * (len(prompt) - cached - loaded)
        load_s = LOAD_S if loaded else 0.0
        taken = max(compute_s, load_s) if self._hides else compute_s + load_s
        self._cached.add(prefix)
        if self._stores:
            self._stored.add(prefix)
        return Sample(1, len(prompt), taken, 0.0, 0, 0, cached_tokens=cached, loaded_tokens=loaded)


def a_bench(*, stores: bool = True) -> OverlapBench:
    return OverlapBench(
        StoringArm(hides=False, stores=stores),  # type: ignore[arg-type]
        StoringArm(hides=True, stores=stores),  # type: ignore[arg-type]
        WorkSource(vocab_size=1000, seed=1),
        CountingProgress(),
        prefix_bytes=40_000_000,
        first_token_bars={10: 21.0, 30: 29.0},
        hidden_bars=frozenset({10}),
    )


async def test_what_hides_of_a_load() -> None:
    bench = a_bench()
    rows, checks = await overlap(bench, 32, [10, 30], 3)
    assert [row.case for row in rows] == ["10 new", "30 new"]
    figures = [{name: spread.median for name, spread in row.figures.items()} for row in rows]
    assert figures[0] == pytest.approx(
        {
            "cached ms": 10.0,
            "bulk ms": 30.0,
            "layer-wise ms": 20.0,
            "computed ms": 42.0,
            "load ms": 20.0,
            "load GB/s": 2.0,
            "hidden share": 1.0,
            "added, in loads": 0.5,
        }
    )
    assert figures[1]["layer-wise ms"] == pytest.approx(30.0)
    assert figures[1]["hidden share"] == pytest.approx(1.0)
    assert {check.name: check.met for check in checks} == {
        "first token, layer-wise, 10 new, ms": True,
        "hidden share, 10 new": True,
        "layer-wise / bulk, 10 new": True,
        "first token, layer-wise, 30 new, ms": False,
        "layer-wise / bulk, 30 new": True,
    }
    assert isinstance(bench.progress, CountingProgress)
    assert bench.progress.tasks == [("overlap", 8)]
    assert bench.progress.done == 8


async def test_a_prefix_that_was_not_stored_is_an_error() -> None:
    with pytest.raises(InterlaceError, match="only 0 of 32 tokens were loaded"):
        await overlap(a_bench(stores=False), 32, [10], 1)


async def test_with_real_engines(tmp_path: Path) -> None:
    """Figures come out, and what is claimed to be loaded was."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 500,
        "max_position_embeddings": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = Settings(f"dummy:{tmp_path}/config.json")
    with contextlib.closing(await asyncio.to_thread(prepare, settings, Silent())) as prepared:
        report = await run_overlap(prepared, 64, [16, 3], 1, MonotonicClock(), Silent())
    assert [row.case for row in report.rows] == ["16 new", "3 new"]
    for row in report.rows:
        assert row.figures["layer-wise ms"].median > 0
    assert report.settings["new"] == [16, 3]
