"""All facts about this machine together, as `interlace info` shows them."""

from __future__ import annotations

import dataclasses
import platform
import tempfile
from pathlib import Path

from interlace.engine.ports import Progress
from interlace.layers.hardware.copies import CopySpeeds, copy_speeds
from interlace.layers.hardware.cuda import (
    Registration,
    Torch,
    external_events,
    registration,
    torch_facts,
)
from interlace.layers.hardware.fact import Unknown, attempt
from interlace.layers.hardware.host import (
    Memory,
    Processor,
    c_compiler,
    memory,
    processor,
    python_headers,
    version_of,
)
from interlace.layers.hardware.nvidia import Nvidia, nvidia

TMPFS = Path("/dev/shm")
_STEPS = 7


@dataclasses.dataclass(frozen=True, slots=True)
class Survey:
    """One look at this machine. Its fields are the keys of `interlace info --json`."""

    python: str
    system: str
    processor: Processor
    memory: Memory | Unknown
    c_compiler: str | Unknown
    python_headers: str | Unknown
    torch: Torch
    triton: str | Unknown
    cuda_bindings: str | Unknown
    nvidia: Nvidia | Unknown
    external_events: bool | Unknown
    registration: tuple[Registration, ...] | Unknown
    """Of a file in memory and of one in the folder for temporary files."""
    copies: CopySpeeds


def survey(progress: Progress) -> Survey:
    """Look at everything and measure copies: some seconds, most of them for importing torch.

    Never raises because of what it finds; only what `progress` raises to end it. Runs on the
    caller's thread, which in an engine's process must be the device thread.
    """
    with progress.task("Looking at this machine", _STEPS) as advance:
        driver = nvidia()
        advance(1)
        torch = torch_facts()
        advance(1)
        # Before what might leave CUDA in a bad state.
        copies = copy_speeds(torch.device, advance)
        files, events = _abilities(torch.device)
        advance(1)
    return Survey(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=processor(),
        memory=memory(),
        c_compiler=c_compiler(),
        python_headers=python_headers(),
        torch=torch,
        triton=version_of("triton"),
        cuda_bindings=version_of("cuda-bindings"),
        nvidia=driver,
        external_events=events,
        registration=files,
        copies=copies,
    )


def _abilities(
    device: str | Unknown,
) -> tuple[tuple[Registration, ...] | Unknown, bool | Unknown]:
    """What CUDA can do with files and events, if there is a device."""
    if isinstance(device, Unknown):
        return device, device
    folders = attempt(lambda: (TMPFS, Path(tempfile.gettempdir())), "looking for a folder")
    if isinstance(folders, Unknown):
        return folders, external_events()
    return tuple(registration(folder) for folder in folders), external_events()
