"""Timelines of steps of a real GPU: eager, in pieces, and as one captured graph; and of prompts
from both ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import torch

import interlace
from interlace.bench.session import Prepared, prepare
from interlace.bench.settings import Settings
from interlace.bench.step_trace.device import (
    GATE_KERNEL,
    GATHER_KERNEL,
    NORM_KERNEL,
    RECORDS_KERNEL,
)
from interlace.bench.step_trace.figures import figures_of
from interlace.bench.step_trace.file import read_file, to_json
from interlace.bench.step_trace.parse import from_json
from interlace.bench.step_trace.session import record_timeline
from interlace.bench.step_trace.setup import TimelinePlan
from interlace.bench.step_trace.trace import HybridTrace, StepTrace
from interlace.connectors.pipeline.layer_groups import LayerGroups
from interlace.engine.clock import MonotonicClock
from interlace.layers.checkpoint.loading import Silent

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SECONDS = 240
NUM_LAYERS = 5
PREFIX = 4096
TOKEN_BYTES = 2 * 4 * 128 * 2
"""Of one layer."""
SLACK_NS = 20_000
"""By which the times of copies and of kernels may differ; a layer's load takes far longer."""
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": NUM_LAYERS,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 5000,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}

FAT_CONFIG = CONFIG | {
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
"""64 KiB of KV a token: 7,168 tokens take about as long to load as to compute."""
FAT_TOKEN_BYTES = 16 * 2 * 8 * 128 * 2


@contextlib.asynccontextmanager
async def prepared(
    folder: Path,
    mode: str,
    config: Mapping[str, object] = CONFIG,
    max_num_batched_tokens: int | None = None,
) -> AsyncIterator[Prepared]:
    (folder / "config.json").write_text(json.dumps(config))
    settings = Settings(
        f"dummy:{folder}/config.json",
        device="cuda",
        cudagraph_mode=mode,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    with contextlib.closing(await asyncio.to_thread(prepare, settings, Silent())) as ready:
        async with asyncio.timeout(SECONDS):
            yield ready


def check_lanes(trace: StepTrace) -> None:
    """Every layer is there, with its copies and its kernels, and no layer passed its gate early."""
    assert [span.layer for span in trace.load] == [*range(NUM_LAYERS)]
    assert [span.num_bytes for span in trace.load] == [
        trace.facts.loaded_tokens * TOKEN_BYTES
    ] * NUM_LAYERS
    for span in trace.load:
        assert span.pieces
        assert 0 < span.end_ns - span.begin_ns < 1e9
    layers = trace.compute[1:-1]
    names = [[piece.name for piece in span.pieces] for span in layers]
    assert [found.count(GATE_KERNEL) for found in names] == [1] * NUM_LAYERS
    assert [found[0] for found in names] == [GATE_KERNEL] * NUM_LAYERS
    assert names[1] == names[2], "layers are alike, but for what is worked out once"
    assert trace.compute[-1].pieces[0].name == NORM_KERNEL, "the head begins with the last norm"
    for layer, span in enumerate(layers):
        last = LayerGroups(NUM_LAYERS, trace.facts.group_size).last_beside(layer)
        assert span.pieces[0].begin_ns > trace.load[last].end_ns - SLACK_NS


@pytest.mark.parametrize(
    ("mode", "new_tokens"),
    [
        ("NONE", 300),
        ("PIECEWISE", 700),
        ("FULL_AND_PIECEWISE", 16),
        ("FULL_AND_PIECEWISE", 300),
        ("FULL_AND_PIECEWISE", 700),
    ],
)
async def test_layers_are_told_apart(mode: str, new_tokens: int, tmp_path: Path) -> None:
    plan = TimelinePlan(PREFIX, new_tokens, repeats=2, group_size=2)
    async with prepared(tmp_path, mode) as ready:
        report, trace = await record_timeline(ready, plan, MonotonicClock(), Silent())
    assert isinstance(trace, StepTrace)
    check_lanes(trace)
    assert trace.facts.clock == "device"
    assert trace.facts.machine == torch.cuda.get_device_name(0)
    figures = figures_of(trace)
    assert 1 < figures.load_gb_per_s < 500
    assert 0 < figures.total_s < 5
    assert 0 < figures.compute_s <= figures.total_s
    assert len(report.rows[0].figures["total ms"].samples) == 2
    assert to_json(from_json(to_json(trace))) == to_json(trace), "but for the length of names"


async def test_gates_of_one_layer(tmp_path: Path) -> None:
    """Each layer passes its gate behind its own load, which `check_lanes` sees, and waits for that
    alone. How many have to wait at all depends on how long the step takes to prepare."""
    plan = TimelinePlan(7168, 1, repeats=2, group_size=1)
    async with prepared(tmp_path, "FULL_AND_PIECEWISE") as ready:
        _, trace = await record_timeline(ready, plan, MonotonicClock(), Silent())
    assert isinstance(trace, StepTrace)
    assert trace.facts.group_size == 1
    check_lanes(trace)
    for load, span in zip(trace.load, trace.compute[1:-1], strict=True):
        assert span.wait is None or span.wait.end_ns <= load.end_ns
        if load.end_ns < span.begin_ns:
            assert span.wait is None, "its own layer was there"
        elif load.end_ns > span.begin_ns + SLACK_NS:
            assert span.wait is not None, "its own layer was not there"


def check_both_ends(trace: HybridTrace) -> None:
    """Each step has all layers, each slice its copies, and the last step comes behind the load."""
    facts = trace.facts
    assert facts.front_tokens >= 16 <= facts.loaded_tokens, "a block at least from each side"
    num_bytes = sum(span.num_bytes for span in trace.load)
    assert num_bytes == facts.loaded_tokens * FAT_TOKEN_BYTES
    for span in trace.load:
        assert span.pieces, span.label
        assert 0 < span.end_ns - span.begin_ns < 1e9
    per_step = trace.num_layers + 2
    steps = [trace.compute[i : i + per_step] for i in range(0, len(trace.compute), per_step)]
    assert len(steps) == len(facts.steps) >= 2
    for embed, *layers, head in steps:
        assert embed.pieces, "its inputs were uploaded, at least"
        names = [[piece.name for piece in span.pieces] for span in layers]
        assert [found.count(GATE_KERNEL) for found in names] == [1] * len(layers)
        assert [found[0] for found in names] == [GATE_KERNEL] * len(layers)
        assert not head.pieces or head.pieces[0].name == NORM_KERNEL
        assert all(span.wait is None for span in layers)
    last_step = steps[-1]
    assert last_step[-1].pieces, "it samples"
    assert last_step[0].begin_ns > trace.load[-1].end_ns - SLACK_NS


@pytest.mark.parametrize(
    ("mode", "prefix", "new_tokens", "max_step_tokens"),
    [
        ("NONE", 7168, 300, 1024),
        ("PIECEWISE", 7168, 700, None),
        ("FULL_AND_PIECEWISE", 7168, 16, None),
        ("FULL_AND_PIECEWISE", 7168, 16, 1024),
        ("FULL_AND_PIECEWISE", 7168, 16, 256),
        ("FULL_AND_PIECEWISE", 128, 16, None),
    ],
)
async def test_both_ends(
    mode: str, prefix: int, new_tokens: int, max_step_tokens: int | None, tmp_path: Path
) -> None:
    """Short prompts are runs so short that a kernel copies them."""
    plan = TimelinePlan(prefix, new_tokens, repeats=3, load_mode="hybrid")
    async with prepared(tmp_path, mode, FAT_CONFIG, max_step_tokens) as ready:
        report, trace = await record_timeline(ready, plan, MonotonicClock(), Silent())
    assert isinstance(trace, HybridTrace)
    check_both_ends(trace)
    facts, figures = trace.facts, figures_of(trace)
    assert facts.clock == "device"
    assert facts.front_tokens + facts.loaded_tokens == prefix
    names = {piece.name for span in trace.load for piece in span.pieces}
    if prefix == 128:
        assert all(
            name in (RECORDS_KERNEL, GATHER_KERNEL) or name.startswith("Memcpy HtoD")
            for name in names
        )
    else:
        assert all(name.startswith("Memcpy HtoD") for name in names)
        assert figures.both_s > 0
        assert 1 < figures.load_gb_per_s < 500
    assert 0 < figures.compute_s <= figures.total_s < 5
    assert len(report.rows[0].figures["total ms"].samples) == 3
    assert to_json(from_json(to_json(trace))) == to_json(trace), "but for the length of names"


def run_command(*arguments: str) -> str:
    source = str(Path(interlace.__file__).parent.parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([source, *sys.path])}
    done = subprocess.run(
        [sys.executable, "-m", "interlace", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    target = tmp_path / "step.json"
    options = ["--prompt-tokens", str(PREFIX), "--new", "300", "--repeats", "2"]
    model = f"dummy:{tmp_path}/config.json"
    out = run_command("bench", "timeline", "--model", model, *options, "--trace", str(target))
    assert "4,096 tokens loaded, 300 computed" in out
    trace = read_file(target)
    assert isinstance(trace, StepTrace)
    check_lanes(trace)
    shown = run_command("trace", str(target))
    assert shown.splitlines()[-3].startswith("compute")


def test_the_command_from_both_ends(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FAT_CONFIG))
    target = tmp_path / "both.json"
    options = ["--prompt-tokens", "7168", "--new", "16", "--repeats", "2", "--load-mode", "hybrid"]
    model = f"dummy:{tmp_path}/config.json"
    out = run_command("bench", "timeline", "--model", model, *options, "--trace", str(target))
    assert "7,168 tokens from both ends, 16 behind them" in out
    trace = read_file(target)
    assert isinstance(trace, HybridTrace)
    check_both_ends(trace)
    shown = run_command("trace", str(target))
    assert f"at block {trace.facts.meeting_block} of 448" in shown
