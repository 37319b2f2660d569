"""Facts about this machine that a figure means nothing without. Reads /proc, starts nothing."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

from interlace.layers.hardware.host import usable_cores

CPUINFO = Path("/proc/cpuinfo")


def cpu_model(cpuinfo: Path = CPUINFO) -> str:
    """The processor's name as Linux tells it, else what Python knows, else "unknown"."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine() or "unknown"


def version_of(package: str) -> str | None:
    """The installed version of a package, None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def machine_facts(torch_threads: int | None = None) -> dict[str, str | int | None]:
    """Facts by name, ready for JSON. `torch_threads` is torch's intra-op thread count, if used."""
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "torch_threads": torch_threads,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": version_of("torch"),
        "transformers": version_of("transformers"),
    }
