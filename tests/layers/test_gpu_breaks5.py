"""How the memory of a GPU's steps is measured: pretended GPUs, since none is needed."""

from __future__ import annotations

import weakref

import pytest
import torch
from tiny_model import tiny_model

from interlace.engine.errors import ConfigError
from interlace.layers.gpu import setup
from interlace.layers.gpu.setup import GpuLimits, measure_num_blocks
from interlace.layers.graph_mode import GraphMode
from interlace.layers.kv_memory import PageShape

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


def test_no_memory_for_the_buffers_of_a_runner(
    memory: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_runner(*_: object) -> Runner:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(setup, "open_runner", open_runner)
    with pytest.raises(ConfigError, match=r"a step of 64 tokens .* lower max_num_batched_tokens"):
        measure_num_blocks(tiny_model().decoder, SHAPE, LIMITS, utilization=0.5)
