"""What torch and CUDA can do here, tried in the smallest way. Changes no setting of the GPU.

All functions run on the caller's thread, which in an engine's process must be the device thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import mmap
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from interlace.layers.hardware.fact import Unknown, attempt
from interlace.layers.hardware.host import file_system, version_of

_SLEEP_CYCLES = 20_000_000
"""About 10 ms on a GPU: long enough that a copy that does not wait reads too early."""
_MAPPED_BYTES = 2 << 20
_READ_ONLY_FLAG = 8  # cudaHostRegisterReadOnly


@dataclasses.dataclass(frozen=True, slots=True)
class Torch:
    """The installed torch."""

    version: str | Unknown
    cuda: str | Unknown
    """The version of CUDA that it was built for."""
    cpu_capability: str | Unknown
    """The instructions that its CPU kernels use, such as "AVX512"."""
    threads: int | Unknown
    device: str | Unknown
    """The name of `cuda:0`, which CUDA is then tried and measured on."""


def torch_facts() -> Torch:
    """Imports torch, which takes seconds, and initialises CUDA."""
    return Torch(
        version=version_of("torch"),
        cuda=attempt(_cuda_version, "CUDA of torch"),
        cpu_capability=attempt(_cpu_capability, "CPU kernels of torch"),
        threads=attempt(_threads, "threads of torch"),
        device=attempt(_device_name, "torch finds no CUDA device"),
    )


def works() -> bool:
    """Whether torch can use a CUDA device: tried, since a driver may be there and broken."""
    torch = _torch()
    try:
        torch.zeros(1, device="cuda")
    except (RuntimeError, AssertionError):
        return False
    return True


def _torch() -> Any:
    """As `Any`: most of what is used here carries no types."""
    import torch

    return torch


def _cuda_version() -> str:
    torch = _torch()
    if torch.version.cuda is None:
        raise LookupError("this torch was built without CUDA")
    return str(torch.version.cuda)


def _cpu_capability() -> str:
    return str(_torch().backends.cpu.get_cpu_capability())


def _threads() -> int:
    return int(_torch().get_num_threads())


def _device_name() -> str:
    torch = _torch()
    torch.cuda.init()
    return str(torch.cuda.get_device_name(0))


def external_events() -> bool | Unknown:
    """Whether a CUDA graph waits for an event that is recorded outside, before each launch.

    False: the graph ran and did not wait. Layer-wise loading under full graphs stands on this.
    """
    return attempt(_external_event_is_waited_for, "external events in CUDA graphs")


def _external_event_is_waited_for() -> bool:
    torch = _torch()
    source, target = (torch.zeros(1024, device="cuda") for _ in range(2))
    side, arrived = torch.cuda.Stream(), torch.cuda.Event(external=True)
    # Once without a graph: nothing may be compiled or set up for the first time while it runs.
    torch.cuda._sleep(1)
    target.copy_(source.fill_(0))
    arrived.record(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.cuda.current_stream().wait_event(arrived)
        target.copy_(source)
    with torch.cuda.stream(side):
        torch.cuda._sleep(_SLEEP_CYCLES)
        source.fill_(1)
        arrived.record(side)
    graph.replay()
    torch.cuda.synchronize()
    return bool((target == 1).all())


@dataclasses.dataclass(frozen=True, slots=True)
class Registration:
    """Whether a mapped file of a folder can be made visible to the GPU, with `cudaHostRegister`."""

    folder: str
    file_system: str | Unknown
    flags: Literal["default", "read-only"] | Unknown
    """The weakest that works: "default" registers for reading and writing."""


def registration(folder: Path, load: Callable[[], Any] | None = None) -> Registration:
    """Map a small temporary file of `folder` and register it; both are gone afterwards.

    `load` returns the module `cuda.bindings.runtime`.
    """
    return Registration(
        folder=str(folder),
        file_system=file_system(folder),
        flags=attempt(lambda: _working_flags(folder, load or _cuda_runtime), "cudaHostRegister"),
    )


def _cuda_runtime() -> Any:
    return importlib.import_module("cuda.bindings.runtime")


def _working_flags(folder: Path, load: Callable[[], Any]) -> Literal["default", "read-only"]:
    runtime = load()
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_MAPPED_BYTES))
        file.flush()
        with contextlib.closing(mmap.mmap(file.fileno(), _MAPPED_BYTES)) as mapping:
            address = _address(mapping)
            if (refused := _register(runtime, address, 0)) is None:
                return "default"
            if (also := _register(runtime, address, _READ_ONLY_FLAG)) is None:
                return "read-only"
    raise OSError(f"{refused} with default flags, {also} with the read-only flag")


def _address(mapping: mmap.mmap) -> int:
    """Where it lies. The array must not outlive this function, or the mapping cannot be closed."""
    import numpy as np

    return int(np.frombuffer(mapping, np.uint8).ctypes.data)


def _register(runtime: Any, address: int, flags: int) -> str | None:
    """Register and unregister; the name of the error if CUDA refuses, and then forget it."""
    (error,) = runtime.cudaHostRegister(address, _MAPPED_BYTES, flags)
    if int(error) == 0:
        runtime.cudaHostUnregister(address)
        return None
    runtime.cudaGetLastError()  # else the next launch would report it
    return str(error.name)
