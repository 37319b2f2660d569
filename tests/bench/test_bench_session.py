"""A whole benchmark on real engines and real transformers, with a model of a few kilobytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers

from interlace.bench import experiments, hits, kv_experiments, limits
from interlace.bench.arms import Grid
from interlace.bench.kv_session import run_kv_benchmark
from interlace.bench.session import Prepared, prepare, run_benchmark
from interlace.bench.settings import Settings
from interlace.engine.clock import MonotonicClock
from interlace.layers.checkpoint.loading import Silent


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A checkpoint of a tiny random model."""
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.fixture
def alone(folder: str) -> Iterator[Prepared]:
    with contextlib.closing(prepare(Settings(folder), Silent())) as prepared:
        yield prepared


@pytest.fixture
def compared(folder: str) -> Iterator[Prepared]:
    with contextlib.closing(
        prepare(Settings(folder, (1, 2), against_transformers=True), Silent())
    ) as both:
        yield both


async def test_arms_share_one_model_and_report_every_case(compared: Prepared) -> None:
    report = await run_benchmark(
        "decode",
        compared,
        lambda bench: experiments.decode(bench, Grid([1, 3], [20], 6, 2)),
        MonotonicClock(),
        Silent(),
        {"repeats": 2},
    )
    assert [row.case for row in report.rows] == [
        "interlace, 1 in flight, batch 1",
        "interlace, 2 in flight, batch 1",
        "transformers, batch 1",
        "interlace, 1 in flight, batch 3",
        "interlace, 2 in flight, batch 3",
    ]
    assert all(row.figures["tokens/s"].low > 0 for row in report.rows)
    assert len(report.checks) == 5
    assert report.settings == {
        "model": compared.settings.model,
        "device": "cpu",
        "dtype": "float32",
        "repeats": 2,
    }
    assert report.limits == {}
    assert report.machine["torch_threads"]


async def test_a_prompt_sent_twice_hits(alone: Prepared) -> None:
    report = await run_benchmark(
        "hit",
        alone,
        lambda bench: hits.hit(bench, 100, 2),
        MonotonicClock(),
        Silent(),
        {},
    )
    assert report.rows[0].figures["cached tokens"].samples == (99, 99)


async def test_a_cached_prefix_and_new_tokens_of_a_dummy_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ON_CPU", limits.Extent(1 << 16, 32, calls=1))
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 96,
        "max_position_embeddings": 256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = Settings(f"dummy:{tmp_path}/config.json", dtype="bfloat16", measure_limits=True)
    prepared = await asyncio.to_thread(prepare, settings, Silent())
    with contextlib.closing(prepared):
        report = await run_benchmark(
            "hit",
            prepared,
            lambda bench: hits.hit_with_new(bench, 64, [16, 40], 2),
            MonotonicClock(),
            Silent(),
            {},
        )
    assert [row.case for row in report.rows] == [
        "interlace, 64 cached + 16 new",
        "interlace, 64 cached + 40 new",
    ]
    assert all(row.figures["cached tokens"].median == 64 for row in report.rows)
    assert all(row.figures["of limit"].low > 0 for row in report.rows)
    assert set(report.limits) == {"read GB/s", "matrix TFLOP/s"}
    assert report.settings["dtype"] == "bfloat16"
    assert report.notes == ()


async def test_kv_is_saved_and_loaded_by_real_engines(
    alone: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SAVING_BAR", "IDLE_BAR"):
        monkeypatch.setattr(kv_experiments, name, 1e9)  # no pair more for the sake of noise
    for name, few in (("IDLE_OUTPUT_TOKENS", 3), ("SAVED_OUTPUT_TOKENS", 3), ("SAVED_PAIRS", 2)):
        monkeypatch.setattr(kv_experiments, name, few)
    kept = tmp_path / "kv"
    await asyncio.to_thread(kept.mkdir)
    report = await run_kv_benchmark(alone, kept, (64, 1), MonotonicClock(), Silent())
    assert [row.case for row in report.rows] == [
        "computed",
        "loaded, sync",
        "loaded, async",
        "prefill",
        "prefill, saving",
        "decode",
        "decode, idle connector",
        "long decode",
        "long decode, saving",
    ]
    assert all(row.figures["loaded tokens"].median >= 48 for row in report.rows[1:3])
    assert len(report.checks) == 6
    assert await asyncio.to_thread(os.listdir, kept) == []
