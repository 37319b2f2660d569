"""How busy a GPU is, by a stand-in for pynvml: which GPU, and what if something is not told."""

from __future__ import annotations

from fake_nvml import FakeNvml

from interlace.layers.hardware.fact import Unknown
from interlace.layers.hardware.gpu_load import GpuLoad, gpu_watched


def asked(nvml: FakeNvml, pid: int = 100) -> GpuLoad | Unknown:
    with gpu_watched(pid, lambda: nvml) as load:
        return load()


def test_all_that_it_tells() -> None:
    nvml = FakeNvml()
    found = asked(nvml)
    assert isinstance(found, GpuLoad)
    assert (found.name, found.index, found.is_certain) == ("NVIDIA H200", 0, True)
    assert (found.busy_share, found.power_w, found.power_limit_w) == (0.97, 512.4, 700.0)
    assert found.memory_used_bytes == 1 << 30
    assert (found.received_bytes_per_s, found.sent_bytes_per_s) == (650_000, 7000)
    assert nvml.asked[-1] == "nvmlShutdown"


def test_of_several_the_one_that_the_process_computes_on() -> None:
    found = asked(FakeNvml(count=3), pid=102)
    assert isinstance(found, GpuLoad)
    assert (found.index, found.num_gpus, found.is_certain) == (2, 3, True)


def test_a_process_that_the_driver_does_not_know_is_guessed() -> None:
    found = asked(FakeNvml("nvmlDeviceGetComputeRunningProcesses", count=2), pid=7)
    assert isinstance(found, GpuLoad)
    assert (found.index, found.is_certain) == (0, False)


def test_what_fails_is_told_and_the_rest_is_there() -> None:
    found = asked(FakeNvml("nvmlDeviceGetPowerUsage"))
    assert isinstance(found, GpuLoad)
    assert isinstance(found.power_w, Unknown)
    assert found.busy_share == 0.97
    for failing in ("nvmlInit", "nvmlDeviceGetCount"):
        assert isinstance(asked(FakeNvml(failing)), Unknown)
    assert isinstance(asked(FakeNvml(count=0)), Unknown)
