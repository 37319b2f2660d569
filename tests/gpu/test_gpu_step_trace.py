"""Timelines of steps of a real GPU: eager, in pieces, and as one captured graph."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

import interlace
from interlace.bench.session import Prepared, prepare
from interlace.bench.settings import Settings
from interlace.bench.step_trace.device import GATE_KERNEL, NORM_KERNEL
from interlace.bench.step_trace.figures import figures_of
from interlace.bench.step_trace.file import read_file, to_json
from interlace.bench.step_trace.parse import from_json
from interlace.bench.step_trace.session import record_timeline
from interlace.bench.step_trace.setup import TimelinePlan
from interlace.bench.step_trace.trace import StepTrace
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


@contextlib.asynccontextmanager
async def prepared(folder: Path, mode: str) -> AsyncIterator[Prepared]:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    settings = Settings(f"dummy:{folder}/config.json", device="cuda", cudagraph_mode=mode)
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
    """With one new token a step is so short that it has to wait."""
    plan = TimelinePlan(7168, 1, repeats=2, group_size=1)
    async with prepared(tmp_path, "FULL_AND_PIECEWISE") as ready:
        _, trace = await record_timeline(ready, plan, MonotonicClock(), Silent())
    check_lanes(trace)
    assert figures_of(trace).num_waits >= 2


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    target = tmp_path / "step.json"
    source = str(Path(interlace.__file__).parent.parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([source, *sys.path])}

    def run(*arguments: str) -> str:
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

    options = ["--prompt-tokens", str(PREFIX), "--new", "300", "--repeats", "2"]
    model = f"dummy:{tmp_path}/config.json"
    out = run("bench", "timeline", "--model", model, *options, "--trace", str(target))
    assert "4,096 tokens loaded, 300 computed" in out
    check_lanes(read_file(target))
    shown = run("trace", str(target))
    assert shown.splitlines()[-3].startswith("compute")
