"""What is decided and refused before a GPU computes: pretended GPUs, since none is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import tiny_model

from interlace.engine.errors import ConfigError
from interlace.layers.checkpoint.loading import Silent
from interlace.layers.gpu import setup
from interlace.layers.gpu.graphs import GraphPool, GraphSizes
from interlace.layers.gpu.inputs import InputBuffer, StepSize
from interlace.layers.gpu.setup import GpuLimits, check_gpu, measure_num_blocks
from interlace.layers.graph_mode import GraphMode
from interlace.layers.hardware.fact import Unknown
from interlace.layers.kv_memory import PageShape

CPU = torch.device("cpu")
SHAPE = PageShape(2, 16, 2, 8, torch.float32)


@pytest.fixture(autouse=True)
def _a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Pretence 9000")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for name in ("memory_reserved", "memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 0)
    for name in ("reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(setup, "HAS_TRITON", True)
    monkeypatch.setattr(setup, "c_compiler", lambda: "/usr/bin/gcc")


def test_a_gpu_that_will_do() -> None:
    for head_dim in (64, 80, 96, 128, 256):
        check_gpu(CPU, head_dim)


@pytest.mark.parametrize("head_dim", [4, 12, 264, 512])
def test_heads_that_no_kernel_takes(head_dim: int) -> None:
    with pytest.raises(ConfigError, match=f"heads of {head_dim} numbers .* use device='cpu'"):
        check_gpu(CPU, head_dim)


@pytest.mark.parametrize("capability", [(7, 5), (6, 1)])
def test_a_gpu_that_is_too_old(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with pytest.raises(ConfigError, match=r"Pretence 9000 .* at least 8\.0 .* use device='cpu'"):
        check_gpu(CPU, 64)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("HAS_TRITON", False, "pip install triton"),
        ("c_compiler", lambda: Unknown("gcc is not installed"), "gcc is not installed.*apt"),
    ],
)
def test_nothing_to_compile_kernels_with(
    name: str, value: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, name, value)
    with pytest.raises(ConfigError, match=message):
        check_gpu(CPU, 64)


def test_a_driver_that_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    from interlace.layers.checkpoint import load_checkpoint

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old")

    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(ConfigError, match="driver on your system is too old; use 'cpu'"):
        load_checkpoint("dummy:qwen3-0.6b", device="cuda")


class _Runner:
    """Stands for a runner whose step and graphs take what they take."""

    def __init__(self, *, step: BaseException | None = None) -> None:
        self._step = step
        self.is_closed = False

    def run_padding(self) -> None:
        if self._step is not None:
            raise self._step

    def capture(self, *_: object) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


def _measure(runner: _Runner, monkeypatch: pytest.MonkeyPatch, utilization: float) -> int:
    monkeypatch.setattr(setup, "open_runner", lambda *_: runner)
    limits = GpuLimits(8, 64, GraphMode.FULL_AND_PIECEWISE)
    return measure_num_blocks(tiny_model().decoder, SHAPE, limits, utilization=utilization)


def test_the_pool_is_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = _Runner()
    num_blocks = _measure(runner, monkeypatch, 0.5)
    assert num_blocks == int((0.5 * (80 << 30) - (10 << 30) - (256 << 20)) // SHAPE.block_bytes)
    assert runner.is_closed


def test_a_pool_that_cannot_hold_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"raise gpu_memory_utilization, or lower max_model_len"):
        _measure(_Runner(), monkeypatch, 0.1)


def test_a_step_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = _Runner(step=torch.OutOfMemoryError("no"))
    with pytest.raises(ConfigError, match=r"a step of 64 tokens .* lower max_num_batched_tokens"):
        _measure(runner, monkeypatch, 0.5)
    assert runner.is_closed


def test_no_memory_for_graphs() -> None:
    def make_room(num_tokens: int, num_requests: int) -> Any:
        raise torch.OutOfMemoryError("no")

    forward: Any = None
    inputs = InputBuffer(StepSize(8, 8), 8, CPU)
    pool = GraphPool(forward, inputs, make_room, nobody=8, max_seq_len=128)
    with pytest.raises(ConfigError, match=r"lower gpu_memory_utilization.* cudagraph_mode='NONE'"):
        pool.capture(GraphMode.FULL, GraphSizes(decode=(1, 8)), Silent())


@given(
    max_num_seqs=st.integers(1, 2000),
    max_num_batched_tokens=st.integers(1, 20_000),
)
def test_captured_steps_fit_into_the_largest(
    max_num_seqs: int, max_num_batched_tokens: int
) -> None:
    limits = GpuLimits(max_num_seqs, max_num_batched_tokens, GraphMode.FULL_AND_PIECEWISE)
    sizes, largest = limits.sizes, limits.largest
    for kind, most in (
        (sizes.decode, min(max_num_seqs, 512)),
        (sizes.mixed, 2048),
        (sizes.chunk, 8192),
    ):
        assert list(kind) == sorted(set(kind))
        assert all(1 <= size <= min(most, max_num_batched_tokens) for size in kind)
    assert sizes.decode[-1] == min(max_num_seqs, max_num_batched_tokens, 512)
    assert [*largest.decode, *largest.mixed, *largest.chunk] == [
        kind[-1] for kind in (sizes.decode, sizes.mixed, sizes.chunk) if kind
    ]
