"""Facts about the host: Python, processor, memory, compiler, versions. Reads /proc, starts nothing.

Imports no torch.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import shlex
import shutil
import sysconfig
from importlib import metadata
from pathlib import Path

from interlace.layers.hardware.fact import Unknown, attempt

PROC = Path("/proc")


@dataclasses.dataclass(frozen=True, slots=True)
class Processor:
    """The CPU."""

    model: str
    cores: int
    """That this process may run on."""
    avx2: bool | Unknown
    avx512: bool | Unknown
    """The foundation and the byte and word instructions, which torch's kernels ask for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """Memory of the host, in bytes."""

    total_bytes: int
    available_bytes: int
    """What can be had without swapping."""


def processor(proc: Path = PROC) -> Processor:
    """The CPU as Linux tells it; elsewhere its name as Python knows it."""
    fields = attempt(lambda: _fields(proc / "cpuinfo"), "reading cpuinfo")
    known = {} if isinstance(fields, Unknown) else fields
    return Processor(
        model=known.get("model name") or platform.processor() or platform.machine() or "unknown",
        cores=usable_cores(),
        avx2=_has(fields, "avx2"),
        avx512=_has(fields, "avx512f", "avx512bw"),
    )


def memory(proc: Path = PROC) -> Memory | Unknown:
    """Memory of the host, on Linux."""

    def collect() -> Memory:
        fields = _fields(proc / "meminfo")
        total, available = (int(fields[name].split()[0]) << 10 for name in _MEMORY_FIELDS)
        return Memory(total_bytes=total, available_bytes=available)

    return attempt(collect, "reading meminfo")


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def version_of(package: str) -> str | Unknown:
    """The installed version of a package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return Unknown(f"{package} is not installed")


def c_compiler() -> str | Unknown:
    """Path of the compiler that Triton will build its launchers with: $CC, gcc or clang."""
    chosen = os.environ.get("CC")
    for command in ("gcc", "clang") if chosen is None else (shlex.split(chosen) or [""])[:1]:
        if (path := shutil.which(command)) is not None:
            return path
    if chosen is not None:
        return Unknown(f"CC names {chosen!r}, which is no command here")
    return Unknown("neither gcc nor clang is installed, and CC names no compiler")


def python_headers() -> str | Unknown:
    """The folder of Python.h, which Triton's launchers include."""
    folder = Path(sysconfig.get_paths()["include"])
    if (folder / "Python.h").is_file():
        return str(folder)
    return Unknown(f"{folder} has no Python.h: install Python's development files")


def file_system(folder: Path, proc: Path = PROC) -> str | Unknown:
    """The kind of file system, such as `ext4` or `tmpfs`, that `folder` lies on; on Linux."""

    def collect() -> str:
        device = folder.stat().st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        for line in (proc / "self" / "mountinfo").read_text(errors="replace").splitlines():
            mount, _, source = line.partition(" - ")
            if mount.split()[2] == wanted:
                return source.split()[0]
        raise LookupError(f"no mount has the device {wanted}")

    return attempt(collect, f"looking for the file system of {folder}")


_MEMORY_FIELDS = ("MemTotal", "MemAvailable")


def _fields(file: Path) -> dict[str, str]:
    """The first value of each "name: value" line."""
    fields: dict[str, str] = {}
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields


def _has(fields: dict[str, str] | Unknown, *flags: str) -> bool | Unknown:
    if isinstance(fields, Unknown):
        return fields
    if "flags" not in fields:
        return Unknown("cpuinfo lists no flags of this kind of processor")
    return set(flags) <= set(fields["flags"].split())
