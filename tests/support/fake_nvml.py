"""A stand-in for pynvml with one GPU, any of whose functions may fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """As in pynvml."""


class FakeNvml:
    """Answers like pynvml 12 on an H200; `failing` are functions that raise `NVMLError`."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1

    def __init__(self, *failing: str, count: int = 1, text: Any = str) -> None:
        self.asked: list[str] = []
        self._failing = failing
        self._text = text
        self._answers: dict[str, Any] = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlSystemGetDriverVersion": lambda: text("580.95.05"),
            "nvmlSystemGetCudaDriverVersion": lambda: 13000,
            "nvmlDeviceGetCount": lambda: count,
            "nvmlDeviceGetHandleByIndex": lambda index: f"handle {index}",
            "nvmlDeviceGetName": lambda _: text("NVIDIA H200"),
            "nvmlDeviceGetUUID": lambda handle: text(f"GPU-{handle[-1]}"),
            "nvmlDeviceGetCudaComputeCapability": lambda _: (9, 0),
            "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(
                total=150 << 30, free=149 << 30, used=1 << 30
            ),
            "nvmlDeviceGetClockInfo": lambda _, kind: {1: 345, 2: 3201}[kind],
            "nvmlDeviceGetMaxClockInfo": lambda _, kind: {1: 1980, 2: 3201}[kind],
            "nvmlDeviceGetCurrPcieLinkGeneration": lambda _: 4,
            "nvmlDeviceGetMaxPcieLinkGeneration": lambda _: 5,
            "nvmlDeviceGetCurrPcieLinkWidth": lambda _: 16,
            "nvmlDeviceGetMaxPcieLinkWidth": lambda _: 16,
            "nvmlDeviceGetPcieThroughput": lambda _, kind: {0: 7, 1: 650}[kind],
            "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=97, memory=40),
            "nvmlDeviceGetPowerUsage": lambda _: 512_400,
            "nvmlDeviceGetEnforcedPowerLimit": lambda _: 700_000,
            "nvmlDeviceGetComputeRunningProcesses": lambda handle: [
                SimpleNamespace(pid=100 + int(handle[-1]))
            ],
            "nvmlDeviceGetPersistenceMode": lambda _: 1,
            "nvmlDeviceGetMigMode": lambda _: [0, 1],
        }

    def __getattr__(self, name: str) -> Any:
        """A function that notes that it was asked. Unknown names raise `AttributeError`."""
        if name not in self._answers:
            raise AttributeError(name)

        def ask(*args: Any) -> Any:
            self.asked.append(name)
            if name in self._failing:
                raise NVMLError(f"{name}: Not Supported")
            return self._answers[name](*args)

        return ask
