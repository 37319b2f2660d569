"""`interlace bench` on a real GPU: limits, traced kernels, and whole runs with a small model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import interlace
from interlace.bench.device_idle import KernelTracer, busy_at_the_end
from interlace.bench.limits import Extent, measure_limits
from interlace.engine.device_thread import DeviceThread

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SECONDS = 240
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 5000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


@pytest.fixture
def device() -> Iterator[DeviceThread]:
    with contextlib.closing(DeviceThread("test-device")) as thread:
        yield thread


def bench(tmp_path: Path, *arguments: str) -> Any:
    """The report of one command, run in a process of its own."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    target = tmp_path / "report.json"
    source = str(Path(interlace.__file__).parent.parent)
    command = [sys.executable, "-m", "interlace", "bench", *arguments, "--json", str(target)]
    done = subprocess.run(
        [*command, "--model", f"dummy:{tmp_path}/config.json"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([source, *sys.path])},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(target.read_text())


def check_gpu(report: Any) -> None:
    """The machine is this GPU, its limits are a GPU's, and kernels were seen in every row."""
    assert report["notes"] == []
    assert report["settings"]["device"] == "cuda"
    assert report["settings"]["dtype"] == "bfloat16"
    assert report["settings"]["max_model_len"] == CONFIG["max_position_embeddings"]
    machine = report["machine"]
    assert machine["gpu"] == torch.cuda.get_device_name(0)
    assert machine["cuda"] == torch.version.cuda
    assert isinstance(machine["driver"], str)
    assert isinstance(machine["max_sm_mhz"], int)
    assert 50 < report["limits"]["read GB/s"]["median"] < 20_000
    assert 5 < report["limits"]["matrix TFLOP/s"]["median"] < 5_000
    for row in report["rows"]:
        assert row["figures"]["kernels ms"]["median"] > 0
        assert -1e-6 < row["figures"]["no kernel"]["median"] < 1


def test_limits_are_a_gpu_s_and_their_memory_is_given_back() -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    cuda = torch.device("cuda")
    limits = measure_limits(cuda, torch.bfloat16, Extent(1 << 30, 4096, calls=4))
    assert 5e10 < limits.bytes_per_s.median < 2e13
    assert 5e12 < limits.flops_per_s.median < 5e15
    assert torch.cuda.memory_allocated() - before < 256 << 20  # but for the library's workspace


async def test_kernels_are_traced_and_waiting_is_not(device: DeviceThread) -> None:
    def work() -> None:
        torch.cuda._sleep(10_000_000)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()

    async def run() -> None:
        for _ in range(3):
            await device.submit(work)
            await asyncio.sleep(0.05)

    await device.submit(work)
    tracer = KernelTracer(device)
    _, kernels = await asyncio.wait_for(tracer.trace(run), SECONDS)
    assert tracer.problem is None
    assert len(kernels) == 3
    span = max(end for _, end in kernels) - min(begin for begin, _ in kernels)
    assert span > 0.1
    assert 0.001 < busy_at_the_end(kernels, span) < span - 0.08


async def test_kernels_of_a_graph_that_was_captured_before_are_traced(
    device: DeviceThread,
) -> None:
    matrix = torch.zeros(256, 256, device="cuda")

    def capture() -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        matrix.add_(1)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(5):
                matrix.add_(1)
        return graph

    graph = await device.submit(capture)

    async def run() -> None:
        await device.submit(graph.replay)

    tracer = KernelTracer(device)
    for _ in range(2):  # a profiler that has ended can be followed by another
        _, kernels = await asyncio.wait_for(tracer.trace(run), SECONDS)
        assert tracer.problem is None
        assert len(kernels) == 5


def test_decode(tmp_path: Path) -> None:
    report = bench(tmp_path, "decode", "--batch", "1,4", "--context", "50,200", "--repeats", "2")
    check_gpu(report)
    assert len(report["rows"]) == 4
    for row in report["rows"]:
        assert 0 < row["figures"]["of memory limit"]["median"] < 1.5
        assert row["figures"]["median step ms"]["median"] > 0
    # No bar: these are for models and a machine that are named.
    assert [check["name"] for check in report["checks"]] == ["worst event-loop lag, ms"]


def test_prefill_without_graphs(tmp_path: Path) -> None:
    arguments = ["prefill", "--context", "2048", "--repeats", "2", "--cudagraph-mode", "NONE"]
    report = bench(tmp_path, *arguments)
    check_gpu(report)
    assert report["settings"]["cudagraph_mode"] == "NONE"
    assert 0 < report["rows"][0]["figures"]["of matrix limit"]["median"] < 1.5


def test_hit_with_two_engines_that_share_the_memory(tmp_path: Path) -> None:
    arguments = ["hit", "--prompt-tokens", "2048", "--new", "16,600", "--repeats", "2"]
    report = bench(tmp_path, *arguments, "--max-inflight-steps", "1,2")
    check_gpu(report)
    assert [row["case"] for row in report["rows"]] == [
        f"interlace, {depth} in flight, 2048 cached + {new} new"
        for depth in (1, 2)
        for new in (16, 600)
    ]
    for row in report["rows"]:
        assert row["figures"]["cached tokens"]["low"] == 2048
        assert 0 < row["figures"]["of limit"]["median"] < 1.5


def test_a_prompt_that_was_sent_before(tmp_path: Path) -> None:
    report = bench(tmp_path, "hit", "--prompt-tokens", "1000", "--repeats", "2")
    assert report["rows"][0]["figures"]["cached tokens"]["low"] >= 1000 - 16
    bars = [check["at_most"] for check in report["checks"]]
    assert bars == [None, 20.0]  # that of decode steps is for a CPU
