"""The union of intervals, and torch's profiler around a run, on a CPU."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interlace.bench import device_idle
from interlace.bench.device_idle import KernelTracer, busy_at_the_end, busy_s
from interlace.engine.device_thread import DeviceThread

interval = st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda p: (p[0], p[0] + p[1]))


@pytest.fixture
def device() -> Iterator[DeviceThread]:
    with contextlib.closing(DeviceThread("test-device")) as thread:
        yield thread


@given(st.lists(interval, max_size=8), st.integers(0, 40), st.integers(0, 40))
def test_the_union_counts_every_second_once(
    intervals: list[tuple[int, int]], begin: int, length: int
) -> None:
    end = begin + length
    covered = {t for start, stop in intervals for t in range(start, stop) if begin <= t < end}
    assert busy_s(intervals, begin, end) == len(covered)


def test_the_window_ends_with_the_last_kernel() -> None:
    kernels = [(0.0, 4.0), (5.0, 6.0), (5.5, 8.0), (9.0, 10.0)]
    assert busy_at_the_end(kernels, 2.0) == 1.0
    assert busy_at_the_end(kernels, 7.0) == 1.0 + 3.0 + 1.0
    assert busy_at_the_end(kernels, 100.0) == 4.0 + 3.0 + 1.0


async def test_what_runs_on_the_device_thread_is_traced(device: DeviceThread) -> None:
    tracer = KernelTracer(device, "cpu")

    def multiply() -> float:
        matrix = torch.ones(64, 64)
        return float((matrix @ matrix).sum())

    async def run() -> float:
        return await device.submit(multiply)

    outcome, kernels = await tracer.trace(run)
    assert outcome == 64.0**3
    assert tracer.problem is None
    assert kernels
    assert all(0 <= end - begin < 10 for begin, end in kernels)
    assert 0 < busy_at_the_end(kernels, 60.0) < 10


async def test_a_run_without_kernels_says_so(device: DeviceThread) -> None:
    tracer = KernelTracer(device, "cpu")

    async def run() -> int:
        return 3

    assert await tracer.trace(run) == (3, ())
    assert tracer.problem == "the profiler saw no kernel"


async def test_a_profiler_that_cannot_start_costs_no_more_than_its_figures(
    device: DeviceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: KernelTracer) -> None:
        raise RuntimeError("CUPTI is busy")

    monkeypatch.setattr(device_idle.KernelTracer, "_start", broken)
    tracer = KernelTracer(device)

    async def run() -> int:
        return 3

    assert await tracer.trace(run) == (3, ())
    assert tracer.problem is not None
    assert "CUPTI is busy" in tracer.problem


async def test_the_profiler_ends_when_the_run_fails(device: DeviceThread) -> None:
    tracer = KernelTracer(device, "cpu")

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("mine")

    for _ in range(2):  # a profiler still on would not let another one start
        with pytest.raises(ValueError, match="mine"):
            await tracer.trace(fail)
    assert tracer.problem is None


async def test_the_profiler_ends_before_a_cancelled_caller_is_told(device: DeviceThread) -> None:
    tracer = KernelTracer(device, "cpu")
    running = asyncio.Event()

    async def hang() -> None:
        running.set()
        await asyncio.sleep(60)

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        for early in (True, False):
            task = group.create_task(tracer.trace(hang))
            await (asyncio.sleep(0) if early else running.wait())
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            running.clear()
    _, kernels = await tracer.trace(lambda: device.submit(torch.ones, 3))
    assert kernels
