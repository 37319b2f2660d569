"""The kernel that copies pages between records and layers, under Triton's interpreter, against a
loop; and `PageCopies` with it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from host_memcpy import HostMemcpy
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from interlace.connectors.pipeline.layer_groups import LayerGroups
from interlace.connectors.pipeline.worker_loads import PipelinedLoad
from interlace.connectors.pipeline.worker_times import ClockStopwatch
from interlace.engine.errors import ConnectorError
from interlace.layers import page_copies
from interlace.layers.kernels.page_gather import GATHER_TILES, GatherTiles, PageGather
from interlace.layers.kernels.toolchain import INTERPRETED
from interlace.layers.page_copies import MOST_STRIDED_RUNS, CopyWay, PageCopies, Run
from interlace.layers.record_space import RecordSpace

interpreted = pytest.mark.skipif(not INTERPRETED, reason="set TRITON_INTERPRET=1 to run these")

NUM_RECORDS, NUM_BLOCKS, NUM_LAYERS = 20, 24, 3
NEVER = 1 << 60


def filled(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def layers_of(page_bytes: int, gap: int, shift: int) -> list[Tensor]:
    """uint8 [blocks, page_bytes]; `gap` bytes between pages, `shift` bytes before the first one."""
    memory = [filled(shift + NUM_BLOCKS * (page_bytes + gap)) for _ in range(NUM_LAYERS)]
    return [bytes_[shift:].view(NUM_BLOCKS, page_bytes + gap)[:, :page_bytes] for bytes_ in memory]


def behind(rows: Tensor) -> Tensor:
    """All memory in which rows lie, also what is between them. A copy."""
    storage = rows.untyped_storage()
    return torch.tensor([], dtype=torch.uint8).set_(storage).clone()


def copy_twin(layer: int, records: Tensor, rows: Tensor, runs: Sequence[Run], loads: bool) -> None:
    """What a copy comes to, page by page."""
    for record, block, count in runs:
        for i in range(count):
            if loads:
                rows[block + i] = records[record + i, layer]
            else:
                records[record + i, layer] = rows[block + i]


def random_runs(seed: int, most: int) -> list[Run]:
    """One at least. No block and no record is in two of them."""
    rng = random.Random(seed)
    runs: list[Run] = []
    blocks, records = list(range(1, NUM_BLOCKS)), list(range(NUM_RECORDS))
    while blocks and records and (not runs or rng.random() < 0.9):
        block, record, count = rng.choice(blocks), rng.choice(records), 0
        while count < most and block + count in blocks and record + count in records:
            blocks.remove(block + count)
            records.remove(record + count)
            count += 1
        runs.append((record, block, count))
    return runs


@interpreted
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    most=st.sampled_from([1, 3, NUM_RECORDS]),
    page_bytes=st.sampled_from([2, 8, 36, 64, 72, 192, 1024, 1536]),
    gap=st.sampled_from([0, 1, 8, 64]),
    shift=st.sampled_from([0, 4, 8, 16]),
    tiles=st.sampled_from([GATHER_TILES, GatherTiles(3, 64, 1), GatherTiles(1, 256, 2)]),
    layer=st.integers(0, NUM_LAYERS - 1),
    loads=st.booleans(),
)
def test_the_kernel_copies_the_right_bytes_and_no_others(
    seed: int,
    most: int,
    page_bytes: int,
    gap: int,
    shift: int,
    tiles: GatherTiles,
    layer: int,
    loads: bool,
) -> None:
    runs = random_runs(seed, most)
    records, layers = filled(NUM_RECORDS, NUM_LAYERS, page_bytes), layers_of(page_bytes, gap, shift)
    before, memory = records.clone(), [behind(rows) for rows in layers]
    gather = PageGather(records, layers, tiles=tiles)
    assert torch.equal(records, before), "to compile it wrote to records"
    assert all(map(torch.equal, map(behind, layers), memory)), "to compile it wrote to pages"

    pairs = gather.pairs(runs)
    wanted_rows = memory[layer][shift:].view(NUM_BLOCKS, page_bytes + gap)[:, :page_bytes]
    copy_twin(layer, before, wanted_rows, runs, loads)
    (gather.load if loads else gather.save)(layer, pairs)
    assert pairs.count == sum(count for *_, count in runs)
    assert torch.equal(records, before)
    assert all(map(torch.equal, map(behind, layers), memory))


@interpreted
@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    page_bytes=st.sampled_from([2, 8, 36, 64, 1536]),
    all_layers=st.booleans(),
)
def test_records_beside_the_others_are_loaded_too(
    seed: int, page_bytes: int, all_layers: bool
) -> None:
    """Whether they lie before or behind them in memory."""
    rng = random.Random(seed)
    space = RecordSpace(filled(NUM_RECORDS, NUM_LAYERS, page_bytes))
    mapped = [filled(count, NUM_LAYERS, page_bytes).numpy() for count in (3, 1, 7)]
    firsts = [space.map(rows) for rows in mapped]
    lies = {
        first + i: row
        for first, rows in zip(firsts, mapped, strict=True)
        for i, row in enumerate(rows)
    }
    lies |= {i: space.host[i].numpy() for i in range(NUM_RECORDS)}
    layers = layers_of(page_bytes, 0, 0)
    wanted = [rows.clone() for rows in layers]
    chosen = rng.sample(sorted(lies), rng.randint(1, 20))
    for block, record in enumerate(chosen, 1):
        for layer, rows in enumerate(wanted):
            rows[block] = torch.from_numpy(lies[record][layer].copy())
    gather = PageGather(space, layers)
    pairs = gather.pairs([(record, block, 1) for block, record in enumerate(chosen, 1)])
    if all_layers:
        gather.copy_layers(range(NUM_LAYERS), pairs, loads=True)
    else:
        for layer in range(NUM_LAYERS):
            gather.load(layer, pairs)
    assert all(map(torch.equal, layers, wanted))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("cross_layers", [False, True])
def test_pages_of_every_type_go_and_come_back(dtype: torch.dtype, cross_layers: bool) -> None:
    """Through `PageCopies`: many runs, saved from some blocks and loaded into others."""
    shape = (2, 4, 2, 8)
    page_bytes = 128 * dtype.itemsize
    memory = filled(NUM_LAYERS * NUM_BLOCKS * page_bytes).view(dtype)
    if cross_layers:
        layers = list(memory.view(NUM_BLOCKS, NUM_LAYERS, *shape).unbind(1))
    else:
        layers = list(memory.view(NUM_LAYERS, NUM_BLOCKS, *shape))
    records = torch.zeros(NUM_RECORDS, NUM_LAYERS, page_bytes, dtype=torch.uint8)
    copies = copies_of(records, layers, most_strided_runs=8)
    order = random.Random(5).sample(range(NUM_RECORDS), 11)
    saved = copies.prepare([(record, 1 + i, 1) for i, record in enumerate(order)])
    loaded = copies.prepare([(record, 12 + i, 1) for i, record in enumerate(order)])
    for layer in range(NUM_LAYERS):
        before = layers[layer].view(torch.uint8).clone()
        assert copies.save(layer, saved) == (CopyWay.GATHER, 1, 11 * page_bytes)
        assert copies.load(layer, loaded) == (CopyWay.GATHER, 1, 11 * page_bytes)
        before[12:23] = before[1:12]
        assert torch.equal(layers[layer].view(torch.uint8), before)
    untouched = [record for record in range(NUM_RECORDS) if record not in order]
    assert not records[untouched].any()


def copies_of(records: Tensor, layers: Sequence[Tensor], most_strided_runs: int = 0) -> PageCopies:
    """More runs than that are copied by the kernel."""
    return PageCopies(
        records,
        layers,
        memcpy=HostMemcpy(),
        most_strided_runs=most_strided_runs,
        strided_run_bytes=NEVER,
    )


def single_blocks(num_runs: int) -> list[Run]:
    return [(i, NUM_BLOCKS - 1 - i, 1) for i in range(num_runs)]


@interpreted
def test_few_runs_are_strided_copies_and_many_are_a_kernel() -> None:
    records, layers = filled(NUM_RECORDS, NUM_LAYERS, 64), layers_of(64, 0, 0)
    copies = PageCopies(records, layers, memcpy=HostMemcpy())
    few = copies.load(0, copies.prepare(single_blocks(MOST_STRIDED_RUNS)))
    assert few == (CopyWay.STRIDED, MOST_STRIDED_RUNS, MOST_STRIDED_RUNS * 64)
    many = copies.load(1, copies.prepare(single_blocks(MOST_STRIDED_RUNS + 1)))
    assert many == (CopyWay.GATHER, 1, (MOST_STRIDED_RUNS + 1) * 64)
    assert copies.load(2, copies.prepare([])) == (CopyWay.STRIDED, 0, 0)


@interpreted
def test_without_the_driver_the_kernel_copies_all() -> None:
    records, layers = filled(NUM_RECORDS, NUM_LAYERS, 64), layers_of(64, 0, 0)
    copies = PageCopies(records, layers, memcpy=HostMemcpy())
    copies._memcpy = None  # as on a GPU without `cuda.bindings`
    before = layers[1].clone()
    assert copies.load(1, copies.prepare([(3, 5, 4)])) == (CopyWay.GATHER, 1, 4 * 64)
    copy_twin(1, records, before, [(3, 5, 4)], loads=True)
    assert torch.equal(layers[1], before)
    assert copies.save(1, copies.prepare([])) == (CopyWay.GATHER, 1, 0)


@interpreted
def test_what_is_uploaded_once_serves_all_layers_and_both_directions() -> None:
    records, layers = filled(NUM_RECORDS, NUM_LAYERS, 64), layers_of(64, 0, 0)
    copies = copies_of(records, layers)
    runs = copies.prepare(single_blocks(3))
    assert runs.pairs is None
    copies.load(0, runs)
    pairs = runs.pairs
    copies.save(1, runs)
    copies.load(2, runs)
    assert runs.pairs is pairs


def test_runs_that_do_not_fit_are_refused_whatever_the_way() -> None:
    copies = copies_of(filled(NUM_RECORDS, NUM_LAYERS, 64), layers_of(64, 0, 0))
    with pytest.raises(ConnectorError, match="does not fit 20 records and blocks 1 to 23"):
        copies.prepare([*single_blocks(2), (NUM_RECORDS - 1, 1, 2)])


def test_who_has_neither_the_driver_nor_kernels_hears_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_copies, "cuda_memcpy_2d", lambda device: None)
    monkeypatch.setattr(page_copies, "_page_gather", lambda records, rows: None)
    meta = [torch.zeros(4, 64, dtype=torch.uint8, device="meta")]
    with pytest.raises(ConnectorError, match="install cuda-bindings, or Triton"):
        PageCopies(torch.zeros(4, 1, 64, dtype=torch.uint8), meta)


@interpreted
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    most=st.sampled_from([1, 3, NUM_RECORDS]),
    page_bytes=st.sampled_from([2, 8, 36, 64, 192, 1536]),
    gap=st.sampled_from([0, 1, 16]),
    first=st.integers(0, NUM_LAYERS - 1),
    loads=st.booleans(),
)
def test_several_layers_in_one_go(
    seed: int, most: int, page_bytes: int, gap: int, first: int, loads: bool
) -> None:
    records, layers = filled(NUM_RECORDS, NUM_LAYERS, page_bytes), layers_of(page_bytes, gap, 0)
    runs = random_runs(seed, most)
    right_records, right_layers = records.clone(), [rows.clone() for rows in layers]
    for layer in range(first, NUM_LAYERS):
        copy_twin(layer, right_records, right_layers[layer], runs, loads)
    between = [behind(rows) for rows in layers]
    copies = copies_of(records, layers)
    copy = copies.load_layers if loads else copies.save_layers
    (copied,) = copy(range(first, NUM_LAYERS), copies.prepare(runs))
    num_blocks = sum(count for _, _, count in runs)
    assert copied == (CopyWay.GATHER, 1, (NUM_LAYERS - first) * num_blocks * page_bytes)
    assert torch.equal(records, right_records)
    for rows, right, before in zip(layers, right_layers, between, strict=True):
        assert torch.equal(rows, right)
        if not loads:
            assert torch.equal(behind(rows), before)


@interpreted
@pytest.mark.parametrize("are_alike", [True, False])
def test_a_load_within_a_step_is_one_kernel_a_group(are_alike: bool) -> None:
    num_layers = NUM_LAYERS + 1  # the two in the middle are a group
    records, layers = filled(NUM_RECORDS, num_layers, 64), layers_of(64, 16, 0)
    layers.insert(2, layers_of(64, 16 if are_alike else 32, 0)[0])
    parts = [[(2 * i, 20 - 2 * i, 1) for i in range(6)], [(13, 3, 2), (17, 21, 1)]]
    right = [rows.clone() for rows in layers]
    for layer, rows in enumerate(right):
        for part in parts:
            copy_twin(layer, records, rows, part, loads=True)
    groups, watch = LayerGroups(num_layers, 3), ClockStopwatch(lambda: 0.0)
    load = PipelinedLoad(copies_of(records, layers), [*map(tuple, parts)], groups, watch)
    for group in range(load.num_groups):
        load.copy_group(group)
        copied = groups.ranges[group].stop
        assert all(map(torch.equal, layers[:copied], right[:copied]))
    assert load.errors == [None, None]
    assert load.stats.ways == {CopyWay.GATHER}
    assert load.stats.num_copies == len(parts) * 3
    assert load.stats.num_bytes == num_layers * (6 + 3) * 64


def test_strided_layers_come_one_after_the_other() -> None:
    records, layers = filled(NUM_RECORDS, NUM_LAYERS, 64), layers_of(64, 0, 0)
    copies = PageCopies(records, layers, memcpy=HostMemcpy(), strided_run_bytes=64)
    copied = list(copies.load_layers(range(NUM_LAYERS), copies.prepare([(0, 1, 9)])))
    assert copied == [(CopyWay.STRIDED, 1, 9 * 64)] * NUM_LAYERS
