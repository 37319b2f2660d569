"""CUDA lanes with real streams: what waits for what, shown by poison that nobody may read."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from interlace.engine.errors import LaneFullError
from interlace.layers.cuda_gates import CudaGate, GraphGate
from interlace.layers.cuda_lanes import CudaLanes
from interlace.layers.cuda_streams import CudaStreams
from interlace.layers.lanes import ThreadGate, ThreadLanes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
PATIENCE_S = 20.0
SIZE = 1 << 16
LONG, SHORT = 100_000_000, 2_000_000
"""Cycles: about 50 ms, and 1 ms."""


def stall(cycles: int) -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def pinned(value: float) -> Tensor:
    return torch.full((SIZE,), value, pin_memory=True)


class Kit:
    """Lanes, pages full of poison, and a place for what a step reads."""

    def __init__(self) -> None:
        self.lanes = CudaLanes(CudaStreams(torch.device("cuda")))
        self.load, self.store = self.lanes.lane("load"), self.lanes.lane("store")
        self.pages = torch.empty(SIZE, device="cuda")
        self.out = torch.empty(SIZE, device="cuda")
        self.poison(-1.0)

    def poison(self, value: float) -> None:
        """Queued as a step's kernel would be; the load lane comes after it."""
        self.pages.fill_(value)
        self.load.wait(self.lanes.compute.record())

    def copy_late(self, host: Tensor, cycles: int = LONG) -> Callable[[], None]:
        """A load that takes its time."""

        def work() -> None:
            stall(cycles)
            self.pages.copy_(host, non_blocking=True)

        return work

    def finish(self) -> None:
        """Wait for all steps, for a limited time."""
        assert self.lanes.compute.record().wait(PATIENCE_S)
        assert self.load.record().wait(PATIENCE_S)

    def assert_read(self, value: float) -> None:
        self.finish()
        assert torch.equal(self.out.cpu(), torch.full((SIZE,), value))


@pytest.fixture
def kit() -> Kit:
    stall(SHORT)  # the first use of a kernel loads it, which may wait for the device
    made = Kit()
    made.out.copy_(made.pages)
    made.finish()
    return made


def test_a_step_reads_what_a_gated_copy_brought(kit: Kit) -> None:
    gate = kit.load.submit(kit.copy_late(pinned(7.0)))
    assert kit.lanes.compute.wait(gate)
    kit.out.copy_(kit.pages)
    assert not gate.query(), "nothing waited on the host"
    kit.assert_read(7.0)
    assert gate.query()
    assert gate.error is None


def test_without_the_gate_it_reads_the_poison(kit: Kit) -> None:
    """The control: the lanes do run beside each other."""
    gate = kit.load.submit(kit.copy_late(pinned(7.0)))
    kit.out.copy_(kit.pages)
    kit.assert_read(-1.0)
    assert gate.query()


def test_a_lane_waits_for_another_lane(kit: Kit) -> None:
    host = pinned(0.0)
    kit.store.wait(kit.load.submit(kit.copy_late(pinned(5.0))))
    stored = kit.store.submit(lambda: _download(host, kit.pages))
    assert not stored.query()
    assert stored.wait(PATIENCE_S)
    assert bool((host == 5.0).all())


def _download(host: Tensor, pages: Tensor) -> None:
    host.copy_(pages, non_blocking=True)


def test_no_stream_waits_for_a_file(kit: Kit) -> None:
    """What comes after the file is held back on the host; steps and other lanes go on."""
    read, host = ThreadGate(), pinned(0.0)
    kit.load.wait(read)
    copied = kit.load.submit(kit.copy_late(host, SHORT))
    kit.out.copy_(kit.pages)
    assert kit.lanes.compute.record().wait(PATIENCE_S)
    assert kit.lanes.poll()
    assert not kit.lanes.compute.wait(copied, 0.01)
    host.fill_(3.0)
    read.end(None)
    assert kit.lanes.compute.wait(copied, PATIENCE_S)
    kit.out.copy_(kit.pages)
    kit.assert_read(3.0)


def test_a_reading_thread_and_a_writing_thread_around_the_device(kit: Kit) -> None:
    """A file's content comes by a thread, and goes on to another one, which waits for the copy."""
    source, target = pinned(0.0), pinned(0.0)
    reader, writer = ThreadLanes().lane("read"), ThreadLanes().lane("write")
    content, found = source.numpy(), target.numpy()
    seen: list[bool] = []

    def read() -> None:
        time.sleep(0.02)
        content[:] = np.arange(SIZE)

    kit.load.wait(reader.submit(read))
    kit.store.wait(kit.load.submit(kit.copy_late(source)))
    writer.wait(kit.store.submit(lambda: _download(target, kit.pages)))
    written = writer.submit(lambda: seen.append(np.array_equal(found, np.arange(SIZE))))
    end = time.monotonic() + PATIENCE_S
    while kit.lanes.poll():
        assert time.monotonic() < end
        time.sleep(0.001)
    assert written.wait(PATIENCE_S)
    assert seen == [True]
    assert reader.close(PATIENCE_S)
    assert writer.close(PATIENCE_S)


def test_waits_with_a_timeout_end(kit: Kit) -> None:
    gate = kit.load.submit(lambda: stall(10 * LONG))
    assert not gate.wait(0.002)
    assert not gate.query()
    assert gate.wait(PATIENCE_S)
    assert kit.load.close(PATIENCE_S)


def test_works_whose_events_have_not_passed_are_bounded(kit: Kit) -> None:
    lane = kit.lanes.lane("small", max_pending=2)
    gates = [lane.submit(lambda: stall(LONG)) for _ in range(2)]
    with pytest.raises(LaneFullError):
        lane.submit(lambda: None)
    assert gates[0].wait(PATIENCE_S)
    last = lane.submit(lambda: None)
    assert last.wait(PATIENCE_S)
    assert lane.close(PATIENCE_S)


def test_a_failure_opens_its_gate_behind_what_was_queued(kit: Kit) -> None:
    def work() -> None:
        kit.copy_late(pinned(2.0))()
        raise OSError("the rest is missing")

    gate = kit.load.submit(work)
    errors = [gate.error]
    assert kit.lanes.compute.wait(gate)
    kit.out.copy_(kit.pages)
    kit.assert_read(2.0)
    errors.append(gate.error)
    assert [str(error) for error in errors] == ["None", "the rest is missing"]


def test_memory_of_a_work_is_not_used_again_while_it_is_read(kit: Kit) -> None:
    host = pinned(0.0)

    def submit() -> CudaGate:
        values = torch.full((SIZE,), 9.0, device="cuda")
        kit.store.wait(kit.lanes.compute.record())

        def work() -> None:
            stall(LONG)
            _download(host, values)

        return kit.store.submit(work)

    gate = submit()
    others = [torch.full((SIZE,), -5.0, device="cuda") for _ in range(20)]
    assert gate.wait(PATIENCE_S)
    assert bool((host == 9.0).all())
    assert len(others) == 20


def test_the_load_lane_goes_first(kit: Kit) -> None:
    load: Any = kit.load._stream
    store: Any = kit.store._stream
    assert load.priority < store.priority


# ---------------------------------------------------------------- gates in graphs


def captured(kit: Kit) -> tuple[Any, GraphGate]:
    """A graph that reads the pages behind a gate."""
    gate = kit.lanes.graph_gate()
    kit.finish()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kit.out.fill_(0.0)
        gate.wait_here()
        kit.out.copy_(kit.pages)
    return graph, gate


def test_fifty_replays_wait_for_their_own_copies(kit: Kit) -> None:
    graph, gate = captured(kit)
    for step_id in range(50):
        kit.poison(-1.0)
        copied = kit.load.submit(kit.copy_late(pinned(float(step_id)), SHORT))
        assert kit.load.arm(gate, step_id)
        assert gate.armed_for == step_id
        graph.replay()
        kit.assert_read(float(step_id))
        assert copied.query()


def test_a_replay_whose_gate_is_not_armed_reads_the_old_content(kit: Kit) -> None:
    """The control, and why a launch without `armed_for` of its step has to be refused."""
    graph, gate = captured(kit)
    assert kit.load.arm(gate, 1)
    kit.finish()
    kit.poison(-1.0)
    copied = kit.load.submit(kit.copy_late(pinned(4.0)))
    graph.replay()
    kit.assert_read(-1.0)
    assert gate.armed_for == 1
    assert copied.wait(PATIENCE_S)


def test_a_gate_may_be_armed_again_while_the_graph_runs(kit: Kit) -> None:
    graph, gate = captured(kit)
    kit.poison(-1.0)
    kit.load.submit(kit.copy_late(pinned(1.0), SHORT))
    assert kit.load.arm(gate, 1)
    graph.replay()
    first = kit.lanes.compute.record()
    kit.load.wait(first)  # the pages may be written again
    second = kit.load.submit(kit.copy_late(pinned(2.0)))
    assert kit.load.arm(gate, 2)
    assert first.wait(PATIENCE_S)
    assert not second.query(), "the first replay did not wait for the second copy"
    assert torch.equal(kit.out.cpu(), torch.full((SIZE,), 1.0))
    graph.replay()
    kit.assert_read(2.0)


def test_several_gates_in_one_graph_each_hold_their_own_layer(kit: Kit) -> None:
    num_layers = 4
    pages = torch.empty(num_layers, SIZE, device="cuda")
    out = torch.empty_like(pages)
    gates = [kit.lanes.graph_gate() for _ in range(num_layers)]
    kit.finish()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer, gate in enumerate(gates):
            gate.wait_here()
            out[layer].copy_(pages[layer])

    def copy(layer: int, host: Tensor) -> Callable[[], None]:
        def work() -> None:
            stall(SHORT)
            pages[layer].copy_(host, non_blocking=True)

        return work

    for step_id in range(10):
        pages.fill_(-1.0)
        kit.load.wait(kit.lanes.compute.record())
        for layer, gate in enumerate(gates):
            kit.load.submit(copy(layer, pinned(float(10 * step_id + layer))))
            assert kit.load.arm(gate, step_id)
        assert all(gate.armed_for == step_id for gate in gates)
        graph.replay()
        assert kit.lanes.compute.record().wait(PATIENCE_S)
        right = torch.tensor([10.0 * step_id + layer for layer in range(num_layers)])
        assert torch.equal(out.cpu(), right[:, None].expand(-1, SIZE))
    kit.finish()
