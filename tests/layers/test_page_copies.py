"""Copies between records and pages, byte by byte, in every way that a CPU can show."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_memcpy import HostBatch, HostDriver, HostMemcpy, on_a_stream
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from interlace.engine.errors import ConnectorError
from interlace.layers import cuda_copies, page_copies
from interlace.layers.page_copies import (
    BATCHED_RUN_BLOCKS,
    LEAST_STRIDED_BATCH,
    STRIDED_BATCH_RUN_BLOCKS,
    CopyWay,
    PageCopies,
    Run,
    cut_runs,
)

NUM_RECORDS, NUM_BLOCKS, NUM_LAYERS = 40, 50, 3
PAGE_SHAPE = (2, 2, 2, 4)
PAGE_BYTES = 64


def filled(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def new_records() -> Tensor:
    return filled(NUM_RECORDS, NUM_LAYERS, PAGE_BYTES)


def layers_of(kind: str) -> list[Tensor]:
    if kind == "cross":
        memory = filled(NUM_BLOCKS, NUM_LAYERS, PAGE_BYTES // 2).view(torch.bfloat16)
        memory = memory.view(NUM_BLOCKS, NUM_LAYERS, 2, 2, 2, 2)
        return list(memory.permute(1, 0, 2, 3, 4, 5))
    return [
        filled(NUM_BLOCKS, PAGE_BYTES).view(torch.bfloat16).view(NUM_BLOCKS, *PAGE_SHAPE)
        for _ in range(NUM_LAYERS)
    ]


def as_bytes(pages: Tensor) -> Tensor:
    return pages.contiguous().view(torch.uint8).view(len(pages), -1)


@st.composite
def some_runs(draw: st.DrawFn) -> list[Run]:
    """No block and no record is in two of them."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    most = draw(st.sampled_from([1, 3, 40]))
    blocks, records = list(range(1, NUM_BLOCKS)), list(range(NUM_RECORDS))
    if draw(st.booleans()):
        rng.shuffle(blocks)
    if draw(st.booleans()):
        rng.shuffle(records)
    pairs = list(zip(records, blocks, strict=False))[: draw(st.integers(0, NUM_RECORDS))]
    runs: list[Run] = []
    for record, block in pairs:
        if runs:
            first, first_block, count = runs[-1]
            if (first + count, first_block + count) == (record, block) and count < most:
                runs[-1] = (first, first_block, count + 1)
                continue
        runs.append((record, block, 1))
    return runs


def copies_of(kind: str, records: Tensor, layers: list[Tensor]) -> PageCopies:
    if kind == "host":
        return PageCopies(records, layers)
    if kind == "batch":
        return PageCopies(
            records, layers, memcpy=HostMemcpy(), batch=HostBatch(), most_strided_runs=0
        )
    return PageCopies(records, layers, memcpy=HostMemcpy(), most_strided_runs=7)


@settings(max_examples=60, deadline=None)
@given(
    runs=some_runs(),
    memory=st.sampled_from(["layers", "cross"]),
    kind=st.sampled_from(["host", "device", "batch"]),
    layer=st.integers(0, NUM_LAYERS - 1),
    loads=st.booleans(),
)
def test_the_right_bytes_and_no_others_are_copied(
    runs: list[Run], memory: str, kind: str, layer: int, loads: bool
) -> None:
    page_bytes = PAGE_BYTES if memory == "layers" else PAGE_BYTES // 2
    records, layers = filled(NUM_RECORDS, NUM_LAYERS, page_bytes), layers_of(memory)
    wanted_records, wanted = records.clone(), [as_bytes(pages).clone() for pages in layers]
    for record, block, count in runs:
        for i in range(count):
            if loads:
                wanted[layer][block + i] = records[record + i, layer]
            else:
                wanted_records[record + i, layer] = wanted[layer][block + i]
    copies = copies_of(kind, records, layers)
    prepared = copies.prepare(runs)
    copied = (copies.load if loads else copies.save)(layer, prepared)
    assert torch.equal(records, wanted_records)
    for pages, right in zip(layers, wanted, strict=True):
        assert torch.equal(as_bytes(pages), right)
    assert copied.num_bytes == sum(count for *_, count in runs) * page_bytes


@settings(max_examples=40, deadline=None)
@given(
    runs=some_runs(),
    memory=st.sampled_from(["layers", "cross"]),
    first=st.integers(0, NUM_LAYERS - 1),
    loads=st.booleans(),
)
def test_a_batch_copies_several_layers_in_one_call(
    runs: list[Run], memory: str, first: int, loads: bool
) -> None:
    page_bytes = PAGE_BYTES if memory == "layers" else PAGE_BYTES // 2
    records, layers = filled(NUM_RECORDS, NUM_LAYERS, page_bytes), layers_of(memory)
    twin_records, twin_layers = records.clone(), [pages.clone() for pages in layers]
    batch = HostBatch()
    copies = PageCopies(
        records, layers, memcpy=HostMemcpy(), batch=batch, most_strided_runs=0,
        strided_run_bytes=1 << 30,
    )  # fmt: skip
    twin = PageCopies(twin_records, twin_layers)
    chosen = range(first, NUM_LAYERS)
    prepared, twin_runs = copies.prepare(runs), twin.prepare(runs)
    for _ in range(2):
        copied = list((copies.load_layers if loads else copies.save_layers)(chosen, prepared))
        for layer in chosen:
            (twin.load if loads else twin.save)(layer, twin_runs)
        assert torch.equal(records, twin_records)
        assert all(map(torch.equal, map(as_bytes, layers), map(as_bytes, twin_layers)))
    if runs:
        num_pieces = len(chosen) * prepared.num_blocks
        assert copied == [(CopyWay.BATCH, num_pieces, num_pieces * page_bytes)]
        assert batch.num_calls == 2


def strided_in(driver: HostDriver, records: Tensor, layers: list[Tensor]) -> PageCopies:
    """Strided copies only, by a memcpy, or by this stand-in for the driver."""
    stand_in: Any = driver
    return PageCopies(
        records,
        layers,
        memcpy=HostMemcpy(),
        strided_batch=cuda_copies._CudaMemcpy2DBatch(stand_in, torch.device("cuda", 0)),
        strided_run_bytes=0,
    )


@settings(max_examples=60, deadline=None)
@given(
    runs=some_runs(),
    memory=st.sampled_from(["layers", "cross"]),
    name=st.sampled_from(["cuMemcpy3DBatchAsync_v2", "cuMemcpy3DBatchAsync"]),
    chosen=st.sampled_from([range(i, j) for j in range(NUM_LAYERS + 1) for i in range(j)]),
    loads=st.booleans(),
)
def test_many_strided_copies_are_one_call(
    runs: list[Run], memory: str, name: str, chosen: range, loads: bool
) -> None:
    page_bytes = PAGE_BYTES if memory == "layers" else PAGE_BYTES // 2
    records, layers = filled(NUM_RECORDS, NUM_LAYERS, page_bytes), layers_of(memory)
    twin_records, twin_layers = records.clone(), [pages.clone() for pages in layers]
    driver = HostDriver(name)
    copies, twin = strided_in(driver, records, layers), PageCopies(twin_records, twin_layers)
    prepared, twin_runs = copies.prepare(runs), twin.prepare(runs)
    with on_a_stream():
        copied = list((copies.load_layers if loads else copies.save_layers)(chosen, prepared))
    twin_copied = list((twin.load_layers if loads else twin.save_layers)(chosen, twin_runs))
    assert torch.equal(records, twin_records)
    assert all(map(torch.equal, map(as_bytes, layers), map(as_bytes, twin_layers)))
    num_copies = len(chosen) * len(runs)
    is_one_call = num_copies >= LEAST_STRIDED_BATCH
    assert driver.calls == ([num_copies] if is_one_call else [])
    assert len(copied) == (1 if is_one_call else len(chosen))
    for figures in (copied, twin_copied):
        assert {one.way for one in figures} == {CopyWay.STRIDED}
        assert sum(one.num_copies for one in figures) == num_copies
        num_bytes = len(chosen) * prepared.num_blocks * page_bytes
        assert sum(one.num_bytes for one in figures) == num_bytes


@pytest.mark.parametrize("loads", [True, False])
def test_one_layer_is_one_call_if_it_has_many_runs(loads: bool) -> None:
    records, layers = new_records(), layers_of("layers")
    driver = HostDriver("cuMemcpy3DBatchAsync_v2")
    copies = strided_in(driver, records, layers)
    copy = copies.load if loads else copies.save
    runs = [(2 * i, NUM_BLOCKS - 3 - 3 * i, 2) for i in range(LEAST_STRIDED_BATCH)]
    few, many = copies.prepare(runs[:-1]), copies.prepare(runs)
    assert copy(1, few) == (CopyWay.STRIDED, 9, 18 * PAGE_BYTES)
    assert driver.calls == []
    for layer in (1, 2):
        with on_a_stream():
            assert copy(layer, many) == (CopyWay.STRIDED, 10, 20 * PAGE_BYTES)
        for record, block, count in runs:
            kept = records[record : record + count, layer]
            assert torch.equal(as_bytes(layers[layer])[block : block + count], kept)
    assert driver.calls == [10, 10]


def test_a_strided_batch_that_fails_raises_as_it_is_asked_for() -> None:
    driver = HostDriver("cuMemcpy3DBatchAsync_v2", code=1)
    copies = strided_in(driver, new_records(), layers_of("layers"))
    runs = copies.prepare([(i, i + 1, 1) for i in range(4)])
    copied = copies.save_layers(range(NUM_LAYERS), runs)
    assert driver.calls == []
    with on_a_stream(), pytest.raises(ConnectorError, match="error 1"):
        next(copied)


class GivenCopies(PageCopies):
    """Notes what a constructor is given."""

    def __init__(self, records: Tensor, layers: Any, **given: Any) -> None:
        self.given = given


@pytest.mark.parametrize("has_strided_batch", [True, False])
def test_who_copies_how_on_a_gpu(has_strided_batch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = HostBatch()
    strided_batch = object() if has_strided_batch else None
    monkeypatch.setattr(page_copies, "cuda_memcpy_batch", lambda device: batch)
    monkeypatch.setattr(page_copies, "cuda_memcpy_2d_batch", lambda device: strided_batch)
    large, small = (torch.zeros(1, 1, size << 10, dtype=torch.uint8) for size in (64, 12))
    layers: Any = [SimpleNamespace(device=torch.device("cuda", 0))]
    assert GivenCopies.within_steps(large, layers).given == {"strided_batch": strided_batch}
    assert GivenCopies.beside_compute(small, layers).given == {
        "strided_batch": strided_batch,
        "most_strided_runs": 0,
    }
    run_blocks = STRIDED_BATCH_RUN_BLOCKS if has_strided_batch else BATCHED_RUN_BLOCKS
    assert GivenCopies.beside_compute(large, layers).given == {
        "batch": batch,
        "strided_batch": strided_batch,
        "most_strided_runs": 0,
        "strided_run_bytes": run_blocks * (64 << 10),
    }


def test_the_host_asks_for_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuda_memcpy_2d", "cuda_memcpy_2d_batch", "cuda_memcpy_batch"):
        monkeypatch.delattr(page_copies, name)
    for make in (PageCopies, PageCopies.within_steps, PageCopies.beside_compute):
        records, layers = new_records(), layers_of("layers")
        copies = make(records, layers)
        list(copies.load_layers(range(NUM_LAYERS), copies.prepare([(3, 5, 30)])))
        for layer, pages in enumerate(layers):
            assert torch.equal(as_bytes(pages)[5:35], records[3:33, layer])


def test_long_runs_are_strided_where_there_are_batches_too() -> None:
    memcpy, batch = HostMemcpy(), HostBatch()
    copies = PageCopies(
        new_records(), layers_of("layers"), memcpy=memcpy, batch=batch, most_strided_runs=0,
        strided_run_bytes=6 * PAGE_BYTES,
    )  # fmt: skip
    assert copies.prepare([(0, 1, 6)]).way is CopyWay.STRIDED
    assert copies.prepare([(0, 1, 11), (20, 20, 1)]).way is CopyWay.STRIDED
    assert copies.prepare([(0, 1, 10), (20, 20, 1)]).way is CopyWay.BATCH
    assert copies.load(0, copies.prepare([(5, 2, 1)])) == (CopyWay.BATCH, 1, PAGE_BYTES)
    assert (memcpy.num_copies, batch.num_calls) == (0, 1)


def test_without_kernels_many_runs_are_strided_copies_too() -> None:
    """How it is with kernels: `tests/kernels/test_page_gather.py`."""
    memcpy = HostMemcpy()
    copies = PageCopies(new_records(), layers_of("layers"), memcpy=memcpy)
    copies._gather = None  # also where kernels are interpreted
    runs = copies.prepare([(i, NUM_BLOCKS - 1 - i, 1) for i in range(30)])
    assert copies.load(0, runs) == (CopyWay.STRIDED, 30, 30 * PAGE_BYTES)
    assert copies.save(1, runs) == (CopyWay.STRIDED, 30, 30 * PAGE_BYTES)
    assert memcpy.num_copies == 60


@pytest.mark.parametrize("run", [(39, 1, 2), (-1, 1, 1), (0, 0, 1), (0, 49, 2), (0, 1, 0)])
def test_runs_that_lie_outside_are_refused(run: Run) -> None:
    copies = PageCopies(new_records(), layers_of("layers"))
    with pytest.raises(ConnectorError, match=r"does not fit 40 records and blocks 1 to 49"):
        copies.prepare([(0, 1, 1), run])


@pytest.mark.parametrize(
    "records",
    [
        torch.zeros(4, NUM_LAYERS + 1, PAGE_BYTES, dtype=torch.uint8),
        torch.zeros(4, NUM_LAYERS, PAGE_BYTES - 2, dtype=torch.uint8),
        torch.zeros(4, NUM_LAYERS, PAGE_BYTES, dtype=torch.int8),
        torch.zeros(0, NUM_LAYERS, PAGE_BYTES, dtype=torch.uint8),
        torch.zeros(PAGE_BYTES, NUM_LAYERS, 4, dtype=torch.uint8).permute(2, 1, 0),
    ],
)
def test_records_of_something_else_are_refused(records: Tensor) -> None:
    with pytest.raises(ConnectorError, match="allocate them for this model"):
        PageCopies(records, layers_of("layers"))


def test_pages_that_are_no_blocks_are_refused() -> None:
    heads_first = [pages.transpose(2, 3).contiguous().transpose(2, 3) for pages in layers_of("l")]
    for layers in (
        [pages[:, :, :, :, ::2] for pages in layers_of("layers")],
        [pages[:1].expand(NUM_BLOCKS, *PAGE_SHAPE) for pages in layers_of("layers")],
        [torch.zeros(NUM_BLOCKS, 2, 3, 2, 4).transpose(2, 3) for _ in range(NUM_LAYERS)],
        heads_first,
    ):
        with pytest.raises(ConnectorError, match="ask for the layout 'NHD'"):
            PageCopies(new_records(), layers)


def test_layers_that_differ_are_refused() -> None:
    layers = layers_of("layers")
    with pytest.raises(ConnectorError, match="Leave other layers out"):
        PageCopies(new_records(), [*layers[:2], layers[2][:, :1]])


@given(
    counts=st.lists(st.integers(1, 9), max_size=8),
    most=st.integers(1, 12),
)
def test_cutting_keeps_every_block_and_fills_every_piece(counts: list[int], most: int) -> None:
    runs = [(100 * i, 1000 * i, count) for i, count in enumerate(counts)]
    pieces = cut_runs(runs, most)

    def pairs(some: Any) -> list[tuple[int, int]]:
        return [(r + i, b + i) for r, b, n in some for i in range(n)]

    assert [pair for piece in pieces for pair in pairs(piece)] == pairs(runs)
    sizes = [len(pairs(piece)) for piece in pieces]
    assert all(size == most for size in sizes[:-1])
    assert all(0 < size <= most for size in sizes)
