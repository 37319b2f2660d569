"""Facts about the machine: read where they lie, and a reason in place of each that is missing."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_nvml import FakeNvml

from interlace.layers.checkpoint.loading import Silent
from interlace.layers.hardware import copies, cuda, host
from interlace.layers.hardware import survey as survey_module
from interlace.layers.hardware.copies import CopySpeeds, copy_speeds, host_copy_speed
from interlace.layers.hardware.cuda import Registration, Torch, registration
from interlace.layers.hardware.fact import Unknown, attempt, to_json
from interlace.layers.hardware.host import Memory, Processor
from interlace.layers.hardware.nvidia import Clock, Gpu, Nvidia, Pcie, nvidia


def raising(error: Exception) -> Any:
    def raise_it(*_: object) -> None:
        raise error

    return raise_it


def test_a_fact_is_a_value_or_one_line_that_says_why_not() -> None:
    assert attempt(lambda: 3, "counting") == 3
    assert attempt(lambda: None, "asking") is None
    failed = attempt(raising(OSError("no\n  such  thing")), "looking")
    assert failed == Unknown("looking: no such thing")
    assert attempt(raising(AssertionError()), "looking") == Unknown("looking: AssertionError")
    long = attempt(raising(ValueError("x" * 5000)), "looking")
    assert isinstance(long, Unknown)
    assert len(long.reason) < 400


def test_an_interrupt_is_no_fact() -> None:
    with pytest.raises(KeyboardInterrupt):
        attempt(lambda: (_ for _ in ()).throw(KeyboardInterrupt), "waiting")


def test_json_has_all_keys_always_and_the_reasons_beside_them() -> None:
    facts = (Processor("x", 2, avx2=True, avx512=Unknown("why")), Unknown("later"))
    reasons: dict[str, str] = {}
    assert to_json(facts, reasons, "a") == [
        {"model": "x", "cores": 2, "avx2": True, "avx512": None},
        None,
    ]
    assert reasons == {"a.0.avx512": "why", "a.1": "later"}


CPUINFO = """processor\t: 0
model name\t: Some CPU @ 2 GHz
flags\t\t: fpu avx avx2 avx512f {more}

processor\t: 1
model name\t: Another
flags\t\t: fpu
"""


def test_the_processor_is_read_from_proc(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(CPUINFO.format(more="avx512bw"))
    cpu = host.processor(tmp_path)
    assert (cpu.model, cpu.avx2, cpu.avx512) == ("Some CPU @ 2 GHz", True, True)
    assert 1 <= cpu.cores <= (os.cpu_count() or 1)
    (tmp_path / "cpuinfo").write_text(CPUINFO.format(more=""))
    assert host.processor(tmp_path).avx512 is False
    (tmp_path / "cpuinfo").write_text("CPU part\t: 0xd0c\n")
    assert isinstance(host.processor(tmp_path).avx2, Unknown)
    elsewhere = host.processor(tmp_path / "none")
    assert elsewhere.model
    assert isinstance(elsewhere.avx2, Unknown)
    assert "cpuinfo" in elsewhere.avx2.reason


def test_memory_is_read_from_proc(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:       2048 kB\nMemFree: 1 kB\nMemAvailable:    1024 kB\n")
    assert host.memory(tmp_path) == Memory(total_bytes=2 << 20, available_bytes=1 << 20)
    for content in ("", "MemTotal: x kB\nMemAvailable: 1 kB\n", "MemTotal:\nMemAvailable:\n"):
        file.write_text(content)
        assert isinstance(host.memory(tmp_path), Unknown)
    assert isinstance(host.memory(tmp_path / "none"), Unknown)


def test_the_compiler_is_the_one_that_triton_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    missing = host.c_compiler()
    assert isinstance(missing, Unknown)
    assert "neither gcc nor clang" in missing.reason
    for name in ("clang", "gcc", "mycc"):
        (tmp_path / name).touch(mode=0o700)
        expected = tmp_path / ("gcc" if name == "mycc" else name)
        assert host.c_compiler() == str(expected)
    monkeypatch.setenv("CC", "mycc -O1")
    assert host.c_compiler() == str(tmp_path / "mycc")
    for wrong in ("nocc", ""):
        monkeypatch.setenv("CC", wrong)
        missing = host.c_compiler()
        assert isinstance(missing, Unknown)
        assert repr(wrong) in missing.reason


def test_headers_and_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert isinstance(host.python_headers(), Unknown)
    (tmp_path / "Python.h").touch()
    assert host.python_headers() == str(tmp_path)
    assert host.version_of("numpy") == np.__version__
    assert host.version_of("no-such-package") == Unknown("no-such-package is not installed")


def test_the_file_system_is_found_by_its_device(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    numbers = f"{os.major(device)}:{os.minor(device)}"
    (tmp_path / "self").mkdir()
    info = tmp_path / "self" / "mountinfo"
    info.write_text(
        "22 1 0:999 / / rw shared:1 - ext4 /dev/a rw\n"
        f"23 1 {numbers} / /somewhere rw - tmpfs tmpfs rw\n"
    )
    assert host.file_system(tmp_path, tmp_path) == "tmpfs"
    info.write_text("22 1 0:999 / / rw - ext4 /dev/a rw\n")
    assert isinstance(host.file_system(tmp_path, tmp_path), Unknown)
    assert isinstance(host.file_system(tmp_path / "none"), Unknown)


H200 = Gpu(
    name="NVIDIA H200",
    uuid="GPU-0",
    compute_capability="9.0",
    memory_total_bytes=150 << 30,
    memory_free_bytes=149 << 30,
    sm_clock=Clock(now_mhz=345, max_mhz=1980),
    memory_clock=Clock(now_mhz=3201, max_mhz=3201),
    pcie=Pcie(4, 5, 16, 16, received_bytes_per_s=650_000, sent_bytes_per_s=7_000),
    persistence_mode=True,
    mig_mode=False,
)


@pytest.mark.parametrize("text", [str, str.encode])
def test_the_driver_tells_all_and_is_let_go(text: Any) -> None:
    nvml = FakeNvml(count=2, text=text)
    second = dataclasses.replace(H200, uuid="GPU-1")
    assert nvidia(lambda: nvml) == Nvidia("580.95.05", "13.0", (H200, second))
    assert (nvml.asked[0], nvml.asked[-1]) == ("nvmlInit", "nvmlShutdown")
    assert not [name for name in nvml.asked if "Set" in name], "a setting was changed"


def test_what_the_driver_does_not_tell_costs_one_fact() -> None:
    failing = ("nvmlDeviceGetMigMode", "nvmlDeviceGetMaxClockInfo", "nvmlShutdown")
    found = nvidia(lambda: FakeNvml(*failing))
    reason = Unknown("nvmlDeviceGetMaxClockInfo: nvmlDeviceGetMaxClockInfo: Not Supported")
    expected = dataclasses.replace(
        H200,
        mig_mode=Unknown("nvmlDeviceGetMigMode: nvmlDeviceGetMigMode: Not Supported"),
        sm_clock=Clock(345, reason),
        memory_clock=Clock(3201, reason),
    )
    assert isinstance(found, Nvidia)
    assert found.gpus == (expected,)


def test_without_a_driver_there_is_one_reason() -> None:
    nvml = FakeNvml("nvmlInit")
    found = nvidia(lambda: nvml)
    assert isinstance(found, Unknown)
    assert found.reason.startswith("no NVIDIA driver found: nvmlInit: ")
    assert nvml.asked == ["nvmlInit"]
    missing = nvidia(raising(ImportError("No module named 'pynvml'")))
    assert missing == Unknown("importing pynvml: No module named 'pynvml'")
    listing = nvidia(lambda: FakeNvml("nvmlDeviceGetCount"))
    assert isinstance(listing, Nvidia)
    assert isinstance(listing.gpus, Unknown)


class Result(int):
    """An enum member of cuda.bindings, as far as it matters."""

    name = "cudaErrorNotSupported"


class FakeRuntime:
    """`cuda.bindings.runtime` that takes registrations with some flags only."""

    def __init__(self, *accepted: int) -> None:
        self.calls: list[object] = []
        self._accepted = accepted

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> tuple[Result]:  # noqa: N802
        assert address % 4096 == 0
        assert num_bytes == 2 << 20
        self.calls.append(flags)
        return (Result(0 if flags in self._accepted else 801),)

    def cudaHostUnregister(self, _address: int) -> tuple[Result]:  # noqa: N802
        self.calls.append("unregister")
        return (Result(0),)

    def cudaGetLastError(self) -> tuple[Result]:  # noqa: N802
        self.calls.append("forget")
        return (Result(801),)


@pytest.mark.parametrize(
    ("accepted", "flags", "calls"),
    [
        ((0, 8), "default", [0, "unregister"]),
        ((8,), "read-only", [0, "forget", 8, "unregister"]),
        ((), None, [0, "forget", 8, "forget"]),
    ],
)
def test_a_file_is_registered_with_the_weakest_flags(
    accepted: tuple[int, ...], flags: str | None, calls: list[object], tmp_path: Path
) -> None:
    runtime = FakeRuntime(*accepted)
    found = registration(tmp_path, lambda: runtime)
    assert found.folder == str(tmp_path)
    if flags is None:
        assert isinstance(found.flags, Unknown)
        assert "cudaErrorNotSupported with the read-only flag" in found.flags.reason
    else:
        assert found.flags == flags
    assert runtime.calls == calls
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_registered_the_reason_is_told(tmp_path: Path) -> None:
    missing = registration(tmp_path, raising(ImportError("No module named 'cuda'")))
    assert missing.flags == Unknown("cudaHostRegister: No module named 'cuda'")
    nowhere = registration(tmp_path / "none", lambda: FakeRuntime(0))
    assert isinstance(nowhere.flags, Unknown)
    assert isinstance(nowhere.file_system, Unknown)


def test_without_cuda_torch_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = SimpleNamespace(
        version=SimpleNamespace(cuda=None),
        backends=SimpleNamespace(cpu=SimpleNamespace(get_cpu_capability=lambda: "AVX2")),
        cuda=SimpleNamespace(init=raising(RuntimeError("Found no NVIDIA driver"))),
        get_num_threads=lambda: 3,
    )
    monkeypatch.setattr(cuda, "_torch", lambda: plain)
    found = cuda.torch_facts()
    assert (found.cpu_capability, found.threads) == ("AVX2", 3)
    assert isinstance(found.cuda, Unknown)
    assert found.device == Unknown("torch finds no CUDA device: Found no NVIDIA driver")
    assert isinstance(cuda.external_events(), Unknown)


def test_the_host_copy_is_timed_by_the_median() -> None:
    ticks = iter([0.0, 100.0, 0.0, 1.0, 0.0, 2.0, 0.0, 4.0, 0.0, 8.0, 0.0, 9.0])
    assert host_copy_speed(1000, lambda: next(ticks)) == 250.0
    assert host_copy_speed(1 << 16) > 0


def test_without_a_gpu_only_the_host_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "host_copy_speed", lambda: 5.0)
    steps: list[float] = []
    none = Unknown("torch finds no CUDA device: none")
    found = copy_speeds(none, steps.append)
    assert found == CopySpeeds(256 << 20, none, none, none, 5.0)
    assert steps == [1, 1, 1, 1]


def test_a_survey_asks_a_gpu_only_where_torch_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    none = Unknown("torch finds no CUDA device: none")
    torch = Torch("2.11.0", "13.0", "AVX512", 2, none)
    speeds = CopySpeeds(1, none, none, none, 5.0)
    monkeypatch.setattr(survey_module, "nvidia", lambda: none)
    monkeypatch.setattr(survey_module, "torch_facts", lambda: torch)
    monkeypatch.setattr(survey_module, "copy_speeds", lambda _device, _advance: speeds)
    monkeypatch.setattr(survey_module, "external_events", lambda: True)
    works = Registration("/x", "tmpfs", "default")
    monkeypatch.setattr(survey_module, "registration", lambda _folder: works)
    found = survey_module.survey(Silent())
    assert (found.external_events, found.registration) == (none, none)
    torch = dataclasses.replace(torch, device="NVIDIA H200")
    found = survey_module.survey(Silent())
    assert (found.external_events, found.registration) == (True, (works, works))
    assert (found.copies, found.torch) == (speeds, torch)


def test_facts_of_host_and_driver_need_no_torch() -> None:
    code = (
        "import sys, interlace.layers.hardware.survey as s; s.processor(); s.nvidia(); s.memory();"
        "assert 'torch' not in sys.modules"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(root / "src")},
        check=True,
        timeout=60,
    )
