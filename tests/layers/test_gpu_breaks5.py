"""How the memory of a GPU's steps is measured: pretended GPUs, since none is needed."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import pytest
import torch
from tiny_model import tiny_model

from interlace.engine.errors import ConfigError
from interlace.layers.gpu import setup
from interlace.layers.gpu.graphs import GraphPool
from interlace.layers.gpu.inputs import InputBuffer, StepSize
from interlace.layers.gpu.setup import GpuLimits, measure_num_blocks, open_runner
from interlace.layers.graph_mode import GraphMode
from interlace.layers.kv_memory import PageShape
from interlace.layers.kv_pages import KVPages

GIB = 1 << 30
SHAPE = PageShape(2, 16, 2, 8, torch.float32)
LIMITS = GpuLimits(8, 64, GraphMode.FULL_AND_PIECEWISE)


class Allocator:
    """Torch's, as far as it matters: steps take what is cached, and graphs cannot."""

    def __init__(self) -> None:
        self.cached = 20 * GIB
        self.taken = 0
        self.most = 0

    @property
    def reserved(self) -> int:
        return self.cached + self.taken

    def step(self, num_bytes: int) -> None:
        """Takes memory, and gives it back to the cache."""
        self.cached = max(self.cached, num_bytes)
        self.most = max(self.most, self.taken + num_bytes)

    def graph(self, num_bytes: int) -> None:
        """Takes memory for good."""
        self.taken += num_bytes

    def empty_cache(self) -> None:
        self.cached = 0


class Runner:
    """Its largest step takes 3 GiB, and its graphs 2 GiB until it goes."""

    def __init__(self, memory: Allocator) -> None:
        self._memory = memory

    def run_padding(self) -> None:
        self._memory.step(3 * GIB)

    def capture(self, *_: object) -> None:
        self._memory.graph(2 * GIB)

    def close(self) -> None:
        """Graphs do not go with it."""


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    it = Allocator()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70 * GIB - it.reserved, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: it.reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: it.taken)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: it.most)
    monkeypatch.setattr(torch.cuda, "empty_cache", it.empty_cache)
    return it


def test_what_is_cached_does_not_hide_what_graphs_take(
    memory: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "open_runner", lambda *_: Runner(memory))
    num_blocks = measure_num_blocks(tiny_model().decoder, SHAPE, LIMITS, utilization=0.5)
    left = 40 * GIB - 10 * GIB - (3 + 2) * GIB - (256 << 20)
    assert num_blocks == left // SHAPE.block_bytes


def test_the_runner_that_was_measured_is_gone_before_its_memory_is_given_back(
    memory: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    runners: list[weakref.ref[Runner]] = []
    were_there: list[bool] = []

    def open_runner(*_: object) -> Runner:
        runner = Runner(memory)
        runners.append(weakref.ref(runner))
        return runner

    def empty_cache() -> None:
        were_there.append(any(runner() is not None for runner in runners))

    monkeypatch.setattr(setup, "open_runner", open_runner)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    measure_num_blocks(tiny_model().decoder, SHAPE, LIMITS, utilization=0.9)
    assert len(runners) == 1
    assert were_there[-1] is False


def test_no_memory_for_the_buffers_of_a_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties())
    monkeypatch.setattr(setup, "GpuRunner", make)
    pages = KVPages.of(SHAPE, num_blocks=2, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"for a step's buffers: lower gpu_memory_utilization"):
        open_runner(tiny_model().decoder, pages, (), [], LIMITS)


def test_no_memory_for_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine turns a `MemoryError` into one that names the settings."""

    def zeros(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(MemoryError, match="CUDA out of memory"):
        KVPages.of(SHAPE, num_blocks=2, device=torch.device("cuda"))


def test_a_capture_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the capture cannot be ended any more."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    nothing: Any = None
    inputs = InputBuffer(StepSize(8, 8), 8, torch.device("cpu"))
    pool = GraphPool(nothing, inputs, nothing, nobody=8, max_seq_len=128)
    pool._memory, pool._stream = nothing, nothing

    def work() -> None:
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        pool._graph(work, is_new=False)


class Properties:
    """Of a pretended GPU."""

    multi_processor_count = 4


class Graph:
    """One whose capture was given up by the driver."""

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert capture_error_mode == "global", "before the first step"

    def capture_end(self) -> None:
        raise RuntimeError("the capture was invalidated")
