"""Copies between records and pages, byte by byte, in every way that a CPU can show."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from host_memcpy import HostBatch, HostMemcpy
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from interlace.engine.errors import ConnectorError
from interlace.layers import cuda_copies
from interlace.layers.page_copies import CopyWay, PageCopies, Run, cut_runs

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


class FakeRuntime:
    """`cuda.bindings.runtime`, whose copies fail."""

    class cudaMemcpyKind:  # noqa: N801
        cudaMemcpyHostToDevice = 1  # noqa: N815
        cudaMemcpyDeviceToHost = 2  # noqa: N815

    @staticmethod
    def cudaGetLastError() -> tuple[int]:  # noqa: N802
        return (700,)

    @staticmethod
    def cudaMemcpy2DAsync(*args: Any) -> tuple[int]:  # noqa: N802
        return (700,)


def test_a_copy_that_cuda_refuses_says_so() -> None:
    memcpy = cuda_copies._CudaMemcpy2D(FakeRuntime, torch.device("cuda", 0))
    with pytest.raises(ConnectorError, match=r"cudaMemcpy2DAsync of 2 rows of 64 bytes .* 700"):
        memcpy.copy(0, 64, 0, 64, 64, 2, 0, to_device=True)


def test_without_a_gpu_package_there_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", missing)
    assert cuda_copies.cuda_memcpy_2d(torch.device("cpu")) is None


class FakeDriver:
    """Of one version or the other; answers with what it is told."""

    def __init__(self, name: str, code: int) -> None:
        self.calls: list[tuple[Any, ...]] = []

        def call(*args: Any) -> int:
            self.calls.append(args)
            return code

        setattr(self, name, call)


@pytest.mark.parametrize(
    ("name", "num_arguments"), [("cuMemcpyBatchAsync_v2", 8), ("cuMemcpyBatchAsync", 9)]
)
def test_a_batch_is_one_call_of_the_driver(
    name: str, num_arguments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
    driver: Any = FakeDriver(name, 0)
    batch = cuda_copies._CudaMemcpyBatch(driver, torch.device("cuda", 0))
    targets, sources = np.arange(3, dtype=np.uint64), np.arange(3, 6, dtype=np.uint64)
    batch.copy(targets, sources, 64)
    (arguments,) = driver.calls
    assert len(arguments) == num_arguments
    assert arguments[0].value == targets.ctypes.data
    assert arguments[1].value == sources.ctypes.data
    assert (arguments[3].value, arguments[-1].value) == (3, 77)
    refusing: Any = FakeDriver(name, 1)
    with pytest.raises(ConnectorError, match="of 3 copies of 64 bytes failed with error 1"):
        cuda_copies._CudaMemcpyBatch(refusing, torch.device("cuda", 0)).copy(targets, sources, 64)


def test_a_driver_without_batches_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    assert cuda_copies.cuda_memcpy_batch(torch.device("cuda", 0)) is None

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", missing)
    assert cuda_copies.cuda_memcpy_batch(torch.device("cuda", 0)) is None
