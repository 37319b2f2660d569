"""One request at a time, whose prefix lies in host memory or on the device."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol, TypeVar

from interlace.bench.engine_arm import EngineArm
from interlace.bench.overlap.meter import LoadTimes, Meter, Metered
from interlace.bench.timeline import Sample
from interlace.bench.workload import Work
from interlace.connectors.pipeline.options import LoadMode
from interlace.engine.device_thread import DeviceThread, finish_despite_cancel
from interlace.engine.errors import InterlaceError

T = TypeVar("T")


class Hit(NamedTuple):
    """What came of one request."""

    sample: Sample
    device_s: float
    """From what was queued for it first, a load or a forward, to its sampled token."""
    loads: tuple[LoadTimes, ...]
    predicted_s: float | None = None
    """What the connector expects of a balanced split, from both ends, for the device alone; None
    if it could not tell."""


class HitArm(Protocol):
    """An engine that stores prefixes in host memory, idle between requests."""

    def forget(self) -> None:
        """Forget all KV on the device."""
        ...

    async def run(self, work: Work, mode: LoadMode = "auto") -> Hit:
        """Run one request; what is stored of it comes back as `mode` says."""
        ...

    @property
    def link_bytes_per_s(self) -> float:
        """Of one long copy from host memory."""
        ...

    def slow_down(self, times: int) -> None:
        """Let requests from now on find a link that is so many times slower."""
        ...


class MeteredArm:
    """A `HitArm` of a real engine."""

    def __init__(self, arm: EngineArm, meter: Meter, device: DeviceThread) -> None:
        self._arm = arm
        self._meter = meter
        self._device = device

    def forget(self) -> None:
        """See `HitArm`. Raises: `InterlaceError` if the engine is not idle."""
        self._arm.forget()

    @property
    def link_bytes_per_s(self) -> float:
        """See `HitArm`."""
        return self._meter.link_bytes_per_s

    def slow_down(self, times: int) -> None:
        """See `HitArm`. While nothing is under way."""
        self._meter.slowdown = times

    async def run(self, work: Work, mode: LoadMode = "auto") -> Hit:
        """See `HitArm`. Raises: what the engine raises. Cancelling closes the stream."""
        self._meter.load_mode = mode
        sample, metered = await noted(self._meter, self._device, lambda: self._arm.run(work))
        if metered.device_s is None:
            raise InterlaceError(
                "the connector did not tell how long the device took for a request: its hooks are"
                " not called as bench/overlap/connector.py expects."
            )
        return Hit(sample, metered.device_s, metered.loads, self._meter.predicted_s)


async def noted(
    meter: Meter, device: DeviceThread, run: Callable[[], Awaitable[T]]
) -> tuple[T, Metered]:
    """Await `run()`; beside its outcome, what the meter noted meanwhile.

    Raises: what `run` raises. Cancelling cancels `run`, and returns when the meter is off.
    """
    await finish_despite_cancel(device.submit(meter.begin))
    try:
        outcome = await run()
    finally:
        metered = await finish_despite_cancel(device.submit(meter.take))
    return outcome, metered


def require(found: int, whole: int, what: str) -> None:
    """Raises: `InterlaceError` if fewer than `whole` tokens were `what`."""
    if found < whole:
        raise InterlaceError(
            f"only {found} of {whole} tokens were {what}: choose a multiple of the block size, and"
            " give the KV pool and the host's records room for the whole prompt."
        )
