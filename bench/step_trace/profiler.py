"""What a GPU does during one run, told by torch's profiler, inside replayed graphs too."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from interlace.bench.profiled_run import profiled_run
from interlace.bench.step_trace.device import DeviceEvent, Kind
from interlace.engine.device_thread import DeviceThread
from interlace.engine.errors import InterlaceError

T = TypeVar("T")
M = TypeVar("M")

_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
"""What the profiler's file calls work of a GPU."""
_TO_DEVICE = "Memcpy HtoD"
"""How the names of such copies begin."""


def cuda_profiler() -> Any:
    """A profiler of the work of GPUs. Device thread."""
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CUDA], acc_events=True)  # else it warns once


class ProfiledSteps(Generic[M]):
    """A `StepRecorder` for a GPU. The profiler is started, and stopped, on the device thread."""

    def __init__(
        self,
        device: DeviceThread,
        read: Callable[[Sequence[DeviceEvent]], M],
        make_profiler: Callable[[], Any] = cuda_profiler,
    ) -> None:
        """`read`: from what the GPU did to what was seen. `make_profiler` is for tests."""
        self._device = device
        self._read = read
        self._make_profiler = make_profiler

    async def record(self, run: Callable[[], Awaitable[T]]) -> tuple[T, M]:
        """See `StepRecorder`. Raises: also `InterlaceError` if the profiler cannot be used."""
        outcome, events = await profiled_run(self._device, self._start, run, _stop)
        return outcome, self._read(events)

    def _start(self) -> Any:
        profiler = self._make_profiler()
        try:
            profiler.start()
        except RuntimeError as error:
            raise InterlaceError(
                f"torch's profiler does not start ({error}): end other profilers of this machine."
            ) from error
        return profiler


def _stop(profiler: Any) -> list[DeviceEvent]:
    """End it, once the device is idle, and read what it saw, by way of a file: only that has the
    streams and the bytes of copies."""
    profiler.stop()
    with tempfile.TemporaryDirectory(prefix="interlace-trace-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return list(read_events(path.read_text(encoding="utf-8", errors="replace")))


def read_events(text: str) -> Iterator[DeviceEvent]:
    """Work of GPUs in a file of torch's profiler. Raises: `InterlaceError` for another format."""
    try:
        for event in json.loads(text, strict=False)["traceEvents"]:
            if event.get("ph") == "X" and event.get("cat") in _CATEGORIES:
                yield _device_event(event)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InterlaceError(
            f"what torch's profiler wrote is not understood ({type(error).__name__}: {error}):"
            " use a version of torch that Interlace is made for."
        ) from error


def _device_event(event: Any) -> DeviceEvent:
    """Times there are microseconds, with three more digits."""
    begin, args, name = event["ts"], event["args"], str(event["name"])
    kind: Kind = "kernel" if event["cat"] == "kernel" else "other"
    if name.startswith(_TO_DEVICE):
        kind = "to_device"
    size = args.get("bytes")
    return DeviceEvent(
        kind,
        name,
        int(args["stream"]),
        round(begin * 1000),
        round((begin + event["dur"]) * 1000),
        int(size) if isinstance(size, int | float) and size > 0 else None,
    )
