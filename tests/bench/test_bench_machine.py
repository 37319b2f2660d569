"""The machine's facts in a report."""

from __future__ import annotations

import torch
from fake_nvml import FakeNvml

from interlace.bench.machine import gpu_facts, machine_facts, torch_facts
from interlace.layers.hardware.host import processor


def test_facts_of_the_host() -> None:
    facts = machine_facts()
    assert (facts["cpu"], facts["cores"]) == (processor().model, processor().cores)
    assert facts["torch_threads"] is None
    assert facts["torch"] is not None


def test_facts_of_torch() -> None:
    facts = torch_facts("cpu")
    assert facts == machine_facts() | {"torch_threads": torch.get_num_threads()}


def test_facts_of_a_gpu() -> None:
    assert gpu_facts("NVIDIA H200", FakeNvml) == {
        "gpu": "NVIDIA H200",
        "driver": "580.95.05",
        "sm_mhz": 345,
        "max_sm_mhz": 1980,
        "memory_mhz": 3201,
        "max_memory_mhz": 3201,
    }


def test_what_the_driver_does_not_tell_is_none() -> None:
    failing = FakeNvml("nvmlDeviceGetClockInfo", "nvmlSystemGetDriverVersion")
    facts = gpu_facts("NVIDIA H200", lambda: failing)
    assert (facts["driver"], facts["sm_mhz"], facts["max_sm_mhz"]) == (None, None, 1980)
    assert gpu_facts("Another", FakeNvml) == {"gpu": "Another", "driver": "580.95.05"}
    assert gpu_facts("NVIDIA H200", lambda: FakeNvml("nvmlInit")) == {"gpu": "NVIDIA H200"}
