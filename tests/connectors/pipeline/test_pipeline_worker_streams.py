"""The pipeline over CUDA lanes, with a device that runs what is queued when a test says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_streams import FakeDevice, FakeEvent, FakeStream
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from interlace.connectors.pipeline import layer_pipeline
from interlace.connectors.pipeline.layer_groups import LayerGroups
from interlace.connectors.pipeline.layer_pipeline import (
    LaneCopies,
    LayerPipeline,
    Pace,
    PipelinedLoad,
    PipelineGates,
)
from interlace.connectors.pipeline.worker_feeder import FedTransfer
from interlace.engine.errors import ConnectorError
from interlace.engine.ports import LateLayerGates
from interlace.engine.step_timings import StepTiming, Timings, TransferTiming
from interlace.layers.cuda_lanes import CudaLanes
from interlace.layers.kv_hooks import LayerHooks
from interlace.layers.moments import EventMoments
from interlace.layers.page_copies import Copied, CopyWay, PageCopies, Run, Runs
from interlace.layers.step_recorder import LayerMarks, StepRecorder, StepTimer

NUM_RECORDS, NUM_BLOCKS, NUM_LAYERS, PAGE_BYTES = 24, 32, 5, 32
GROUP = 2
FIRST_OF_GROUPS = [0, 1, 2, 4]


class Device(FakeDevice):
    """A fake device, which is a stopwatch too: each piece of work takes a second."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, op_s=1.0)

    def run_some(self, most: int) -> None:
        for _ in range(self.random.randrange(most + 1)):
            self.step()

    def mark(self) -> FakeEvent:
        event = self.event()
        event.record(self.current())
        return event

    def seconds(self, begin: FakeEvent, end: FakeEvent) -> float | None:
        return end.time - begin.time if begin.query() and end.query() else None

    def wait(self, mark: FakeEvent) -> None:
        raise AssertionError("nothing waits but measurements")


class QueuedCopies(PageCopies):
    """Copies that are queued on the current stream."""

    def __init__(self, device: Device, records: Tensor, layers: Sequence[Tensor]) -> None:
        super().__init__(records, layers)
        self.device = device
        self.refused_layer: int | None = None

    def load(self, layer: int, runs: Runs) -> Copied:
        return self._later(super().load, layer, runs)

    def save(self, layer: int, runs: Runs) -> Copied:
        return self._later(super().save, layer, runs)

    def _later(self, copy: Callable[[int, Runs], Copied], layer: int, runs: Runs) -> Copied:
        if layer == self.refused_layer:
            raise RuntimeError("CUDA refuses")

        def work() -> None:
            copy(layer, runs)

        self.device.queue(work)
        return Copied(CopyWay.STRIDED, len(runs.runs), runs.num_blocks * PAGE_BYTES)


class Kit:
    """A pipeline, and steps that read each layer when the device has come so far."""

    def __init__(self, seed: int = 0, window_bytes: int = 1 << 20) -> None:
        random = torch.Generator().manual_seed(0)
        self.device = Device(seed)
        self.records = torch.randint(
            0, 256, (NUM_RECORDS, NUM_LAYERS, PAGE_BYTES), dtype=torch.uint8, generator=random
        )
        self.layers = [
            torch.randint(0, 256, (NUM_BLOCKS, PAGE_BYTES), dtype=torch.uint8, generator=random)
            for _ in range(NUM_LAYERS)
        ]
        self.copies = QueuedCopies(self.device, self.records, self.layers)
        self.lanes = CudaLanes(self.device, clock=lambda: self.device.now, sleep=self.device.sleep)
        self.pipeline = LayerPipeline(
            self.lanes,
            LaneCopies(self.copies, self.copies, self.copies),
            group_size=GROUP,
            window_bytes=window_bytes,
            watch=self.device,
        )
        self.device.drain()
        self.seen: dict[int, Tensor] = {}

    def read(self, layer: int) -> None:
        """Queue what attention does."""

        def work() -> None:
            self.seen[layer] = self.layers[layer].clone()

        self.device.queue(work)

    def poison(self, blocks: Sequence[int]) -> None:
        """Queue what writes to blocks before, or after, they are somebody's."""

        def work() -> None:
            for layer in self.layers:
                layer[list(blocks)] = 255

        self.device.queue(work)

    def step(self, left_out: int | None = None) -> None:
        """An eager forward; one layer may forget to wait."""
        for layer in range(NUM_LAYERS):
            self.device.run_some(4)
            if layer != left_out:
                self.pipeline.wait(layer)
            self.read(layer)

    def saw(self, layer: int, runs: Sequence[Run]) -> bool:
        rows = self.seen[layer]
        return all(torch.equal(rows[b : b + n], self.records[r : r + n, layer]) for r, b, n in runs)

    def saw_all(self, runs: Sequence[Run]) -> bool:
        return all(self.saw(layer, runs) for layer in range(NUM_LAYERS))


class Graph:
    """Ops that were captured, and are queued again by each replay."""

    def __init__(self, kit: Kit, layers: range = range(NUM_LAYERS)) -> None:
        self._device = kit.device
        stream = FakeStream()
        gates = kit.pipeline.layer_gates
        assert gates is not None
        with kit.device.on(stream):
            for layer in layers:
                gates.wait_here(layer)
                kit.read(layer)
        self.ops = tuple(stream.ops)

    @property
    def num_waits(self) -> int:
        return sum(not callable(op) for op in self.ops)

    def replay(self) -> None:
        """A wait takes the event's state at the launch."""
        for op in self.ops:
            if callable(op):
                self._device.queue(op)
            else:
                self._device.current().wait_event(op[1])


RUNS: list[Run] = [(0, 3, 4), (8, 20, 2)]
OTHER: list[Run] = [(15, 10, 3)]
seeds = st.integers(0, 2**32)


@pytest.fixture
def one_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load by layer is submitted as late as can be."""
    for name in ("FIRST_BYTES", "AHEAD_BYTES"):
        monkeypatch.setattr(layer_pipeline, name, 1)


@pytest.mark.usefixtures("one_ahead")
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=seeds, pace=st.sampled_from(Pace))
def test_an_eager_step_reads_what_was_loaded(seed: int, pace: Pace) -> None:
    kit = Kit(seed)
    kit.poison(range(1, NUM_BLOCKS))  # an earlier step, not computed yet
    load = kit.pipeline.submit_load([RUNS, OTHER], 7, pace=pace)
    kit.step()
    kit.device.drain()
    assert kit.saw_all(RUNS + OTHER)
    assert load.errors == [None, None]
    assert is_done(load)
    seconds = load.stats.seconds
    assert seconds is not None
    assert seconds > 0


def test_a_load_is_one_work_in_which_each_gate_follows_its_group() -> None:
    """Nothing else is on the lane: two marks of time, and behind each group one event, for steps
    and graphs alike."""
    kit = Kit()
    stream = kit.device.streams[1]
    kit.poison([1])
    kit.pipeline.submit_load([RUNS, OTHER], 3)
    gates = kit.pipeline._gates
    assert gates is not None
    groups = {id(gate._event): group for group, gate in enumerate(gates.gates)}
    seen = [
        "copy" if callable(op) else f"{op[0]} {groups.get(id(op[1]), 'mark')}" for op in stream.ops
    ]
    layer = ["copy", "copy"]
    assert seen == [
        "wait mark", "record mark", *layer, "record 0", *layer, "record 1",
        *layer, *layer, "record 2", *layer, "record mark", "record 3",
    ]  # fmt: skip
    assert "running=1>" in repr(kit.pipeline._lane)


@pytest.mark.usefixtures("one_ahead")
def test_a_load_by_layer_is_submitted_as_its_step_comes_along() -> None:
    kit = Kit()
    load = kit.pipeline.submit_load([RUNS], 7, pace=Pace.BY_LAYER)
    assert len(load.gates) == 1
    kit.device.drain()
    assert not is_done(load), "the rest is to come"
    kit.pipeline.wait(0)
    assert len(load.gates) == 1
    kit.pipeline.wait(1)
    assert len(load.gates) == 3, "two at a time"
    kit.pipeline.submit_rest()
    assert len(load.gates) == len(FIRST_OF_GROUPS)
    kit.device.drain()
    assert is_done(load)
    kit.step()
    kit.device.drain()
    assert kit.saw_all(RUNS)


@pytest.mark.parametrize("num_layers", range(1, NUM_LAYERS + 1))
def test_so_many_bytes_are_submitted_first(
    num_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer_bytes = sum(count for *_, count in RUNS) * PAGE_BYTES
    monkeypatch.setattr(layer_pipeline, "FIRST_BYTES", num_layers * layer_bytes - 1)
    load = Kit().pipeline.submit_load([RUNS], 7, pace=Pace.BY_LAYER)
    assert load.stats.num_bytes >= num_layers * layer_bytes
    assert load.stats.num_bytes <= (num_layers + 1) * layer_bytes, "a group has two layers"


def test_more_is_submitted_ahead_once_the_first_layer_is_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer_bytes = sum(count for *_, count in RUNS) * PAGE_BYTES
    monkeypatch.setattr(layer_pipeline, "FIRST_BYTES", 1)
    monkeypatch.setattr(layer_pipeline, "AHEAD_BYTES", 3 * layer_bytes)
    kit = Kit()
    load = kit.pipeline.submit_load([RUNS], 7, pace=Pace.BY_LAYER)
    submitted = []
    for layer in range(3):
        kit.pipeline.wait(layer)
        submitted.append(len(load.gates))
    assert submitted == [1, 4, 4]


@pytest.mark.usefixtures("one_ahead")
@pytest.mark.parametrize("refused", range(NUM_LAYERS))
def test_what_is_refused_later_fails_in_the_same_step(refused: int) -> None:
    kit = Kit()
    kit.copies.refused_layer = refused
    load = kit.pipeline.submit_load([RUNS], 7, pace=Pace.BY_LAYER)
    for layer in range(3):
        kit.pipeline.wait(layer)
    kit.pipeline.finish_step()
    assert load.errors[0] is not None
    kit.device.drain()
    assert is_done(load)


@pytest.mark.usefixtures("one_ahead")
def test_of_a_load_that_was_given_up_nothing_more_is_submitted() -> None:
    kit = Kit()
    load = kit.pipeline.submit_load([RUNS], 7, pace=Pace.BY_LAYER)
    assert load.give_up(ConnectorError("too late"), 1.0)
    submitted = len(load.gates)
    kit.pipeline.wait(1)
    kit.pipeline.finish_step()
    assert len(load.gates) == submitted


@pytest.mark.parametrize("left_out", FIRST_OF_GROUPS)
def test_a_layer_that_does_not_wait_is_caught(left_out: int) -> None:
    """The control."""
    wrong = 0
    for seed in range(60):
        kit = Kit(seed)
        kit.poison(range(1, NUM_BLOCKS))
        kit.pipeline.submit_load([RUNS], 7)
        kit.step(left_out)
        kit.device.drain()
        wrong += not kit.saw(left_out, RUNS)
    assert wrong


def is_done(transfer: PipelinedLoad | FedTransfer) -> bool:
    return transfer.is_done


def is_armed(gates: PipelineGates, step_id: int) -> bool:
    return gates.are_armed(step_id)


def test_the_host_waits_for_nothing() -> None:
    kit = Kit()
    kit.poison(range(1, NUM_BLOCKS))
    load = kit.pipeline.submit_load([RUNS], 1)
    for layer in range(NUM_LAYERS):
        kit.pipeline.wait(layer)
    kit.pipeline.finish_step()
    save = kit.pipeline.submit_save(OTHER, kit.pipeline.record_compute())
    kit.pipeline.fence(save)
    kit.pipeline.poll()
    assert kit.device.now < 100
    assert not is_done(load)
    assert kit.pipeline._load is load
    kit.device.drain()
    assert is_done(load)
    assert is_done(save)
    assert save.num_fed == 0, "it gave way, and was given up then"


@settings(max_examples=40, deadline=None)
@given(seed=seeds)
def test_a_graph_waits_for_each_steps_own_copies(seed: int) -> None:
    kit = Kit(seed)
    graph, gates = Graph(kit), kit.pipeline.layer_gates
    assert graph.num_waits == len(FIRST_OF_GROUPS), "one a group"
    assert gates is not None
    assert not gates.are_armed(0)
    for step_id in range(4):
        kit.poison(range(1, NUM_BLOCKS))
        runs: list[Run] = [(step_id, 3 + step_id, 4)]
        kit.device.run_some(10)
        kit.pipeline.submit_load([runs], step_id)
        assert gates.are_armed(step_id)
        assert not gates.are_armed(step_id + 1)
        graph.replay()
        kit.device.run_some(30)
        if step_id % 2:
            kit.device.drain()
            assert kit.saw_all(runs)
    kit.device.drain()


@pytest.mark.usefixtures("one_ahead")
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=seeds)
def test_a_graph_in_two_parts_waits_for_each_steps_own_copies(seed: int) -> None:
    """The second part is launched while the first one runs, or has run, and so may the next step's
    gates be armed."""
    kit = Kit(seed)
    gates = kit.pipeline.layer_gates
    assert isinstance(gates, LateLayerGates)
    cut = gates.num_first_layers
    assert cut == 1, "of four"
    first, rest = Graph(kit, range(cut)), Graph(kit, range(cut, NUM_LAYERS))
    for step_id in range(1, 5):
        kit.poison(range(1, NUM_BLOCKS))
        runs: list[Run] = [(step_id, 3 + step_id, 4)]
        kit.device.run_some(10)
        load = kit.pipeline.submit_load([runs], step_id, pace=Pace.IN_TWO)
        assert len(load.gates) == 1
        assert gates.are_first_armed(step_id)
        assert not gates.are_armed(step_id)
        first.replay()
        kit.device.run_some(10)
        assert not is_done(load), "the rest is to come"
        gates.arm_rest(step_id - 1)
        assert not gates.are_armed(step_id), "that was another step"
        gates.arm_rest(step_id)
        assert gates.are_armed(step_id)
        rest.replay()
        kit.pipeline.finish_step()
        kit.device.run_some(30)
        if step_id % 2:
            kit.device.drain()
            assert is_done(load)
            assert kit.saw_all(runs)


@pytest.mark.usefixtures("one_ahead")
def test_a_step_whose_graph_is_left_out_gets_the_rest_by_its_hooks() -> None:
    kit = Kit()
    kit.poison(range(1, NUM_BLOCKS))
    load = kit.pipeline.submit_load([RUNS], 1, pace=Pace.IN_TWO)
    kit.step()
    assert len(load.gates) == len(FIRST_OF_GROUPS)
    kit.device.drain()
    assert kit.saw_all(RUNS)


@pytest.mark.usefixtures("one_ahead")
def test_what_is_refused_in_the_second_part_is_not_armed_before_it_is_known() -> None:
    kit = Kit()
    kit.copies.refused_layer = 2
    load = kit.pipeline.submit_load([RUNS], 1, pace=Pace.IN_TWO)
    gates = kit.pipeline.layer_gates
    assert isinstance(gates, LateLayerGates)
    assert load.errors == [None]
    gates.arm_rest(1)
    assert str(load.errors[0]) == "CUDA refuses"
    assert gates.are_armed(1), "the step goes on, and its blocks are bad"
    closed = Kit()
    load = closed.pipeline.submit_load([RUNS], 1, pace=Pace.IN_TWO)
    closed.pipeline._lane.close()
    late = closed.pipeline.layer_gates
    assert isinstance(late, LateLayerGates)
    late.arm_rest(1)
    assert load.errors[0] is not None
    assert not late.are_armed(1)


@pytest.mark.parametrize(("num_layers", "cut"), [(1, 1), (2, 1), (4, 1), (16, 2), (28, 4), (32, 4)])
def test_the_first_layers_are_few_and_whole_groups(num_layers: int, cut: int) -> None:
    groups = LayerGroups(num_layers, 2)
    gates = PipelineGates([], groups, lambda step_id: None)
    assert gates.num_first_layers == cut
    assert groups.ranges[gates.num_first_groups - 1].stop == cut


def test_a_replay_without_its_own_load_is_not_armed() -> None:
    kit = Kit()
    kit.pipeline.submit_load([[]], 5)
    gates = kit.pipeline.layer_gates
    assert gates is not None
    assert not gates.are_armed(5), "there was nothing to load"
    kit.pipeline.submit_load([RUNS], 6)
    assert gates.are_armed(6)
    assert kit.pipeline.close()
    late = kit.pipeline.submit_load([RUNS], 7)
    assert not gates.are_armed(7)
    assert late.errors[0] is not None


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_a_copy_that_is_refused_is_known_at_once_and_the_gates_open(layer: int) -> None:
    kit = Kit()
    kit.copies.refused_layer = layer
    load = kit.pipeline.submit_load([RUNS], 1)
    assert str(load.errors[0]) == "CUDA refuses"
    gates = kit.pipeline.layer_gates
    assert gates is not None
    assert gates.are_armed(1)
    kit.step()
    kit.device.drain()
    assert [gate.query() for gate in load.gates] == [True] * 4, "also those behind it"
    assert is_done(load)
    assert all(kit.saw(above, RUNS) for above in range(layer))
    kit.copies.refused_layer = None
    again = kit.pipeline.submit_load([RUNS], 2)
    kit.step()
    kit.device.drain()
    assert again.errors == [None]
    assert kit.saw_all(RUNS)


@settings(max_examples=40, deadline=None)
@given(seed=seeds, window=st.integers(1, 60))
def test_a_save_takes_what_its_step_computed_and_nothing_later(seed: int, window: int) -> None:
    kit = Kit(seed, window * PAGE_BYTES)
    kit.poison([20, 21, 22])  # the forward
    save = kit.pipeline.submit_save([(4, 20, 3)], kit.pipeline.record_compute())
    for _ in range(100):
        kit.device.run_some(3)
        kit.pipeline.poll()
    kit.device.drain()
    kit.pipeline.poll()
    assert is_done(save)
    assert save.error is None
    assert bool((kit.records[4:7] == 255).all())


@settings(max_examples=60, deadline=None)
@given(seed=seeds, window=st.integers(1, 60), num_polls=st.integers(0, 8))
def test_after_a_fence_later_steps_may_overwrite(seed: int, window: int, num_polls: int) -> None:
    kit = Kit(seed, window * PAGE_BYTES)
    runs: list[Run] = [(4, 20, 3)]
    before = torch.stack([layer[20:23] for layer in kit.layers], 1).clone()
    was = kit.records[4:7].clone()
    save = kit.pipeline.submit_save(runs, kit.pipeline.record_compute())
    for _ in range(num_polls):
        kit.device.run_some(4)
        kit.pipeline.poll()
    kit.pipeline.fence(save)
    kit.poison([20, 21, 22])
    kit.device.drain()
    kit.pipeline.poll()
    assert is_done(save)
    now = kit.records[4:7]
    assert bool(((now == before) | (now == was)).all()), "nothing of the next owner"
    if save.error is None:
        assert torch.equal(now, before)


@settings(max_examples=40, deadline=None)
@given(seed=seeds, window=st.integers(1, 60))
def test_a_bulk_load_is_done_when_its_bytes_are_there(seed: int, window: int) -> None:
    kit = Kit(seed, window * PAGE_BYTES)
    kit.poison(range(1, NUM_BLOCKS))
    load = kit.pipeline.submit_bulk(RUNS)
    for _ in range(1000):
        kit.device.run_some(2)
        kit.pipeline.poll()
        ahead = sum(one.num_bytes for *_, one in kit.pipeline._bulk._fed)
        assert ahead <= max(window * PAGE_BYTES, PAGE_BYTES)
        if load.is_done:
            break
    for layer in range(NUM_LAYERS):
        kit.read(layer)
    while kit.device.compute.ops:
        assert kit.device.step()
    assert load.error is None
    assert kit.saw_all(RUNS)


def test_a_load_is_done_when_its_last_group_is() -> None:
    kit = Kit()
    load = kit.pipeline.submit_load([RUNS], 1)
    while not load.gates[0].query():
        assert kit.device.step()
    assert not is_done(load)
    save = kit.pipeline.submit_save(OTHER)
    assert save.num_fed == 0
    while not load.gates[-1].query():
        assert kit.device.step()
    assert is_done(load)
    kit.pipeline.poll()
    assert save.num_fed


def test_one_gate_that_is_not_armed_is_enough() -> None:
    kit = Kit()
    gates = kit.pipeline._gates
    assert gates is not None
    for armed in gates.gates[1:]:
        armed.armed_for = 9
    assert not is_armed(gates, 9)
    gates.gates[0].armed_for = 9
    assert is_armed(gates, 9)


# -------------------------------------------------------------------- who looks


class Recorded(Kit):
    """What is copied and computed is taken down, with the device's times."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.moments = EventMoments(self.device, lambda: self.device.now)
        self.recorder = StepRecorder(self.moments, NUM_LAYERS)
        self.pipeline.record(self.recorder)

    def timer(self, step_id: int) -> StepTimer:
        output: Any = SimpleNamespace(step_id=step_id, num_scheduled_tokens={"a": 3})
        return self.recorder.begin_step(output)

    def waits(self) -> LayerHooks:
        return LayerHooks(self.pipeline.wait, lambda layer: None)

    def compute(self, hooks: LayerHooks) -> None:
        """Each layer is read between its hooks."""
        for layer in range(NUM_LAYERS):
            self.device.run_some(4)
            hooks.wait(layer)
            self.read(layer)
            hooks.save(layer)
        assert hooks.end is not None
        hooks.end()

    def told(self) -> Timings:
        self.device.drain()
        return self.recorder.take()


def check_waits(step: StepTiming, pieces: Sequence[TransferTiming]) -> None:
    """No layer passed its gate before its KV was there, as far as the device tells."""
    came = {
        layer: piece.end_s
        for piece in pieces
        for layer in range(piece.first_layer, piece.end_layer)
    }
    assert len(step.layers) == NUM_LAYERS
    for layer in step.layers:
        assert layer.arrived_s <= layer.passed_s < layer.end_s
        assert layer.passed_s > came[layer.layer]


@settings(max_examples=40, deadline=None)
@given(seed=seeds, pace=st.sampled_from(Pace))
def test_a_recorded_step_tells_of_each_group_and_each_wait(seed: int, pace: Pace) -> None:
    kit = Recorded(seed)
    timer = kit.timer(7)
    kit.pipeline.submit_load([RUNS, OTHER], 7, pace=pace, request_ids=["a", "b"])
    kit.compute(timer.around(kit.waits()))
    timer.end()
    kit.pipeline.submit_rest()
    told = kit.told()
    assert kit.saw_all(RUNS + OTHER)
    assert [one.first_layer for one in told.transfers] == FIRST_OF_GROUPS
    assert sum(one.num_bytes for one in told.transfers) == 9 * NUM_LAYERS * PAGE_BYTES
    assert {(one.step_id, one.request_ids, one.num_blocks) for one in told.transfers} == {
        (7, ("a", "b"), 9)
    }
    (step,) = told.steps
    check_waits(step, told.transfers)


@settings(max_examples=40, deadline=None)
@given(seed=seeds)
def test_recorded_graphs_wait_as_others_do_and_two_of_them_tell_each_their_own(seed: int) -> None:
    """Captured with events between the layers; the second step is launched before the first one
    has ended."""
    kit = Recorded(seed)
    gates = kit.pipeline.layer_gates
    assert gates is not None
    graphs = []
    for _ in range(2):
        events = [kit.moments.external_event() for _ in range(2 * NUM_LAYERS + 2)]
        marks = LayerMarks(lambda events=events: kit.moments.record(events.pop()), NUM_LAYERS)  # type: ignore[misc]
        stream = FakeStream()
        with kit.device.on(stream):
            kit.compute(marks.around(LayerHooks(gates.wait_here, lambda layer: None)))
        graphs.append((tuple(stream.ops), marks))
    kit.device.drain()
    lent: list[int] = []
    for step_id, (ops, marks) in enumerate([*graphs, *graphs, *graphs], start=1):
        load = kit.pipeline.submit_load([RUNS], step_id, request_ids=["a"])
        assert gates.are_armed(step_id)
        timer = kit.timer(step_id)
        timer.borrow(marks, lambda step_id=step_id: lent.append(step_id))  # type: ignore[misc]
        replay(kit, ops)
        timer.end()
        if step_id % 2:
            kit.device.run_some(20)
            continue
        told = kit.told()
        assert is_done(load)
        assert [one.step_id for one in told.steps] == [step_id - 1, step_id]
        assert lent == list(range(1, step_id + 1))
        for step in told.steps:
            own = [one for one in told.transfers if one.step_id == step.step_id]
            check_waits(step, own)
            assert step.begin_s <= step.layers[0].arrived_s
            assert step.layers[-1].end_s <= step.end_s
        assert told.steps[0].layers[-1].end_s <= told.steps[1].layers[0].arrived_s


def replay(kit: Kit, ops: Sequence[Any]) -> None:
    """Its records are made anew; a wait takes the event's state at the launch."""
    for op in ops:
        if callable(op):
            kit.device.queue(op)
        elif op[0] == "record":
            op[1].record(kit.device.current())
        else:
            kit.device.current().wait_event(op[1])


def test_slices_beside_the_steps_are_told_with_the_names_they_got_later() -> None:
    kit = Recorded()
    load = kit.pipeline.submit_bulk(RUNS)
    load.name = "a"
    save = kit.pipeline.submit_save(OTHER, after=kit.pipeline.record_compute())
    save.name = "save 3"
    kit.device.drain()
    kit.pipeline.poll()
    told = kit.told().transfers
    loads = [one for one in told if one.way == "load"]
    saves = [one for one in told if one.way == "save"]
    assert {(one.lane, one.request_ids) for one in loads} == {("bulk", ("a",))}
    assert {(one.lane, one.request_ids, one.transfer) for one in saves} == {("store", (), "save 3")}
    assert sum(one.num_bytes for one in loads) == 6 * NUM_LAYERS * PAGE_BYTES
    assert all(one.begin_s < one.end_s for one in told)
    kit.pipeline.record(None)
    kit.pipeline.submit_bulk(RUNS)
    assert kit.told().is_empty


def test_a_copy_that_is_refused_is_told_with_its_reason() -> None:
    kit = Recorded()
    kit.copies.refused_layer = 3
    kit.pipeline.submit_load([RUNS], 2, request_ids=["a"])
    reasons = {one.first_layer: one.error for one in kit.told().transfers}
    assert reasons == {0: None, 1: None, 2: "CUDA refuses", 4: "CUDA refuses"}
