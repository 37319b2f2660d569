"""How busy a GPU is right now, through NVML. Reads only. Imports no torch, makes no context."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from interlace.layers.hardware.fact import Unknown, attempt


@dataclasses.dataclass(frozen=True, slots=True)
class GpuLoad:
    """One GPU, now."""

    name: str | Unknown
    index: int
    """In the driver's order, which need not be that of CUDA."""
    num_gpus: int
    is_certain: bool
    """Whether the process computes on this one; else it is a guess."""
    busy_share: float | Unknown
    """Of the last sixth of a second or so, in which a kernel ran."""
    memory_used_bytes: int | Unknown
    memory_total_bytes: int | Unknown
    received_bytes_per_s: int | Unknown
    """Over PCIe, by the GPU, within 20 ms."""
    sent_bytes_per_s: int | Unknown
    power_w: float | Unknown
    power_limit_w: float | Unknown


Ask = Callable[[], "GpuLoad | Unknown"]


@contextlib.contextmanager
def gpu_watched(pid: int, load: Callable[[], Any] | None = None) -> Iterator[Ask]:
    """A callable that tells how busy the GPU is that process `pid` computes on; or why nobody
    knows. It waits for the driver, 50 ms for instance: not on an event loop. `load` returns the
    module pynvml."""
    nvml = attempt(load or (lambda: importlib.import_module("pynvml")), "importing pynvml")
    if isinstance(nvml, Unknown):
        missing = nvml
        yield lambda: missing
        return
    failed = attempt(nvml.nvmlInit, "no NVIDIA driver found: nvmlInit")
    if isinstance(failed, Unknown):
        yield lambda: failed
        return
    try:
        yield lambda: attempt(lambda: _load_of(nvml, pid), "asking the GPU")
    finally:
        attempt(nvml.nvmlShutdown, "nvmlShutdown")


def _load_of(nvml: Any, pid: int) -> GpuLoad:
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    if not handles:
        raise LookupError("the driver lists none")
    users = [index for index, handle in enumerate(handles) if pid in _pids(nvml, handle)]
    # In a container the driver may know the process by another number.
    index = users[0] if users else 0
    handle = handles[index]

    def ask(name: str, *more: Any, read: Callable[[Any], Any]) -> Any:
        return attempt(lambda: read(getattr(nvml, name)(handle, *more)), name)

    def per_s(kind: str) -> Any:
        code = getattr(nvml, kind)
        return ask("nvmlDeviceGetPcieThroughput", code, read=lambda kilobytes: kilobytes * 1000)

    return GpuLoad(
        name=ask("nvmlDeviceGetName", read=_text),
        index=index,
        num_gpus=len(handles),
        is_certain=bool(users) or len(handles) == 1,
        busy_share=ask("nvmlDeviceGetUtilizationRates", read=lambda found: found.gpu / 100),
        memory_used_bytes=ask("nvmlDeviceGetMemoryInfo", read=lambda found: int(found.used)),
        memory_total_bytes=ask("nvmlDeviceGetMemoryInfo", read=lambda found: int(found.total)),
        received_bytes_per_s=per_s("NVML_PCIE_UTIL_RX_BYTES"),
        sent_bytes_per_s=per_s("NVML_PCIE_UTIL_TX_BYTES"),
        power_w=ask("nvmlDeviceGetPowerUsage", read=lambda milliwatts: milliwatts / 1000),
        power_limit_w=ask(
            "nvmlDeviceGetEnforcedPowerLimit", read=lambda milliwatts: milliwatts / 1000
        ),
    )


def _pids(nvml: Any, handle: Any) -> set[int]:
    found = attempt(
        lambda: {int(one.pid) for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle)},
        "listing processes",
    )
    return set() if isinstance(found, Unknown) else found


def _text(value: str | bytes) -> str:
    """Older versions of pynvml answer in bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
