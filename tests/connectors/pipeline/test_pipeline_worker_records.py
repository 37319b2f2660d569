"""Host memory for records: how much, when it is refused, and its registration with CUDA."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from interlace.connectors.pipeline import records
from interlace.connectors.pipeline.records import HostRecords
from interlace.engine.errors import ConfigError
from interlace.layers.hardware.host import Memory

CPU = torch.device("cpu")


def test_as_many_records_as_fit() -> None:
    made = HostRecords.allocate(1000, (3, 32), CPU)
    assert made.tensor.shape == (10, 3, 32)
    assert made.tensor.dtype == torch.uint8
    assert made.tensor.is_contiguous()
    assert not made.tensor.any()
    assert (made.num_records, made.record_bytes) == (10, 96)
    made.tensor[9, 2, 31] = 7
    made.close()
    made.close()


def test_no_record_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"95 bytes hold no record.*takes 96 bytes.*Give"):
        HostRecords.allocate(95, (3, 32), CPU)


def test_more_than_there_is_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    has = Memory(total_bytes=8 << 30, available_bytes=2 << 30)
    monkeypatch.setattr("interlace.layers.hardware.host.memory", lambda: has)
    with pytest.raises(ConfigError, match=r"3\.0 GiB of host memory.*2\.0 GiB of it are available"):
        HostRecords.allocate(3 << 30, (4, 1 << 20), CPU)


def test_what_the_system_will_not_promise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", refuse)
    with pytest.raises(ConfigError, match=r"give the connector less.*Cannot allocate"):
        HostRecords.allocate(1 << 20, (4, 1 << 10), CPU)


def test_it_measures_a_rate() -> None:
    assert HostRecords.allocate(1000, (3, 32), CPU).measure_load_rate() > 1e8


class Driver:
    """A `HostMemory` that answers with one code, and notes who asked what."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.calls: list[tuple[Any, ...]] = []

    def register(self, address: int, num_bytes: int, *, read_only: bool = False) -> int:
        self.calls.append(("register", address, num_bytes, read_only))
        return self.code

    def unregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return self.code


def with_cuda(monkeypatch: pytest.MonkeyPatch, code: int) -> Driver:
    driver = Driver(code)
    waited = types.SimpleNamespace(synchronize=lambda device: driver.calls.append(("wait",)))
    monkeypatch.setattr("torch.cuda", waited)
    monkeypatch.setattr(records, "CudaHostMemory", lambda device: driver)
    return driver


def test_beside_a_gpu_it_is_registered_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = with_cuda(monkeypatch, 0)
    made = HostRecords.allocate(1 << 20, (4, 1 << 10), torch.device("cuda"))
    address = made.tensor.data_ptr()
    assert driver.calls == [("register", address, 1 << 20, False)]
    assert not made.tensor.any()
    made.close()
    made.close()
    assert driver.calls[1:] == [("wait",), ("unregister", address)]


def test_what_cuda_does_not_register_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cuda(monkeypatch, 2)
    with pytest.raises(ConfigError, match=r"error 2\).*give the connector less"):
        HostRecords.allocate(1 << 20, (4, 1 << 10), torch.device("cuda"))
