"""How long no kernel runs on the device while a piece of work is done, told by torch's profiler.

Tracing slows the host down, so what is traced is a run of its own that nothing else is read from.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from interlace.bench.profiled_run import profiled_run
from interlace.engine.device_thread import DeviceThread
from interlace.layers.hardware.fact import Unknown, attempt

if TYPE_CHECKING:
    from torch.profiler import profile

T = TypeVar("T")
Interval = tuple[float, float]
"""Begin and end in seconds, on a clock of the device's own."""

_NO_KERNELS = ("Memcpy", "Memset")
"""How the names of copies and fills begin, which need no multiprocessor."""


def busy_s(intervals: Iterable[Interval], begin: float, end: float) -> float:
    """Seconds between `begin` and `end` that at least one interval covers."""
    covered, reached = 0.0, begin
    for start, stop in sorted(intervals):
        new = min(stop, end) - max(start, reached)
        if new > 0:
            covered += new
            reached = min(stop, end)
    return covered


def busy_at_the_end(kernels: Sequence[Interval], wall_s: float) -> float:
    """Seconds in which a kernel ran, of the last `wall_s` before the last one's end.

    What is read at the host ends a moment later than on the device. The window begins earlier by
    that moment, and is as long. `kernels` has at least one.
    """
    last = max(end for _, end in kernels)
    return busy_s(kernels, last - wall_s, last)


class KernelTracer:
    """Traces the kernels of one run. The profiler is started and stopped on the device thread."""

    def __init__(self, device: DeviceThread, traced: Literal["cuda", "cpu"] = "cuda") -> None:
        """With `traced="cpu"` the operations that torch runs on `device` stand for kernels."""
        self.problem: str | None = None
        """Why there was nothing to tell of some run."""
        self._device = device
        self._traced = traced

    async def trace(self, run: Callable[[], Awaitable[T]]) -> tuple[T, tuple[Interval, ...]]:
        """Await `run()`; beside its outcome, the kernels that ran, none if they cannot be traced.

        Loop thread, which other work may use meanwhile. Raises: what `run` raises. Cancelling
        cancels `run`, and returns when the profiler has ended.
        """
        outcome, found = await profiled_run(
            self._device, lambda: attempt(self._start, "tracing kernels"), run, _stop
        )
        if isinstance(found, Unknown):
            self.problem = found.reason
            return outcome, ()
        kernels = tuple(_intervals(found, self._traced))
        if not kernels:
            self.problem = "the profiler saw no kernel"
        return outcome, kernels

    def _start(self) -> profile:
        from torch.profiler import ProfilerActivity, profile

        activity = ProfilerActivity.CUDA if self._traced == "cuda" else ProfilerActivity.CPU
        profiler = profile(activities=[activity], acc_events=True)  # else it warns once
        profiler.start()
        return profiler


def _stop(profiler: profile | Unknown) -> Sequence[Any] | Unknown:
    """Its events, or why there are none."""
    if isinstance(profiler, Unknown):
        return profiler
    return attempt(lambda: _events(profiler), "reading a trace")


def _events(profiler: profile) -> Sequence[Any]:
    """End it, once the device is idle, and read what it saw."""
    profiler.stop()
    return list(profiler.events())  # type: ignore[no-untyped-call]


def _intervals(events: Iterable[Any], traced: str) -> Iterable[Interval]:
    """Those of events that ran on the device; times of the profiler are microseconds."""
    for event in events:
        on_device = event.device_type.name.lower() == traced and not event.is_user_annotation
        if on_device and not event.name.startswith(_NO_KERNELS):
            yield event.time_range.start / 1e6, event.time_range.end / 1e6
