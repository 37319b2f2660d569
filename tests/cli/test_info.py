"""`interlace info`: its lines and its JSON, over surveys made by hand."""

from __future__ import annotations

import dataclasses
import json

import pytest
from fake_nvml import FakeNvml
from typer.testing import CliRunner

from interlace import __version__
from interlace.cli.app import app
from interlace.cli.info import lines_of
from interlace.layers.hardware import survey as survey_module
from interlace.layers.hardware.copies import CopySpeeds
from interlace.layers.hardware.cuda import Registration, Torch
from interlace.layers.hardware.fact import Unknown
from interlace.layers.hardware.host import Memory, Processor
from interlace.layers.hardware.nvidia import Nvidia, nvidia
from interlace.layers.hardware.survey import Survey

NO_CUDA = Unknown("torch finds no CUDA device: Torch not compiled with CUDA enabled")
NO_DRIVER = Unknown("no NVIDIA driver found: nvmlInit: NVML Shared Library Not Found")
WITHOUT_GPU = Survey(
    python="3.11.7",
    system="Linux 6.1 x86_64",
    processor=Processor("Some CPU\x1b[2J", 2, avx2=True, avx512=Unknown("why")),
    memory=Memory(total_bytes=8 << 30, available_bytes=6 << 30),
    c_compiler=Unknown("neither gcc nor clang is installed, and CC names no compiler"),
    python_headers="/usr/include/python3.11",
    torch=Torch("2.13.0+cpu", Unknown("none"), "AVX2", 2, NO_CUDA),
    triton="3.7.1",
    cuda_bindings=Unknown("cuda-bindings is not installed"),
    nvidia=NO_DRIVER,
    external_events=NO_CUDA,
    registration=NO_CUDA,
    copies=CopySpeeds(256 << 20, NO_CUDA, NO_CUDA, NO_CUDA, 5e9),
)


def with_gpu(*failing: str) -> Survey:
    return dataclasses.replace(
        WITHOUT_GPU,
        torch=Torch("2.11.0", "13.0", "AVX512", 16, "NVIDIA H200"),
        cuda_bindings="13.0.3",
        nvidia=nvidia(lambda: FakeNvml(*failing)),
        external_events=True,
        registration=(
            Registration("/dev/shm", "tmpfs", "default"),
            Registration("/tmp", "ext4", Unknown("cudaHostRegister: refused")),
        ),
        copies=CopySpeeds(256 << 20, 55.3e9, 55.2e9, 2.09e12, 10e9),
    )


def table(found: Survey) -> dict[str, str]:
    lines = list(lines_of(found))
    return {label.strip(): text for label, text in lines}


def test_without_a_gpu_one_line_says_so() -> None:
    lines = table(WITHOUT_GPU)
    assert lines["GPU"] == f"none ({NO_DRIVER.reason})"
    assert [label for label, text in lines.items() if "CUDA device" in label + text] == []
    assert [label for label in lines if label.startswith("copies")] == ["copies within the host"]
    assert lines["copies within the host"].startswith("5.0 GB/s (256 MiB, one thread")
    assert lines["memory"] == "8.0 GiB, 6.0 GiB available"
    assert "AVX2: yes, AVX-512: unknown (why)" in lines["CPU"]
    assert lines["torch"] == ("2.13.0+cpu built without CUDA; on the CPU AVX2 kernels, 2 threads")
    assert lines["C compiler for Triton"].startswith("unknown (neither gcc nor clang")


def test_with_a_gpu_everything_is_told() -> None:
    lines = table(with_gpu())
    assert lines["NVIDIA driver"] == "580.95.05, CUDA up to 13.0"
    assert lines["GPU 0"] == ("NVIDIA H200, compute capability 9.0, 150.0 GiB, 149.0 GiB free")
    assert lines["clocks"] == ("SM 345 MHz, at most 1980 MHz; memory 3201 MHz, at most 3201 MHz")
    assert lines["PCIe"] == ("generation 4 of 5, 16 of 16 lanes; now 0.0 GB/s in, 0.0 GB/s out")
    assert lines["modes"] == "persistence: yes, MIG: no"
    assert lines["CUDA device of torch"] == "NVIDIA H200"
    assert lines["events from outside"] == "a CUDA graph waits for them: yes"
    assert lines["copies host to GPU"] == "55.3 GB/s (256 MiB, pinned)"
    assert lines["copies within the GPU"].startswith("2090.0 GB/s")
    files = [text for label, text in lines_of(with_gpu()) if label == "registering files"]
    assert files == [
        "/dev/shm (tmpfs): works with default flags",
        "/tmp (ext4): unknown (cudaHostRegister: refused)",
    ]


def test_half_a_gpu_says_which_half_is_missing() -> None:
    driver_only = dataclasses.replace(WITHOUT_GPU, nvidia=with_gpu().nvidia)
    assert table(driver_only)["CUDA device of torch"] == f"unknown ({NO_CUDA.reason})"
    assert "events from outside" not in table(driver_only)
    torch_only = dataclasses.replace(with_gpu(), nvidia=Unknown("importing pynvml: no"))
    lines = table(torch_only)
    assert lines["NVIDIA driver"] == "unknown (importing pynvml: no)"
    assert lines["CUDA device of torch"] == "NVIDIA H200"
    assert "GPU" not in lines
    failing = table(with_gpu("nvmlDeviceGetMigMode", "nvmlDeviceGetMemoryInfo"))
    assert "MIG: unknown (nvmlDeviceGetMigMode" in failing["modes"]
    assert "unknown (nvmlDeviceGetMemoryInfo" in failing["GPU 0"]
    empty = dataclasses.replace(driver_only, nvidia=Nvidia("580", "13.0", ()))
    assert table(empty)["GPU"].startswith("none (the driver is there")


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey_module, "survey", lambda _progress: WITHOUT_GPU)


@pytest.mark.usefixtures("found")
def test_the_command_prints_a_table_that_drives_no_terminal() -> None:
    result = CliRunner().invoke(app, ["info"])
    assert result.exit_code == 0
    first, *rest = result.stdout.splitlines()
    assert first.split() == ["interlace", __version__]
    assert len(rest) == len(list(lines_of(WITHOUT_GPU)))
    assert "Some CPU^[[2J" in result.stdout


@pytest.mark.usefixtures("found")
def test_json_is_one_object_with_the_same_keys_and_reasons_beside_them() -> None:
    result = CliRunner().invoke(app, ["info", "--json"])
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    names = [field.name for field in dataclasses.fields(Survey)]
    assert list(facts) == ["interlace", *names, "reasons"]
    assert facts["nvidia"] is None
    assert facts["reasons"]["nvidia"] == NO_DRIVER.reason
    assert facts["reasons"]["processor.avx512"] == "why"
    assert facts["copies"]["host_to_host"] == 5e9
    assert set(facts["torch"]) == {"version", "cuda", "cpu_capability", "threads", "device"}
