"""Copies between pinned records and pages on a real GPU, in every way; loads behind gates, also in
captured graphs; bulk loads, saves and fences. Run with -s to see how fast it was."""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from interlace.connectors.pipeline.layer_pipeline import LaneCopies, LayerPipeline
from interlace.connectors.pipeline.messages import Load, PipelineMetadata, RecordRun, Save
from interlace.connectors.pipeline.options import PipelineOptions
from interlace.connectors.pipeline.records import HostRecords
from interlace.connectors.pipeline.worker import PipelineWorker
from interlace.engine.errors import ConnectorError
from interlace.layers import page_copies
from interlace.layers.cuda_copies import (
    cuda_memcpy_2d,
    cuda_memcpy_2d_batch,
    cuda_memcpy_batch,
)
from interlace.layers.cuda_lanes import CudaLane, CudaLanes
from interlace.layers.cuda_streams import CudaStreams
from interlace.layers.kernels.page_gather import GATHER_TILES, GatherTiles, PageGather
from interlace.layers.lanes import ThreadLanes
from interlace.layers.page_copies import (
    LEAST_STRIDED_BATCH,
    MOST_STRIDED_RUNS,
    CopyWay,
    PageCopies,
    Run,
    Runs,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
PATIENCE_S = 20.0
NUM_LAYERS, NUM_BLOCKS, NUM_RECORDS = 5, 200, 160
PAGE_SHAPE = (2, 16, 2, 32)
PAGE_BYTES = 4096
STALL = 20_000_000
"""Cycles: about 10 ms."""


def device() -> torch.device:
    return torch.device("cuda")


def stall(cycles: int = STALL) -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def page_layers(*, cross_layers: bool = False) -> list[Tensor]:
    """Pages of all layers, filled with random bits."""
    if cross_layers:
        shape = (NUM_BLOCKS, NUM_LAYERS, PAGE_BYTES)
        memory = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
        pages = memory.view(torch.bfloat16).view(NUM_BLOCKS, NUM_LAYERS, *PAGE_SHAPE)
        return list(pages.permute(1, 0, 2, 3, 4, 5))
    return [
        torch.randint(0, 256, (NUM_BLOCKS, PAGE_BYTES), dtype=torch.uint8, device="cuda")
        .view(torch.bfloat16)
        .view(NUM_BLOCKS, *PAGE_SHAPE)
        for _ in range(NUM_LAYERS)
    ]


def as_bytes(pages: Tensor) -> Tensor:
    """[num_blocks, page bytes], on the host."""
    torch.cuda.synchronize()
    return pages.contiguous().view(torch.uint8).view(len(pages), -1).cpu()


@pytest.fixture
def records() -> Iterator[HostRecords]:
    made = HostRecords.allocate(
        NUM_RECORDS * NUM_LAYERS * PAGE_BYTES + 5, (NUM_LAYERS, PAGE_BYTES), device()
    )
    made.tensor.copy_(torch.randint(0, 256, made.tensor.shape, dtype=torch.uint8))
    yield made
    made.close()


def random_runs(rng: random.Random, most: int, gap: int) -> list[Run]:
    """Runs of up to `most` blocks, in any order; their records are in order, `gap` apart."""
    places: list[tuple[int, int]] = []
    block = 1
    while block < NUM_BLOCKS:
        count = min(rng.randint(1, most), NUM_BLOCKS - block)
        places.append((block, count))
        block += count + rng.randint(0, 1)
    rng.shuffle(places)
    runs: list[Run] = []
    record = 0
    for block, count in places:
        if record + count <= NUM_RECORDS:
            runs.append((record, block, count))
            record += count + gap
    return runs


# ---------------------------------------------------------------- memory


def test_records_are_pinned_until_they_are_closed() -> None:
    made = HostRecords.allocate(8 << 20, (4, 1 << 10), device())
    assert made.num_records == 2048
    assert made.tensor.is_pinned()
    assert not made.tensor.any()
    rate = made.measure_load_rate()
    assert rate > 1e9
    made.close()
    made.close()
    assert not made.tensor.is_pinned()


def test_a_copy_that_cuda_refuses_says_so_and_harms_nothing() -> None:
    memcpy = cuda_memcpy_2d(device())
    if memcpy is None:
        pytest.skip("cuda.bindings is not installed")
    pages, host = torch.zeros(4096, device="cuda"), torch.zeros(4096, pin_memory=True)
    with pytest.raises(ConnectorError, match="cudaMemcpy2DAsync"):
        memcpy.copy(  # rows wider than what they lie in
            pages.data_ptr(), 64, host.data_ptr(), 64, 128, 2, memcpy.current_stream(),
            to_device=True,
        )  # fmt: skip
    pages.add_(1)
    torch.cuda.synchronize()
    assert bool((pages == 1).all())


# ---------------------------------------------------------------- copies


NEVER = 1 << 30


def copies_by(way: CopyWay, records: torch.Tensor, layers: Sequence[torch.Tensor]) -> PageCopies:
    """Copies that take no other way."""
    most = NEVER if way is CopyWay.STRIDED else 0
    batch = cuda_memcpy_batch(device()) if way is CopyWay.BATCH else None
    assert way is not CopyWay.BATCH or batch is not None, "the driver is of CUDA 12.8 or later"
    return PageCopies(records, layers, batch=batch, most_strided_runs=most, strided_run_bytes=NEVER)


"""With which each way is taken for any runs."""


@pytest.fixture
def on_a_stream() -> Iterator[None]:
    """The driver takes no batch on the default stream, and no lane is that."""
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        yield


@pytest.mark.usefixtures("on_a_stream")
@pytest.mark.parametrize("way", CopyWay)
@pytest.mark.parametrize("cross_layers", [False, True])
@pytest.mark.parametrize("has_driver", [True, False])
def test_every_way_copies_the_right_bytes_and_no_others(
    records: HostRecords,
    way: CopyWay,
    cross_layers: bool,
    has_driver: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has_driver:
        if way is CopyWay.STRIDED:
            pytest.skip("needs cuda.bindings")
        monkeypatch.setattr(page_copies, "cuda_memcpy_2d", lambda device: None)
    elif cuda_memcpy_2d(device()) is None:
        pytest.skip("cuda.bindings is not installed")
    rng = random.Random(way.value)
    for most, gap in [(40, 0), (2, 0), (3, 1)]:
        layers = page_layers(cross_layers=cross_layers)
        copies = copies_by(way, records.tensor, layers)
        runs = random_runs(rng, most, gap)
        prepared = copies.prepare(runs)
        for layer in range(NUM_LAYERS):
            before = [as_bytes(pages) for pages in layers]
            copied = copies.load(layer, prepared)
            assert copied.way is way
            assert copied.num_bytes == sum(n for *_, n in runs) * PAGE_BYTES
            load_twin(before[layer], records.tensor, layer, runs)
            for pages, right in zip(layers, before, strict=True):
                assert torch.equal(as_bytes(pages), right)
            check_save(copies, records, layers, layer, prepared)


@pytest.mark.usefixtures("on_a_stream")
@pytest.mark.parametrize("way", CopyWay)
@pytest.mark.parametrize("cross_layers", [False, True])
def test_several_layers_in_one_go(records: HostRecords, way: CopyWay, cross_layers: bool) -> None:
    layers, runs = page_layers(cross_layers=cross_layers), random_runs(random.Random(3), 3, 1)
    copies = copies_by(way, records.tensor, layers)
    prepared = copies.prepare(runs)
    right = [as_bytes(pages) for pages in layers]
    for layer in range(1, NUM_LAYERS):
        load_twin(right[layer], records.tensor, layer, runs)
    copied = list(copies.load_layers(range(1, NUM_LAYERS), prepared))
    assert len(copied) == (NUM_LAYERS - 1 if way is CopyWay.STRIDED else 1)
    for pages, expected in zip(layers, right, strict=True):
        assert torch.equal(as_bytes(pages), expected)
    for pages in layers:
        pages.view(torch.uint8).bitwise_xor_(85)
    before = records.tensor.clone()
    for layer in range(1, NUM_LAYERS):
        pages = as_bytes(layers[layer])
        for record, block, count in runs:
            before[record : record + count, layer] = pages[block : block + count]
    for _ in copies.save_layers(range(1, NUM_LAYERS), prepared):
        pass
    torch.cuda.synchronize()
    assert torch.equal(records.tensor, before)


@pytest.mark.usefixtures("on_a_stream")
@pytest.mark.parametrize("page_bytes", [12 << 10, 64 << 10])
@pytest.mark.parametrize("cross_layers", [False, True])
@pytest.mark.parametrize("by_layer", [False, True])
def test_many_strided_copies_in_one_call_are_what_single_ones_are(
    page_bytes: int, cross_layers: bool, by_layer: bool
) -> None:
    if cuda_memcpy_2d(device()) is None:
        pytest.skip("cuda.bindings is not installed")
    strided_batch = cuda_memcpy_2d_batch(device())
    assert strided_batch is not None, "the driver is of CUDA 12.8 or later"
    runs, chosen = random_runs(random.Random(page_bytes), 12, 1), range(1, NUM_LAYERS)
    assert len(runs) >= LEAST_STRIDED_BATCH
    shape = (NUM_BLOCKS, NUM_LAYERS) if cross_layers else (NUM_LAYERS, NUM_BLOCKS)
    memory = torch.randint(0, 256, (*shape, page_bytes), dtype=torch.uint8, device="cuda")
    layers = list(memory.unbind(1 if cross_layers else 0))
    twin_layers = [pages.clone() for pages in layers]
    size = NUM_RECORDS * NUM_LAYERS * page_bytes
    made = HostRecords.allocate(size, (NUM_LAYERS, page_bytes), device())
    with contextlib.closing(made):
        records = made.tensor
        records.random_(256)
        copies = PageCopies(records, layers, strided_batch=strided_batch, strided_run_bytes=0)
        twin = PageCopies(records, twin_layers, strided_run_bytes=0)
        queue_layers(copies, chosen, runs, loads=True, by_layer=by_layer)
        queue_layers(twin, chosen, runs, loads=True, by_layer=True)
        for pages, right in zip(layers, twin_layers, strict=True):
            assert torch.equal(as_bytes(pages), as_bytes(right))
            pages.bitwise_xor_(85)
            right.bitwise_xor_(85)
        before = records.clone()
        queue_layers(copies, chosen, runs, loads=False, by_layer=by_layer)
        saved = records.clone()
        records.copy_(before)
        queue_layers(twin, chosen, runs, loads=False, by_layer=True)
        assert torch.equal(saved, records)
        assert not torch.equal(saved, before)


def queue_layers(
    copies: PageCopies, layers: range, runs: list[Run], *, loads: bool, by_layer: bool
) -> None:
    """Strided copies, and wait for them."""
    prepared = copies.prepare(runs)
    assert prepared.way is CopyWay.STRIDED
    if by_layer:
        for layer in layers:
            (copies.load if loads else copies.save)(layer, prepared)
    else:
        copied = list((copies.load_layers if loads else copies.save_layers)(layers, prepared))
        assert len(copied) == 1, "one call"
    torch.cuda.synchronize()


def load_twin(pages: Tensor, records: Tensor, layer: int, runs: Sequence[Run]) -> None:
    """What a load comes to; all in host memory."""
    for record, block, count in runs:
        pages[block : block + count] = records[record : record + count, layer]


def check_save(
    copies: PageCopies, records: HostRecords, layers: list[Tensor], layer: int, prepared: Any
) -> None:
    """Other bytes, saved into the same records."""
    layers[layer].view(torch.uint8).bitwise_xor_(85)
    before = records.tensor.clone()
    copies.save(layer, prepared)
    pages = as_bytes(layers[layer])
    for record, block, count in prepared.runs:
        before[record : record + count, layer] = pages[block : block + count]
    assert torch.equal(records.tensor, before)


@pytest.mark.parametrize("cross_layers", [False, True])
def test_a_kernel_copies_beside_compute_on_a_stream_of_its_own(
    records: HostRecords, cross_layers: bool
) -> None:
    """Loads into some blocks and saves of others, layer by layer, while matrices are multiplied."""
    layers, side = page_layers(cross_layers=cross_layers), CudaStreams(device())
    copies = copies_by(CopyWay.GATHER, records.tensor, layers)
    stream: Any = side.stream(is_urgent=True)
    a = torch.ones(2048, 2048, dtype=torch.bfloat16, device="cuda") / 2048
    rng = random.Random(7)
    for _ in range(10):
        runs = random_runs(rng, 3, 0)
        rng.shuffle(runs)
        loads, saves = runs[::2], runs[1::2]
        right_pages = [as_bytes(pages) for pages in layers]
        right_records = records.tensor.clone()
        for layer in range(NUM_LAYERS):
            load_twin(right_pages[layer], right_records, layer, loads)
            for record, block, count in saves:
                right_records[record : record + count, layer] = right_pages[layer][
                    block : block + count
                ]
        torch.cuda.synchronize()
        product = a
        for _ in range(20):
            product = product @ a
        with side.on(stream):
            to_load, to_save = copies.prepare(loads), copies.prepare(saves)
            for layer in range(NUM_LAYERS):
                copies.load(layer, to_load)
                copies.save(layer, to_save)
        for _ in range(20):
            product = product @ a
        torch.cuda.synchronize()
        for pages, right in zip(layers, right_pages, strict=True):
            assert torch.equal(as_bytes(pages), right)
        assert torch.equal(records.tensor, right_records)
        assert bool(((product.float() * 2048 - 1).abs() < 0.1).all())


def test_the_kernel_is_compiled_before_the_first_load() -> None:
    """For a shape that no other test has."""
    num_layers = 7
    made = HostRecords.allocate(64 * num_layers * PAGE_BYTES, (num_layers, PAGE_BYTES), device())
    pages = [
        torch.zeros(66, PAGE_BYTES, dtype=torch.uint8, device="cuda") for _ in range(num_layers)
    ]
    copies = copies_by(CopyWay.GATHER, made.tensor, pages)
    begin = time.perf_counter()
    runs = copies.prepare([(0, 1, 64)])
    copies.load(0, runs)
    copies.save(0, runs)
    took_s = time.perf_counter() - begin
    torch.cuda.synchronize()
    made.close()
    assert took_s < 0.02


def test_records_that_the_device_cannot_read_are_refused() -> None:
    pageable = torch.zeros(NUM_RECORDS, NUM_LAYERS, PAGE_BYTES, dtype=torch.uint8)
    with pytest.raises(ConnectorError, match="pin it, or register it"):
        PageCopies(pageable, page_layers())


# ---------------------------------------------------------------- behind gates


class Kit:
    """A pipeline, and steps that read each layer into `out`. Up to so many runs are strided."""

    def __init__(
        self,
        records: HostRecords,
        *,
        window_bytes: int = 32 << 20,
        most_strided_runs: int = MOST_STRIDED_RUNS,
    ) -> None:
        self.records = records.tensor
        self.layers = page_layers()
        self.rows = [pages.view(torch.uint8).view(NUM_BLOCKS, -1) for pages in self.layers]
        self.lanes = CudaLanes(CudaStreams(device()))
        within = PageCopies(
            records.tensor,
            self.layers,
            strided_batch=cuda_memcpy_2d_batch(device()),
            most_strided_runs=most_strided_runs,
        )
        copies = LaneCopies.over(records.tensor, self.layers)._replace(load=within)
        self.pipeline = LayerPipeline(self.lanes, copies, window_bytes=window_bytes)
        self.out = torch.zeros(NUM_LAYERS, NUM_BLOCKS, PAGE_BYTES, dtype=torch.uint8, device="cuda")
        stall(1000)  # the first use of a kernel loads it, which may wait for the device
        self.poison()
        self.read(0)
        self.finish()

    def poison(self) -> None:
        """Queue what nobody may read."""
        for rows in self.rows:
            rows.fill_(255)

    def read(self, layer: int) -> None:
        self.out[layer].copy_(self.rows[layer])

    def stall_loads(self) -> None:
        """Let the load lane come late."""
        self.pipeline._lane.submit(stall)

    def finish(self) -> None:
        assert self.lanes.compute.record().wait(PATIENCE_S)
        assert self.pipeline._lane.record().wait(PATIENCE_S)

    def has_read(self, layer: int, runs: Sequence[Run]) -> bool:
        """After `finish`."""
        seen = self.out[layer].cpu()
        return all(torch.equal(seen[b : b + n], self.records[r : r + n, layer]) for r, b, n in runs)

    def has_read_all(self, runs: Sequence[Run]) -> bool:
        return all(self.has_read(layer, runs) for layer in range(NUM_LAYERS))

    def until(self, has_ended: Callable[[], bool]) -> None:
        """Poll, for a limited time."""
        end = time.monotonic() + PATIENCE_S
        while not has_ended():
            assert time.monotonic() < end
            self.pipeline.poll()
            time.sleep(0.0005)


RUNS: list[Run] = [(0, 3, 40), (60, 100, 20)]
OTHER: list[Run] = [(100, 192, 7)]
MANY: list[Run] = [(i, 190 - 4 * i, 1) for i in range(40)]


@pytest.mark.parametrize(
    ("runs", "most_strided_runs"), [(RUNS, 4), (MANY, 4), (MANY[:6], 6), (MANY, 40)]
)
def test_an_eager_step_reads_what_was_loaded(
    records: HostRecords, runs: list[Run], most_strided_runs: int
) -> None:
    """By single copies, a kernel a group, one call for the group of two, and one for each."""
    kit = Kit(records, most_strided_runs=most_strided_runs)
    for step_id in range(5):
        stall()
        kit.poison()
        kit.stall_loads()
        load = kit.pipeline.submit_load([runs, OTHER], step_id)
        for layer in range(NUM_LAYERS):
            kit.pipeline.wait(layer)
            kit.read(layer)
        # The first one loads kernels and pins memory, which may wait for the device.
        assert step_id < 2 or not load.is_done, "the host waited for nothing"
        kit.finish()
        assert load.errors == [None, None]
        assert kit.has_read_all(runs + OTHER)
        stats = load.stats
        assert stats.seconds is not None
        assert stats.gb_per_s is not None


@pytest.mark.parametrize("left_out", [0, 1, 2, 4])
def test_a_layer_that_does_not_wait_reads_poison(records: HostRecords, left_out: int) -> None:
    """The control. Layers 2 and 3 are a group, the others are alone."""
    kit = Kit(records)
    kit.poison()
    kit.finish()
    torch.cuda.synchronize()
    kit.pipeline.submit_load([RUNS], 0)  # compiles nothing from here on
    kit.finish()
    kit.poison()
    group = (2, 3) if left_out == 2 else (left_out,)
    waits = [layer for layer in range(NUM_LAYERS) if layer not in group]
    kit.finish()
    kit.stall_loads()
    kit.pipeline.submit_load([RUNS], 1)
    kit.read(left_out)
    for layer in waits:
        kit.pipeline.wait(layer)
        kit.read(layer)
    kit.finish()
    assert not kit.has_read(left_out, RUNS)
    assert all(kit.has_read(layer, RUNS) for layer in waits)


def captured(kit: Kit) -> Any:
    """A graph that reads each layer behind its gate."""
    gates = kit.pipeline.layer_gates
    assert gates is not None
    kit.finish()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(NUM_LAYERS):
            gates.wait_here(layer)
            kit.read(layer)
    return graph


@pytest.mark.parametrize("runs", [RUNS, MANY])
def test_replays_wait_for_their_own_copies(records: HostRecords, runs: list[Run]) -> None:
    kit = Kit(records)
    graph, gates = captured(kit), kit.pipeline.layer_gates
    assert gates is not None
    for step_id in range(100):
        kit.poison()
        kit.out.zero_()
        assert not gates.are_armed(step_id)
        if step_id % 3 == 0:
            kit.stall_loads()
        load = kit.pipeline.submit_load([runs], step_id)
        assert load.errors == [None]
        assert gates.are_armed(step_id)
        graph.replay()
        kit.finish()
        assert kit.has_read_all(runs)


def test_gates_of_one_work_open_one_after_the_other(records: HostRecords) -> None:
    kit = Kit(records)
    lane, armed = kit.pipeline._lane, [kit.lanes.graph_gate() for _ in range(3)]
    assert isinstance(lane, CudaLane)
    kit.finish()
    gates = lane.submit_parts([stall] * 3, armed, 4)
    assert [gate.armed_for for gate in armed] == [4, 4, 4]
    assert not gates[0].query()
    assert gates[0].wait(PATIENCE_S)
    assert not gates[2].query()
    kit.lanes.compute.wait(gates[2])
    kit.poison()
    assert kit.lanes.compute.record().wait(PATIENCE_S)
    assert [gate.query() for gate in gates] == [True, True, True]


def test_a_gate_that_is_armed_again_does_not_open_early(records: HostRecords) -> None:
    """The event of a group is used again by the next load: an older gate may open later by that."""
    kit = Kit(records)
    for step_id in range(3):
        kit.poison()
        kit.stall_loads()
        first = kit.pipeline.submit_load([RUNS], 2 * step_id)
        gates = list(first.gates)
        kit.stall_loads()
        second = kit.pipeline.submit_load([OTHER], 2 * step_id + 1)
        kit.lanes.compute.wait(gates[0])
        kit.read(0)
        kit.finish()
        assert kit.has_read(0, RUNS)
        assert first.is_done
        assert second.is_done
        assert first.errors == second.errors == [None]


def test_a_replay_that_is_not_armed_reads_poison(records: HostRecords) -> None:
    """The control, and why the runner asks `are_armed` first."""
    kit = Kit(records)
    graph, gates = captured(kit), kit.pipeline.layer_gates
    assert gates is not None
    kit.pipeline.submit_load([RUNS], 1)
    kit.finish()
    kit.poison()
    assert not gates.are_armed(2)
    graph.replay()
    kit.finish()
    assert not any(kit.has_read(layer, RUNS) for layer in range(NUM_LAYERS))


# ---------------------------------------------------------------- beside the steps


def test_a_bulk_load_and_a_save_in_slices(records: HostRecords) -> None:
    kit = Kit(records, window_bytes=16 * PAGE_BYTES)
    kit.poison()
    stall()
    load = kit.pipeline.submit_bulk(RUNS)
    assert not load.is_done
    kit.until(lambda: load.is_done)
    for layer in range(NUM_LAYERS):
        kit.read(layer)
    kit.finish()
    assert load.error is None
    assert kit.has_read_all(RUNS)
    for layer, rows in enumerate(kit.rows):
        rows[150:170] = layer + 1
    save = kit.pipeline.submit_save([(120, 150, 20)], kit.pipeline.record_compute())
    kit.until(lambda: save.is_done)
    assert save.error is None
    right = torch.arange(1, NUM_LAYERS + 1, dtype=torch.uint8)[None, :, None]
    assert torch.equal(kit.records[120:140], right.expand(20, -1, PAGE_BYTES))


def test_after_a_fence_a_step_may_overwrite_and_the_host_waits_for_nothing(
    records: HostRecords,
) -> None:
    kit = Kit(records)
    for rows in kit.rows:
        rows[150:170] = 9
    kit.finish()
    kit.pipeline._store.lane.submit(stall)
    save = kit.pipeline.submit_save([(120, 150, 20)], kit.pipeline.record_compute())
    assert save.num_fed
    kit.pipeline.fence(save)
    kit.poison()
    assert not save.is_done
    kit.until(lambda: save.is_done)
    assert save.error is None
    assert bool((kit.records[120:140] == 9).all())


# ---------------------------------------------------------------- the worker side


class WorkerKit:
    """PipelineWorker on the device, and steps without a model."""

    def __init__(self) -> None:
        self.layers = page_layers()
        host_bytes = NUM_RECORDS * NUM_LAYERS * PAGE_BYTES
        self.worker = PipelineWorker(PipelineOptions(host_bytes=host_bytes), ThreadLanes())
        self.worker.register({f"layer{i}": pages for i, pages in enumerate(self.layers)})
        self.step_id = 0

    def fill(self, block: int, count: int, value: int) -> None:
        for pages in self.layers:
            pages.view(torch.uint8)[block : block + count] = value

    def has(self, block: int, count: int, value: int) -> bool:
        return all(bool((as_bytes(p)[block : block + count] == value).all()) for p in self.layers)

    def step(self, num_tokens: int = 0, **orders: Any) -> tuple[set[str], set[int], Any]:
        """(received, invalid, report)."""
        self.step_id += 1
        metadata = PipelineMetadata(
            self.step_id,
            num_tokens=num_tokens,
            timed_pairs=10 * num_tokens if num_tokens else None,
            **orders,
        )
        self.worker.handle_preemptions(metadata)
        self.worker.start(metadata)
        for layer in range(NUM_LAYERS):
            self.worker.wait_for_layer(f"layer{layer}")
        stall(1000)
        self.worker.finish_forward()
        _, received = self.worker.get_finished(set())
        return received or set(), self.worker.take_invalid(), self.worker.report()

    def until_reported(self, found: Callable[[set[str], Any], bool]) -> None:
        end = time.monotonic() + PATIENCE_S
        while True:
            received, invalid, report = self.step()
            assert not invalid
            if found(received, report):
                return
            assert time.monotonic() < end
            time.sleep(0.0005)


def test_what_was_saved_comes_back_in_both_ways_and_times_are_reported() -> None:
    kit = WorkerKit()
    handshake = kit.worker.handshake()
    assert handshake.num_records == NUM_RECORDS
    assert handshake.load_bytes_per_s > 1e9
    kit.fill(20, 8, 33)
    *_, report = kit.step(saves=(Save(1, (RecordRun(4, 20, 8),)),))
    if report is None or 1 not in report.copied:
        kit.until_reported(lambda received, report: report is not None and 1 in report.copied)
    kit.fill(20, 80, 255)
    kit.step(loads=(Load(1, "a", (RecordRun(4, 40, 8),), is_async=False),))
    assert kit.has(40, 8, 33)
    kit.step(loads=(Load(2, "b", (RecordRun(4, 60, 8),), is_async=True),))
    if not kit.has(60, 8, 33):
        kit.until_reported(lambda received, report: "b" in received)
    assert kit.has(60, 8, 33)
    assert kit.has(20, 8, 255)
    *_, first = kit.step(num_tokens=5)
    torch.cuda.synchronize()
    *_, second = kit.step()
    samples = [one for report in (first, second) if report is not None for one in report.steps]
    ((num_tokens, num_context, seconds),) = samples
    assert (num_tokens, num_context) == (5, 50)
    assert 0 < seconds < 1
    kit.worker.close()


# ---------------------------------------------------------------- how fast


class Shape(NamedTuple):
    """Of the KV of a model."""

    num_layers: int
    page_bytes: int


LARGE, SMALL = Shape(32, 64 << 10), Shape(30, 12 << 10)
"""8B models, and the default model."""
POOL = 1024
"""Records, and blocks beside the null block: twice as many as a long prompt has."""
PROMPT = 512
"""8,192 tokens: with the large shape 1 GiB."""
ROUNDS = 5


class Timed(NamedTuple):
    """One load or save of all layers."""

    seconds: float
    """On the device."""
    submit_s: float
    """Host time."""


class Link:
    """Records and pages of any shape, in one pinned memory and one on the device."""

    def __init__(self) -> None:
        begin = time.perf_counter()
        size = POOL * LARGE.num_layers * LARGE.page_bytes
        self.records = HostRecords.allocate(size, LARGE, device())
        self.allocated_s = time.perf_counter() - begin
        self._pages = torch.zeros(size + (size >> 8), dtype=torch.uint8, device="cuda")
        self._streams = CudaStreams(device())
        self._stream: Any = self._streams.stream(is_urgent=True)

    def of_shape(self, shape: Shape) -> tuple[Tensor, list[Tensor]]:
        """Records, and pages of each layer."""
        num_bytes = shape.num_layers * shape.page_bytes
        records = self.records.tensor.view(-1)[: POOL * num_bytes].view(POOL, *shape)
        pages = self._pages[: (POOL + 1) * num_bytes].view(shape[0], POOL + 1, shape[1])
        return records, list(pages)

    def timed(self, queue: Callable[[], object]) -> Timed:
        """`queue` runs with a stream of its own. What it returns is kept until that has ended."""
        torch.cuda.synchronize()
        begin, end = timing_event(), timing_event()
        with self._streams.on(self._stream):
            begin.record()
            began = time.perf_counter()
            kept = queue()
            submit_s = time.perf_counter() - began
            end.record()
        wait_for(end)
        del kept
        return Timed(begin.elapsed_time(end) / 1e3, submit_s)

    def at_once(self, num_bytes: int, *, loads: bool) -> float:
        """Bytes per second of one long copy."""

        def queue() -> None:
            kept, pages = self.records.tensor.view(-1)[:num_bytes], self._pages[:num_bytes]
            target, source = (pages, kept) if loads else (kept, pages)
            target.copy_(source, non_blocking=True)

        return num_bytes / statistics.median(self.timed(queue).seconds for _ in range(ROUNDS))

    def beside_matmuls(self, queue: Callable[[], object] | None) -> tuple[float, float, float]:
        """(milliseconds of a product of 4096^3 in bfloat16, those of the copies, and by how much
        the copies outlasted the products), the products beside what `queue` queues."""
        a = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
        out = torch.empty_like(a)
        torch.mm(a, a, out=out)
        torch.cuda.synchronize()
        begin, end, copied, started = (timing_event() for _ in range(4))
        kept = None
        with self._streams.on(self._stream):
            started.record()
            if queue is not None:
                kept = queue()
            copied.record()
        begin.record()
        for _ in range(50):
            torch.mm(a, a, out=out)
        end.record()
        wait_for(end)
        wait_for(copied)
        del kept
        outlasted = end.elapsed_time(copied)
        return begin.elapsed_time(end) / 50, started.elapsed_time(copied), outlasted


def timing_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def wait_for(event: Any) -> None:
    """For a limited time."""
    end = time.monotonic() + PATIENCE_S
    while not event.query():
        assert time.monotonic() < end
        time.sleep(0.0002)


@pytest.fixture(scope="module")
def link() -> Iterator[Link]:
    made = Link()
    print(f"\n{made.records.num_records} records made in {made.allocated_s:.2f} s")
    yield made
    made.records.close()


def pooled_runs(num_runs: int) -> list[Run]:
    """Runs of equal length, somewhere in the pool and somewhere among the records."""
    rng, count = random.Random(num_runs), PROMPT // num_runs
    slots = range(POOL // count)
    records, blocks = rng.sample(slots, num_runs), rng.sample(slots, num_runs)
    return [(r * count, 1 + b * count, count) for r, b in zip(records, blocks, strict=True)]


def queue_all(copies: PageCopies, runs: list[Run], *, loads: bool) -> Runs:
    """All layers."""
    prepared = copies.prepare(runs)
    for layer in range(copies.num_layers):
        (copies.load if loads else copies.save)(layer, prepared)
    return prepared


@pytest.mark.parametrize("shape", [LARGE, SMALL])
@pytest.mark.parametrize("loads", [True, False])
def test_which_way_is_how_fast_for_how_many_runs(link: Link, shape: Shape, loads: bool) -> None:
    """Printed. Judged is the kernel, for single pages of the large shape."""
    ways = {way: copies_by(way, *link.of_shape(shape)) for way in CopyWay}
    at_once = link.at_once(PROMPT * shape.num_layers * shape.page_bytes, loads=loads)
    name = f"{shape.num_layers} layers, pages of {shape.page_bytes >> 10} KiB"
    print(f"\n{'loads' if loads else 'saves'}, {name}: one long copy {at_once / 1e9:.1f} GB/s")
    of_kernel = 0.0
    for num_runs in (1, 4, 16, 24, 32, 64, 112, 512):
        runs, figures = pooled_runs(num_runs), []
        num_bytes = sum(n for *_, n in runs) * shape.num_layers * shape.page_bytes
        for way, copies in ways.items():
            queue = _queues(copies, runs, loads=loads)
            rounds = [link.timed(queue) for _ in range(ROUNDS + 1)][1:]  # the first one warms up
            seconds = statistics.median(one.seconds for one in rounds)
            submit_s = statistics.median(one.submit_s for one in rounds)
            share = num_bytes / seconds / at_once
            if way is CopyWay.GATHER:
                of_kernel = share
            figures.append(
                f"{way.name.lower()} {num_bytes / seconds / 1e9:5.1f} GB/s ({share:.2f}),"
                f" submitted in {submit_s * 1e3:6.2f} ms"
            )
        print(f"{num_runs:4d} runs: {'; '.join(figures)}")
    assert shape is SMALL or of_kernel >= 0.4, "something is wrong with it; the rest is printed"


def _queues(copies: PageCopies, runs: list[Run], *, loads: bool) -> Callable[[], Runs]:
    return lambda: queue_all(copies, runs, loads=loads)


TILES = [
    GATHER_TILES,
    GatherTiles(4, 32 << 10, 8),
    GatherTiles(4, 64 << 10, 16),
    GatherTiles(8, 16 << 10, 8),
    GatherTiles(8, 16 << 10, 4),
    GatherTiles(16, 16 << 10, 4),
    GatherTiles(16, 16 << 10, 8),
    GatherTiles(32, 16 << 10, 4),
]


def test_how_fast_with_which_tiles_and_how_much_that_slows_down_matrix_products(
    link: Link,
) -> None:
    """Printed, for single pages of the large shape. The first line is what is used."""
    records, layers = link.of_shape(LARGE)
    num_bytes = PROMPT * LARGE.num_layers * LARGE.page_bytes
    alone_ms = statistics.median(link.beside_matmuls(None)[0] for _ in range(ROUNDS))
    strided = PageCopies(records, layers, most_strided_runs=NEVER)
    arms: list[tuple[str, list[Callable[[], object]]]] = [
        (
            f"strided, {num_runs} runs",
            [_queues(strided, pooled_runs(num_runs), loads=loads) for loads in (True, False)],
        )
        for num_runs in (1, 16)
    ]
    for tiles in TILES:
        gather = PageGather(records, layers, tiles=tiles)
        name = f"{tiles.programs} programs x {tiles.num_warps} warps x {tiles.tile_bytes >> 10} KiB"
        arms.append((name, [_gathers(gather, loads=loads) for loads in (True, False)]))
    print(f"\na product of 4096^3 alone: {alone_ms:.3f} ms")
    for name, directions in arms:
        figures = []
        for what, queue in zip(("load", "save"), directions, strict=True):
            alone = statistics.median(link.timed(queue).seconds for _ in range(ROUNDS))
            beside = [link.beside_matmuls(queue) for _ in range(ROUNDS)]
            slower = statistics.median(one[0] for one in beside) / alone_ms
            copied_ms = statistics.median(one[1] for one in beside)
            outlasted = min(one[2] for one in beside)
            figures.append(
                f"{what} {num_bytes / alone / 1e9:5.1f} GB/s, beside products"
                f" {num_bytes / copied_ms / 1e6:5.1f}, products x{slower:.3f}"
                f"{'' if outlasted > 0 else ' (not all of them beside it)'}"
            )
        print(f"{name:32s}: {'; '.join(figures)}")


def _gathers(gather: PageGather, *, loads: bool) -> Callable[[], object]:
    runs = pooled_runs(PROMPT)

    def queue() -> object:
        pairs = gather.pairs(runs)
        for layer in range(LARGE.num_layers):
            (gather.load if loads else gather.save)(layer, pairs)
        return pairs

    return queue


class LongPrompt(NamedTuple):
    """1 GiB of records, and a pipeline to its pages."""

    pipeline: LayerPipeline
    lanes: CudaLanes


@pytest.fixture
def long_prompt(link: Link) -> Iterator[LongPrompt]:
    lanes = CudaLanes(CudaStreams(device()))
    made = LongPrompt(LayerPipeline.over(*link.of_shape(LARGE), lanes), lanes)
    yield made
    assert made.pipeline.close(PATIENCE_S)


@pytest.mark.parametrize("num_runs", [1, 16, 112, 512])
def test_a_long_prompt_loads_and_this_is_how_fast(num_runs: int, long_prompt: LongPrompt) -> None:
    """Printed; judged is only that one run is submitted in less than a millisecond."""
    submits, rates, runs = [], [], pooled_runs(num_runs)
    for step_id in range(6):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        load = long_prompt.pipeline.submit_load([runs], step_id)
        submits.append(time.perf_counter() - begin)
        assert load.gates[-1].wait(PATIENCE_S)
        stats = load.stats
        assert load.errors == [None]
        assert stats.gb_per_s is not None
        rates.append(stats.gb_per_s)
        way = next(iter(stats.ways)).name
    submit_s = sorted(submits)[2]
    print(
        f"\n{num_runs} runs: {way} {sorted(rates)[3]:.1f} GB/s, submitted in"
        f" {submit_s * 1e3:.2f} ms, {stats.num_copies} copies"
    )
    assert num_runs > 1 or submit_s < 1e-3
