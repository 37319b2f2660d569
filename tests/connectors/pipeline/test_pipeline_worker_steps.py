"""PipelineWorker: random steps over virtual lanes against a model; missing and repeated hooks."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.connectors.pipeline.messages import (
    Load,
    PipelineMetadata,
    PipelineReport,
    RecordRun,
    Save,
    Share,
)
from interlace.connectors.pipeline.options import PipelineOptions
from interlace.connectors.pipeline.worker import PipelineWorker
from interlace.engine.errors import ConfigError, ConnectorError
from interlace.engine.ports import Lanes
from interlace.layers.lanes import ThreadLanes
from interlace.layers.page_copies import PageCopies
from interlace.layers.virtual_lanes import VirtualLanes

NUM_RECORDS, NUM_BLOCKS, NUM_LAYERS, PAGE_BYTES = 30, 40, 3, 64
NAMES = [f"layer{i}" for i in range(NUM_LAYERS)]


class Kit:
    """A worker, and what it should have done."""

    def __init__(self, lanes: Lanes, **options: Any) -> None:
        self.pages = {name: torch.zeros(NUM_BLOCKS, 2, 2, 2, 2) for name in NAMES}
        host_bytes = NUM_RECORDS * NUM_LAYERS * PAGE_BYTES
        self.worker = PipelineWorker(
            PipelineOptions(host_bytes=host_bytes, **options), lanes, window_bytes=8 * PAGE_BYTES
        )
        self.worker.register(self.pages)
        opened = self.worker._opened
        assert opened is not None
        self.records = opened.records.tensor
        self.pipeline = opened.pipeline
        self.next_step = 0

    def fill(self, block_id: int, value: float) -> None:
        """What a forward computes."""
        for layer, name in enumerate(NAMES):
            self.pages[name][block_id] = value + layer

    def holds(self, block_id: int, value: float) -> bool:
        return all(
            bool((self.pages[name][block_id] == value + layer).all())
            for layer, name in enumerate(NAMES)
        )

    def keep(self, record: int, value: float) -> None:
        """As if it had been saved."""
        for layer in range(NUM_LAYERS):
            self.records[record, layer] = torch.full((16,), value + layer).view(torch.uint8)

    def keeps(self, record: int, value: float) -> bool:
        return all(
            bool((self.records[record, layer].view(torch.float32) == value + layer).all())
            for layer in range(NUM_LAYERS)
        )

    def metadata(self, **orders: Any) -> PipelineMetadata:
        self.next_step += 1
        return PipelineMetadata(self.next_step, **orders)

    def reports(self) -> tuple[set[str], set[str], set[int], PipelineReport]:
        """(sent, received, invalid, report)."""
        sent, received = self.worker.get_finished(set())
        invalid = self.worker.take_invalid()
        report = self.worker.report()
        return sent or set(), received or set(), invalid, report or PipelineReport()

    def step(self, **orders: Any) -> tuple[set[str], set[str], set[int], PipelineReport]:
        metadata = self.metadata(**orders)
        self.worker.handle_preemptions(metadata)
        self.worker.start(metadata)
        for name in NAMES:
            self.worker.wait_for_layer(name)
        self.worker.finish_forward()
        return self.reports()


def run(record: int, block_id: int, num_blocks: int = 1) -> tuple[RecordRun, ...]:
    return (RecordRun(record, block_id, num_blocks),)


class Model:
    """What is under way, by number: blocks and records are each in one transfer at a time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.blocks = list(range(1, NUM_BLOCKS))
        self.records = list(range(NUM_RECORDS))
        self.saves: dict[int, tuple[int, int, float]] = {}
        self.loads: dict[int, tuple[int, int, float]] = {}
        self.number = 0

    def take(self) -> tuple[int, int, float]:
        """A block, a record, and a number that is nobody else's."""
        self.number += 1
        block = self.blocks.pop(self.random.randrange(len(self.blocks)))
        record = self.records.pop(self.random.randrange(len(self.records)))
        return block, record, 10.0 * self.number


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    policy=st.sampled_from(["seed", "eager", "lazy"]),
    group_size=st.integers(1, NUM_LAYERS),
)
def test_random_steps_copy_what_they_were_told_and_report_it_once(
    seed: int, policy: str, group_size: int
) -> None:
    kit, model = Kit(VirtualLanes(seed, policy), group_size=group_size), Model(seed)
    for number in range(500):
        is_last = number >= 40
        if is_last and not model.saves and not model.loads:
            break
        some = 0 if is_last else model.random.randrange(3)
        saves = [model.take() for _ in range(some)]
        loads = [model.take() for _ in range(0 if is_last else model.random.randrange(3))]
        fences = [i for i in model.saves if model.random.random() < 0.1]
        orders = []
        for block, record, value in loads:
            kit.keep(record, value)
            load = Load(int(value), "r", run(record, block), model.random.random() < 0.5)
            model.loads[load.load_id] = block, record, value
            orders.append(load)
        metadata = kit.metadata(
            saves=tuple(Save(int(value), run(record, block)) for block, record, value in saves),
            loads=tuple(orders),
            fences=frozenset(fences),
            release=frozenset({f"s{number}"}),
        )
        kit.worker.handle_preemptions(metadata)
        for fenced in fences:  # handed on
            kit.fill(model.saves[fenced][0], -5.0)
        for _ in range(model.random.randrange(1, 3)):
            kit.worker.start(metadata)
        if model.random.random() < 0.7:
            for name in NAMES:
                kit.worker.wait_for_layer(name)
        for block, record, value in saves:
            kit.fill(block, value)
            model.saves[int(value)] = block, record, value
        for _ in range(model.random.randrange(3)):
            kit.worker.finish_forward()
        sent, received, invalid, report = kit.reports()
        assert sent == {f"s{number}"}
        assert not invalid
        for load in orders:
            if not load.is_async:
                block, record, value = model.loads[load.load_id]
                assert kit.holds(block, value)
        for load_id in report.loaded:
            block, record, value = model.loads.pop(load_id)
            assert kit.holds(block, value)
            model.blocks.append(block)
            model.records.append(record)
        assert received <= {"r"}
        for save_id in report.copied | report.failed:
            block, record, value = model.saves.pop(save_id)
            assert save_id in report.failed or kit.keeps(record, value)
            model.blocks.append(block)
            model.records.append(record)
    assert not model.saves
    assert not model.loads
    kit.worker.close()


def test_threads_do_the_same() -> None:
    kit = Kit(ThreadLanes())
    kit.keep(0, 3.0)
    kit.keep(1, 30.0)
    loads = (Load(2, "a", run(0, 5), is_async=False), Load(3, "b", run(1, 6), is_async=True))
    kit.fill(9, 70.0)
    *_, report = kit.step(loads=loads, saves=(Save(4, run(7, 9)),))
    assert kit.holds(5, 3.0)
    loaded, copied = set(report.loaded), set(report.copied)
    for _ in range(1000):
        if loaded == {2, 3} and copied == {4}:
            break
        for lane in (kit.pipeline._bulk.lane, kit.pipeline._store.lane):
            lane.record().wait(20.0)
        *_, report = kit.step()
        loaded, copied = loaded | report.loaded, copied | report.copied
    assert (loaded, copied) == ({2, 3}, {4})
    assert kit.holds(6, 30.0)
    assert kit.keeps(7, 70.0)
    kit.worker.close()


def fail_blocks(monkeypatch: pytest.MonkeyPatch, at_layer: int, *blocks: int) -> None:
    """Copies of runs that begin with one of these blocks fail."""
    load, save = PageCopies.load, PageCopies.save

    def check(layer: int, runs: Any) -> None:
        if layer == at_layer and runs.runs[0][1] in blocks:
            raise OSError("broken")

    def failing_load(self: PageCopies, layer: int, runs: Any) -> Any:
        check(layer, runs)
        return load(self, layer, runs)

    def failing_save(self: PageCopies, layer: int, runs: Any) -> Any:
        check(layer, runs)
        return save(self, layer, runs)

    monkeypatch.setattr(PageCopies, "load", failing_load)
    monkeypatch.setattr(PageCopies, "save", failing_save)


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_a_failed_load_within_the_step_is_invalid_in_that_step(
    layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_blocks(monkeypatch, layer, 5)
    kit = Kit(VirtualLanes(0))
    kit.keep(4, 8.0)
    loads = (Load(4, "a", run(0, 5, 3), is_async=False), Load(5, "b", run(4, 9), is_async=False))
    _, received, invalid, report = kit.step(loads=loads)
    assert not received
    assert invalid == {5, 6, 7}
    assert report.loaded == {4, 5}
    assert kit.holds(9, 8.0)
    assert kit.step() == (set(), set(), set(), PipelineReport())


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_a_failed_load_beside_the_steps_is_invalid_when_it_is_received(
    layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_blocks(monkeypatch, layer, 5)
    kit = Kit(VirtualLanes(0, "lazy", polls_per_work=2))
    outcome = kit.step(loads=(Load(6, "a", run(0, 5, 2), is_async=True),))
    for _ in range(50):
        if outcome[1]:
            break
        assert not outcome[2]
        outcome = kit.step()
    assert outcome[1:3] == ({"a"}, {5, 6})
    assert outcome[3].loaded == {6}
    assert kit.step()[1:3] == (set(), set())


def test_a_failed_save_is_reported_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_blocks(monkeypatch, 1, 5)
    kit = Kit(VirtualLanes(0, "eager"))
    *_, report = kit.step(saves=(Save(1, run(0, 5)),))
    assert (list(report.copied), list(report.failed)) == ([], [1])
    *_, report = kit.step(saves=(Save(2, run(1, 6)), Save(3, run(NUM_RECORDS, 7))))
    assert (list(report.copied), list(report.failed)) == ([2], [3])
    *_, report = kit.step(saves=(Save(4, run(0, 5)), Save(5, run(1, 6))))  # they share a copy
    assert (list(report.copied), sorted(report.failed)) == ([], [4, 5])


def test_orders_that_do_not_fit_fail_by_themselves() -> None:
    kit = Kit(VirtualLanes(0, "eager"))
    wrong = run(NUM_RECORDS, 5)
    loads = (Load(7, "a", wrong, is_async=False), Load(8, "b", wrong, is_async=True))
    _, received, invalid, report = kit.step(loads=loads, saves=(Save(3, wrong),))
    assert received == {"b"}
    assert invalid == {5}
    assert report.failed == {3}
    assert report.loaded == {7, 8}


def test_a_fence_for_a_save_that_nobody_knows_does_nothing() -> None:
    kit = Kit(VirtualLanes(0))
    assert kit.step(fences=frozenset({77})) == (set(), set(), set(), PipelineReport())


def test_a_step_without_forward_begins_its_saves_with_its_reports() -> None:
    kit = Kit(VirtualLanes(0, "eager"))
    kit.fill(5, 6.0)
    metadata = kit.metadata(saves=(Save(1, run(0, 5)),))
    kit.worker.start(metadata)
    *_, report = kit.reports()
    assert report.copied == {1}
    assert kit.keeps(0, 6.0)


def test_an_idle_engine_polls_seldom_so_several_windows_are_fed_at_once() -> None:
    """And not all there is: what a step loads within itself queues behind it."""
    kit = Kit(VirtualLanes(0, "lazy", polls_per_work=1_000_000))
    whole = Load(9, "a", run(0, 1, NUM_RECORDS), is_async=True)
    kit.step(loads=(whole,))
    (bulk,) = kit.worker._bulk_loads
    (transfer,) = bulk.transfers
    window = transfer.num_fed
    assert 0 < window < 10
    received: set[str] = set()
    for _ in range(10):
        before = transfer.num_fed
        kit.worker.start(kit.metadata())
        received |= kit.reports()[1]
        if received:
            break
        assert transfer.num_fed - before <= 6 * window
        assert transfer.last_gate is not None
        assert transfer.last_gate.wait()
    assert received == {"a"}
    kit.worker.close()


@pytest.mark.parametrize("num_works", [0, 1])
def test_a_lost_load_writes_nothing_when_its_blocks_are_handed_on(num_works: int) -> None:
    """Some of it is on the lane then. Its end is told, and nothing else of it; its id is free."""
    lanes = VirtualLanes(0, "lazy", polls_per_work=1000)
    kit = Kit(lanes)
    for record in range(6):
        kit.keep(record, 100.0)
    order = Load(7, "a", run(0, 1, 6), is_async=True, share=5)
    kit.step(loads=(order,))
    for _ in range(num_works):
        assert lanes.advance()
    assert any(label.startswith("bulk") for label in lanes.pending)
    handed_on = kit.metadata(lost_loads=frozenset({7}), shares=(Share(7, 1, 6),))
    kit.worker.handle_preemptions(handed_on)
    for block_id in range(1, 7):
        kit.fill(block_id, 5.0)
    again = Load(8, "a", run(0, 11, 6), is_async=True, share=2)
    kit.worker.start(dataclasses.replace(handed_on, loads=(again,)))
    lanes.drain()
    assert all(kit.holds(block_id, 5.0) for block_id in range(1, 7))
    _, received, invalid, report = kit.reports()
    while not received:  # the new load is fed when the lane has done with the lost one
        lanes.drain()
        _, received, more_invalid, more = kit.step()
        invalid, report = invalid | more_invalid, report.aggregate(more)
    assert received == {"a"}
    assert not invalid
    assert report.loaded == {7, 8}
    assert {share.load_id for share in report.shares} == {8}
    assert [kit.holds(block_id, 100.0) for block_id in range(11, 17)] == [False] * 4 + [True] * 2


def test_steps_that_load_nothing_are_samples_of_how_long_a_step_takes() -> None:
    kit = Kit(VirtualLanes(0, "eager"))
    metadata = kit.metadata(num_tokens=12, timed_pairs=300)
    kit.worker.start(metadata)
    kit.worker.start(metadata)
    kit.worker.finish_forward()
    *_, report = kit.reports()
    ((num_tokens, num_context, seconds),) = report.steps
    assert (num_tokens, num_context) == (12, 300)
    assert seconds >= 0
    loading = kit.metadata(
        loads=(Load(10, "a", run(0, 5), is_async=False),), num_tokens=12, timed_pairs=0
    )
    kit.worker.start(loading)
    kit.worker.finish_forward()
    *_, report = kit.reports()
    assert not report.steps
    ((num_bytes, seconds),) = report.loads
    assert num_bytes == NUM_LAYERS * PAGE_BYTES
    assert seconds >= 0
    kit.worker.start(kit.metadata(num_tokens=5, timed_pairs=0))
    assert not kit.reports()[3].steps, "it had no forward"


def test_the_handshake_tells_what_there_is() -> None:
    kit = Kit(VirtualLanes(0))
    handshake = kit.worker.handshake()
    assert handshake.num_records == NUM_RECORDS
    assert handshake.record_bytes == NUM_LAYERS * PAGE_BYTES
    assert handshake.load_bytes_per_s > 0
    assert kit.worker.layer_gates is None


def test_before_pages_and_after_the_end_it_says_so() -> None:
    worker = PipelineWorker(PipelineOptions(host_bytes=1 << 20), VirtualLanes(0))
    with pytest.raises(ConnectorError, match="call register_kv_caches"):
        worker.start(PipelineMetadata(1))
    worker.close()
    kit = Kit(VirtualLanes(0))
    kit.worker.close()
    kit.worker.close()
    with pytest.raises(ConnectorError, match="none after shutdown"):
        kit.worker.report()


def test_pages_and_memory_that_will_not_do_are_refused() -> None:
    worker = PipelineWorker(PipelineOptions(host_bytes=1 << 20), VirtualLanes(0))
    unlike = {"a": torch.zeros(4, 2, 2, 2, 2), "b": torch.zeros(4, 2, 2, 2, 4)}
    with pytest.raises(ConnectorError, match="Leave other layers out"):
        worker.register(unlike)
    small = PipelineWorker(PipelineOptions(host_bytes=10), VirtualLanes(0))
    with pytest.raises(ConfigError, match="hold no record"):
        small.register({"a": torch.zeros(4, 2, 2, 2, 2)})


def test_as_much_of_a_load_from_the_back_is_queued_as_its_step_lasts() -> None:
    lanes = VirtualLanes(0, "lazy", polls_per_work=1_000_000)
    kit = Kit(lanes)
    block_bytes = NUM_LAYERS * PAGE_BYTES
    kit.worker.expect_load_rate(10 * block_bytes)
    load = Load(7, "a", run(0, 5, 20), is_async=True, share=20)
    kit.worker.start(kit.metadata(loads=(load,), num_tokens=4, expected_s=0.2))
    (transfer,) = kit.worker._bulk_loads[0].transfers
    assert transfer.window_bytes == 3 * block_bytes, "one step and a half"
    kit.reports()
    kit.worker.start(kit.metadata(num_tokens=4, expected_s=1.0))
    assert transfer.window_bytes == 15 * block_bytes
    kit.reports()
    kit.worker.start(kit.metadata(num_tokens=4))
    assert transfer.window_bytes == 8 * PAGE_BYTES, "the pipeline's own, at least"
    lanes.drain()


def test_where_nothing_computes_it_goes_on_until_a_load_has_ended() -> None:
    """Who asks stays with an empty step as long as the answer is True, and then asks for news."""
    lanes = VirtualLanes(0, "lazy", polls_per_work=1_000_000)
    kit = Kit(lanes)
    kit.keep(0, 3.0)
    loads = tuple(Load(i, str(i), run(i, 5 + i), is_async=True) for i in range(2))
    kit.worker.start(kit.metadata(loads=loads))
    assert kit.reports()[1] == set()
    assert kit.worker.advance(), "nothing is to be fed, and nothing has ended"
    lanes.drain()
    assert not kit.worker.advance()
    kit.worker.start(kit.metadata())
    assert kit.reports()[1] == {"0", "1"}
    assert kit.holds(5, 3.0)
    assert not kit.worker.advance(), "there is none"


def test_beside_a_step_that_computes_nobody_waits_for_the_end_of_a_load() -> None:
    lanes = VirtualLanes(0, "lazy", polls_per_work=1_000_000)
    kit = Kit(lanes)
    load = Load(0, "a", run(0, 5), is_async=True)
    kit.step(loads=(load,), num_tokens=1)
    assert not kit.worker.advance(), "all is queued"
    lanes.drain()
