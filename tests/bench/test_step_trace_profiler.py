"""What is read from torch's profiler, and that it ends whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from step_trace_kit import SHAPE

from interlace.bench.step_trace.build import StepMarks
from interlace.bench.step_trace.device import DeviceEvent, marks_of
from interlace.bench.step_trace.profiler import ProfiledSteps, read_events
from interlace.engine.device_thread import DeviceThread
from interlace.engine.errors import InterlaceError

HOST = {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 1.0, "dur": 2.0}
KERNEL = {
    "ph": "X",
    "cat": "kernel",
    "name": "rope_write_kernel",
    "pid": 0,
    "tid": 7,
    "ts": 5264831723.123,
    "dur": 3.25,
    "args": {"device": 0, "context": 1, "stream": 7, "correlation": 9, "graph node id": 4},
}
COPY = {
    "ph": "X",
    "cat": "gpu_memcpy",
    "name": "Memcpy HtoD (Pinned -> Device)",
    "ts": 5264831700.0,
    "dur": 610.5,
    "args": {"stream": 20, "bytes": 33554432, "memory bandwidth (GB/s)": 54.9},
}
BACK = COPY | {"name": "Memcpy DtoH (Device -> Pinned)"}


def test_streams_kinds_and_bytes() -> None:
    meta = {"ph": "M", "name": "process_name", "args": {"name": "python"}}
    text = json.dumps({"traceEvents": [meta, HOST, KERNEL, COPY, BACK, {"ph": "s", "id": 3}]})
    kernel, copy, back = read_events(text)
    assert kernel == DeviceEvent(
        "kernel", "rope_write_kernel", 7, 5264831723123, 5264831726373, None
    )
    name = "Memcpy HtoD (Pinned -> Device)"
    assert copy == DeviceEvent("to_device", name, 20, 5264831700000, 5264832310500, 33554432)
    assert back.kind == "other"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"traceEvents": [3]}', json.dumps({"traceEvents": [KERNEL | {"args": {}}]})],
)
def test_another_format_is_an_error(text: str) -> None:
    with pytest.raises(InterlaceError, match="is not understood"):
        list(read_events(text))


@pytest.fixture
def device() -> Iterator[DeviceThread]:
    with contextlib.closing(DeviceThread("test-device")) as thread:
        yield thread


def read(events: Sequence[DeviceEvent]) -> StepMarks:
    return marks_of(events, SHAPE)


def cpu_profiler() -> Any:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


async def test_a_real_profiler_is_read(device: DeviceThread) -> None:
    """One of a CPU, so it sees no work of GPUs, which is said."""
    steps = ProfiledSteps(device, read, cpu_profiler)
    with pytest.raises(InterlaceError, match="0 kernels rope_write_kernel"):
        await steps.record(lambda: device.submit(lambda: torch.ones(3).sum()))


async def test_the_profiler_ends_when_the_run_fails(device: DeviceThread) -> None:
    steps = ProfiledSteps(device, read, cpu_profiler)

    async def fail() -> None:
        raise ValueError("mine")

    for _ in range(2):  # a profiler still on would not let another one start
        with pytest.raises(ValueError, match="mine"):
            await steps.record(fail)


async def test_the_profiler_ends_before_a_cancelled_caller_is_told(device: DeviceThread) -> None:
    steps = ProfiledSteps(device, read, cpu_profiler)
    running = asyncio.Event()

    async def hang() -> None:
        running.set()
        await asyncio.sleep(60)

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        for early in (True, False):
            task = group.create_task(steps.record(hang))
            await (asyncio.sleep(0) if early else running.wait())
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            running.clear()


async def test_a_profiler_that_does_not_start(device: DeviceThread) -> None:
    class Broken:
        def start(self) -> None:
            raise RuntimeError("CUPTI is busy")

    with pytest.raises(InterlaceError, match=r"does not start \(CUPTI is busy\)"):
        await ProfiledSteps(device, read, Broken).record(lambda: asyncio.sleep(0))
