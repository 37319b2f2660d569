"""What NVIDIA's driver says about its GPUs, through NVML. Reads only: no setting is changed.

Imports no torch, and makes no CUDA context.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from interlace.layers.hardware.fact import Unknown, attempt


@dataclasses.dataclass(frozen=True, slots=True)
class Clock:
    """A clock of a GPU, in MHz."""

    now_mhz: int | Unknown
    max_mhz: int | Unknown


@dataclasses.dataclass(frozen=True, slots=True)
class Pcie:
    """A GPU's PCIe link. An idle GPU may lower its generation."""

    generation: int | Unknown
    max_generation: int | Unknown
    width: int | Unknown
    """Lanes."""
    max_width: int | Unknown
    received_bytes_per_s: int | Unknown
    """By the GPU, within the last 20 ms or so."""
    sent_bytes_per_s: int | Unknown


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, in the driver's order, which need not be that of CUDA."""

    name: str | Unknown
    uuid: str | Unknown
    compute_capability: str | Unknown
    """Such as "9.0"."""
    memory_total_bytes: int | Unknown
    memory_free_bytes: int | Unknown
    sm_clock: Clock
    memory_clock: Clock
    pcie: Pcie
    persistence_mode: bool | Unknown
    mig_mode: bool | Unknown
    """Whether the GPU is cut into instances."""


@dataclasses.dataclass(frozen=True, slots=True)
class Nvidia:
    """The driver and all its GPUs."""

    driver: str | Unknown
    cuda: str | Unknown
    """The newest version of CUDA that the driver knows, such as "13.0"."""
    gpus: tuple[Gpu, ...] | Unknown


def nvidia(load: Callable[[], Any] | None = None) -> Nvidia | Unknown:
    """All that NVML tells, or why it tells nothing. `load` returns the module pynvml."""
    nvml = attempt(load or _pynvml, "importing pynvml")
    if isinstance(nvml, Unknown):
        return nvml
    failed = attempt(nvml.nvmlInit, "no NVIDIA driver found: nvmlInit")
    if isinstance(failed, Unknown):
        return failed
    with _closing(nvml):
        return Nvidia(
            driver=attempt(lambda: _text(nvml.nvmlSystemGetDriverVersion()), "driver version"),
            cuda=attempt(lambda: _version(nvml.nvmlSystemGetCudaDriverVersion()), "CUDA version"),
            gpus=attempt(lambda: _gpus(nvml), "listing GPUs"),
        )


def _pynvml() -> Any:
    import pynvml

    return pynvml


@contextlib.contextmanager
def _closing(nvml: Any) -> Iterator[None]:
    try:
        yield
    finally:
        attempt(nvml.nvmlShutdown, "nvmlShutdown")


def _gpus(nvml: Any) -> tuple[Gpu, ...]:
    return tuple(_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(name: str, *more: Any, read: Callable[[Any], Any] = lambda value: value) -> Any:
        """`read` of what the function `name` answers about this GPU, or why it answers nothing."""
        return attempt(lambda: read(getattr(nvml, name)(handle, *more)), name)

    return Gpu(
        name=ask("nvmlDeviceGetName", read=_text),
        uuid=ask("nvmlDeviceGetUUID", read=_text),
        compute_capability=ask(
            "nvmlDeviceGetCudaComputeCapability", read=lambda pair: f"{pair[0]}.{pair[1]}"
        ),
        memory_total_bytes=ask("nvmlDeviceGetMemoryInfo", read=lambda found: int(found.total)),
        memory_free_bytes=ask("nvmlDeviceGetMemoryInfo", read=lambda found: int(found.free)),
        sm_clock=_clock(ask, nvml.NVML_CLOCK_SM),
        memory_clock=_clock(ask, nvml.NVML_CLOCK_MEM),
        pcie=_pcie(ask, nvml),
        persistence_mode=ask("nvmlDeviceGetPersistenceMode", read=bool),
        mig_mode=ask("nvmlDeviceGetMigMode", read=lambda modes: bool(modes[0])),
    )


def _clock(ask: Callable[..., Any], kind: int) -> Clock:
    return Clock(
        now_mhz=ask("nvmlDeviceGetClockInfo", kind),
        max_mhz=ask("nvmlDeviceGetMaxClockInfo", kind),
    )


def _pcie(ask: Callable[..., Any], nvml: Any) -> Pcie:
    def from_kb(kilobytes: int) -> int:
        return kilobytes * 1000

    throughput = "nvmlDeviceGetPcieThroughput"
    return Pcie(
        generation=ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        max_generation=ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        max_width=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        received_bytes_per_s=ask(throughput, nvml.NVML_PCIE_UTIL_RX_BYTES, read=from_kb),
        sent_bytes_per_s=ask(throughput, nvml.NVML_PCIE_UTIL_TX_BYTES, read=from_kb),
    )


def _text(value: str | bytes) -> str:
    """Older versions of pynvml answer in bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
