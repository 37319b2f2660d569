"""The driver's copies, with stand-ins for the driver. How it is with a GPU:
`tests/gpu/test_gpu_pipeline_copies.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from host_memcpy import HostDriver, on_a_stream
from torch import Tensor

from interlace.engine.errors import ConnectorError
from interlace.layers import cuda_copies
from interlace.layers.cuda_copies import StridedRows, cuda_memcpy_2d_batch, cuda_memcpy_batch


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


STRIDED_CALLS = ["cuMemcpy3DBatchAsync_v2", "cuMemcpy3DBatchAsync"]


def strided_batch(driver: HostDriver) -> cuda_copies._CudaMemcpy2DBatch:
    stand_in: Any = driver
    return cuda_copies._CudaMemcpy2DBatch(stand_in, torch.device("cuda", 0))


@pytest.mark.parametrize("name", STRIDED_CALLS)
@pytest.mark.parametrize("is_load", [True, False])
def test_a_strided_batch_is_one_call_of_the_driver(name: str, is_load: bool) -> None:
    """[layers, copies]: one side's pitch is that of all, the other's is that of each layer."""
    kept = torch.randint(0, 256, (40, 24), dtype=torch.uint8)
    pages = [torch.randint(0, 256, (40, pitch), dtype=torch.uint8) for pitch in (8, 12)]
    first_kept, first_page = np.array([0, 20, 33]), np.array([30, 0, 11])
    heights = np.array([5, 7, 1])
    right_kept, right_pages = kept.clone(), [rows.clone() for rows in pages]
    for layer, rows in enumerate(right_pages):
        for i, j, count in zip(first_kept, first_page, heights, strict=True):
            one, other = right_kept[i : i + count, 8 * layer :][:, :8], rows[j : j + count, :8]
            (other if is_load else one)[:] = one if is_load else other
    kept_at = kept.data_ptr() + first_kept * 24 + np.array([[0], [8]])
    pitches = np.array([[8], [12]])
    pages_at = np.array([[rows.data_ptr()] for rows in pages]) + first_page * pitches
    sides = [
        StridedRows(kept_at.astype(np.uint64), 24),
        StridedRows(pages_at.astype(np.uint64), pitches.astype(np.uint64)),
    ]
    driver = HostDriver(name)
    source, target = sides if is_load else reversed(sides)
    with on_a_stream():
        batch = strided_batch(driver)
        batch.queue(batch.prepare(target, source, 8, heights.astype(np.uint64)))
    assert driver.calls == [6]
    assert torch.equal(kept, right_kept)
    assert all(map(torch.equal, pages, right_pages))


@pytest.mark.parametrize("name", STRIDED_CALLS)
def test_a_strided_batch_that_cuda_refuses_says_so(name: str) -> None:
    rows = StridedRows(np.arange(3, dtype=np.uint64), 64)
    wanted = r"cuMemcpy3DBatchAsync of 3 copies of rows .* error 700: are the records"
    batch = strided_batch(HostDriver(name, code=700))
    operations = batch.prepare(rows, rows, 64, np.ones(3, np.uint64))
    with on_a_stream(), pytest.raises(ConnectorError, match=wanted):
        batch.queue(operations)


def test_a_part_of_what_was_prepared_is_queued_by_itself() -> None:
    """Layers 1 and 2 of four, of two copies each."""
    source, target = (torch.randint(0, 256, (4, 40), dtype=torch.uint8) for _ in range(2))
    before = target.clone()
    to, of = (
        StridedRows((rows.data_ptr() + np.arange(4)[:, None] * 40 + [0, 20]).astype(np.uint64), 5)
        for rows in (target, source)
    )
    driver = HostDriver("cuMemcpy3DBatchAsync_v2")
    batch = strided_batch(driver)
    operations = batch.prepare(to, of, 5, np.array([4, 3], np.uint64))
    with on_a_stream():
        batch.queue(operations[1:3])
    assert driver.calls == [4]
    before[1:3, :20], before[1:3, 20:35] = source[1:3, :20], source[1:3, 20:35]
    assert torch.equal(target, before)


# ---------------------------------------------------------------- what the driver has

Ask = Callable[[torch.device], object]
BATCHES = [
    (cuda_memcpy_batch, "cuMemcpyBatchAsync"),
    (cuda_memcpy_2d_batch, "cuMemcpy3DBatchAsync"),
]


class FakeStream:
    """`torch.cuda.Stream`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait_stream(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...


@pytest.fixture
def host_device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The host, which does as if it were a GPU."""
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr("torch.cuda.Stream", FakeStream)
    monkeypatch.setattr("torch.cuda.current_stream", FakeStream)
    monkeypatch.setattr("torch.cuda.stream", contextlib.nullcontext)
    return torch.device("cpu", 0)


def asked(
    ask: Ask, driver: object, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> object:
    monkeypatch.setattr("ctypes.CDLL", lambda name: driver)
    with on_a_stream():
        return ask(device)


@pytest.mark.parametrize(("ask", "name"), BATCHES)
@pytest.mark.parametrize("version", ["", "_v2"])
def test_a_driver_is_tried_once_before_it_is_used(
    ask: Ask, name: str, version: str, host_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = HostDriver(name + version)
    assert asked(ask, driver, host_device, monkeypatch) is not None
    assert driver.calls == [2]
    for bad in (HostDriver(name + version, code=1), HostDriver(name + version, spoils=True)):
        assert asked(ask, bad, host_device, monkeypatch) is None
        assert bad.calls == [2]


@pytest.mark.parametrize(("ask", "name"), BATCHES)
def test_a_driver_without_batches_has_none(
    ask: Ask, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (other,) = {one for _, one in BATCHES} - {name}
    for driver in (object(), HostDriver(other)):
        assert asked(ask, driver, torch.device("cuda", 0), monkeypatch) is None

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", missing)
    assert ask(torch.device("cuda", 0)) is None
