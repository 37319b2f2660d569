"""`interlace info`: what this machine is and can do, as a table or as JSON.

Presentation only; `interlace.layers.hardware` finds out. Imports no torch at the top.
"""

from __future__ import annotations

import json as json_text
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from interlace.cli.bench_output import StillProgress
from interlace.cli.progress import NotedProgress
from interlace.cli.screen import harmless
from interlace.layers.hardware.fact import Unknown, to_json

if TYPE_CHECKING:
    from typing import TypeAlias

    from interlace.engine.ports import Progress
    from interlace.layers.hardware.copies import CopySpeeds
    from interlace.layers.hardware.host import Memory, Processor
    from interlace.layers.hardware.nvidia import Clock, Gpu, Nvidia, Pcie
    from interlace.layers.hardware.survey import Survey

    Fact: TypeAlias = str | int | float | bool | Unknown
    Line: TypeAlias = tuple[str, str]
    """What it is about, and what is known."""

_LABEL_WIDTH = 24

AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object; facts not known are null.")
]


def info(json: AsJson = False) -> None:
    """Show what this machine is and can do: CPU, GPUs, versions, copy speeds. Changes nothing."""
    from interlace import __version__
    from interlace.layers.hardware.survey import survey

    found = survey(_progress())
    if json:
        reasons: dict[str, str] = {}
        facts = {"interlace": __version__, **to_json(found, reasons), "reasons": reasons}
        typer.echo(json_text.dumps(facts, indent=2))
        return
    for label, text in (("interlace", __version__), *lines_of(found)):
        typer.echo(f"{label:{_LABEL_WIDTH}}{harmless(text)}")


def _progress() -> Progress:
    """A bar that no thread redraws: that would disturb what is measured."""
    return StillProgress(sys.stderr) if sys.stderr is not None else NotedProgress(None)


def lines_of(found: Survey) -> Iterator[Line]:
    """The table, line by line. Without a GPU, one line says so and CUDA is not spoken of."""
    yield "Python", f"{found.python} on {found.system}"
    yield "CPU", _processor(found.processor)
    yield "memory", _memory(found.memory)
    torch = found.torch
    built = "without CUDA" if isinstance(torch.cuda, Unknown) else f"for CUDA {torch.cuda}"
    kernels = f"{_say(torch.cpu_capability)} kernels, {_say(torch.threads)} threads"
    yield "torch", f"{_say(torch.version)} built {built}; on the CPU {kernels}"
    yield "Triton", _say(found.triton)
    yield "C compiler for Triton", _say(found.c_compiler)
    yield "Python headers", _say(found.python_headers)
    if isinstance(found.nvidia, Unknown) and isinstance(torch.device, Unknown):
        yield "GPU", f"none ({found.nvidia.reason})"
    else:
        yield from _driver(found.nvidia)
        yield from _cuda(found)
    yield from _copies(found.copies, has_gpu=not isinstance(torch.device, Unknown))


def _say(fact: Fact, unit: str = "") -> str:
    if isinstance(fact, Unknown):
        return f"unknown ({fact.reason})"
    if isinstance(fact, bool):
        return "yes" if fact else "no"
    return f"{fact}{unit}"


def _processor(cpu: Processor) -> str:
    return f"{cpu.model}, {cpu.cores} cores, AVX2: {_say(cpu.avx2)}, AVX-512: {_say(cpu.avx512)}"


def _memory(memory: Memory | Unknown) -> str:
    if isinstance(memory, Unknown):
        return _say(memory)
    return f"{_gib(memory.total_bytes)}, {_gib(memory.available_bytes)} available"


def _driver(nvidia: Nvidia | Unknown) -> Iterator[Line]:
    if isinstance(nvidia, Unknown):
        yield "NVIDIA driver", _say(nvidia)
        return
    yield "NVIDIA driver", f"{_say(nvidia.driver)}, CUDA up to {_say(nvidia.cuda)}"
    if isinstance(nvidia.gpus, Unknown):
        yield "GPU", _say(nvidia.gpus)
        return
    if not nvidia.gpus:
        yield "GPU", "none (the driver is there, but lists no GPU)"
    for index, gpu in enumerate(nvidia.gpus):
        yield from _gpu(index, gpu)


def _gpu(index: int, gpu: Gpu) -> Iterator[Line]:
    total, free = _gib(gpu.memory_total_bytes), _gib(gpu.memory_free_bytes)
    memory = f"{total}, {free} free"
    capability = f"compute capability {_say(gpu.compute_capability)}"
    yield f"GPU {index}", f"{_say(gpu.name)}, {capability}, {memory}"
    yield "  clocks", f"SM {_clock(gpu.sm_clock)}; memory {_clock(gpu.memory_clock)}"
    yield "  PCIe", _pcie(gpu.pcie)
    yield (
        "  modes",
        f"persistence: {_say(gpu.persistence_mode)}, MIG: {_say(gpu.mig_mode)}",
    )


def _clock(clock: Clock) -> str:
    return f"{_say(clock.now_mhz, ' MHz')}, at most {_say(clock.max_mhz, ' MHz')}"


def _pcie(link: Pcie) -> str:
    return (
        f"generation {_say(link.generation)} of {_say(link.max_generation)}, "
        f"{_say(link.width)} of {_say(link.max_width)} lanes; "
        f"now {_speed(link.received_bytes_per_s)} in, {_speed(link.sent_bytes_per_s)} out"
    )


def _cuda(found: Survey) -> Iterator[Line]:
    yield "CUDA device of torch", _say(found.torch.device)
    if isinstance(found.torch.device, Unknown):
        return  # it is also why nothing else could be tried
    yield "cuda-bindings", _say(found.cuda_bindings)
    yield "events from outside", f"a CUDA graph waits for them: {_say(found.external_events)}"
    if isinstance(found.registration, Unknown):
        yield "registering files", _say(found.registration)
        return
    for one in found.registration:
        flags = one.flags
        works = _say(flags) if isinstance(flags, Unknown) else f"works with {flags} flags"
        yield "registering files", f"{one.folder} ({_say(one.file_system)}): {works}"


def _copies(copies: CopySpeeds, *, has_gpu: bool) -> Iterator[Line]:
    size = f"{copies.num_bytes >> 20} MiB"
    speeds = (
        ("host to GPU", copies.host_to_device, f"{size}, pinned"),
        ("GPU to host", copies.device_to_host, f"{size}, pinned"),
        ("within the GPU", copies.device_to_device, f"{size}; reads and writes as much each"),
        ("within the host", copies.host_to_host, f"{size}, one thread; reads and writes as much"),
    )
    for label, speed, how in speeds if has_gpu else speeds[3:]:
        known = _say(speed) if isinstance(speed, Unknown) else f"{_speed(speed)} ({how})"
        yield f"copies {label}", known


def _gib(num_bytes: int | Unknown) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if isinstance(num_bytes, int) else _say(num_bytes)


def _speed(bytes_per_s: float | Unknown) -> str:
    """In GB/s: 10**9 bytes."""
    if isinstance(bytes_per_s, int | float):
        return f"{bytes_per_s / 1e9:.1f} GB/s"
    return _say(bytes_per_s)
