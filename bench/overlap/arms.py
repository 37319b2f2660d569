"""One request at a time, whose prefix lies on the device, in host memory or in files."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol, TypeVar

from interlace.bench.engine_arm import EngineArm
from interlace.bench.kv_blocks import BLOCK_SIZE
from interlace.bench.overlap.meter import LoadTimes, Meter, Metered
from interlace.bench.timeline import Sample
from interlace.bench.workload import Work
from interlace.connectors.pipeline.options import LoadMode
from interlace.connectors.pipeline.scheduler import PipelineScheduler
from interlace.engine.device_thread import DeviceThread, finish_despite_cancel
from interlace.engine.errors import InterlaceError

T = TypeVar("T")

_TRIES = 20
_PAUSE_S = 0.01
_MOST_POKES = 2000
_POKE = Work(((1, 1),), 1)
"""Too short to be stored."""


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
    """An engine that stores prefixes in host memory, or in files, idle between requests."""

    def forget(self) -> None:
        """Forget all KV but what is stored: on the device, and before files in host memory."""
        ...

    async def keep(self, prefix: Work) -> None:
        """Compute a prompt of whole blocks, and have it stored."""
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


class TieredArm(HitArm, Protocol):
    """One that stores prefixes in files, with host memory before them."""

    def forget_on_device(self) -> None:
        """Forget KV there alone: what host memory holds comes from it."""
        ...


class MeteredArm:
    """A `HitArm` of a real engine, and a `TieredArm` if it is given `files`."""

    def __init__(
        self,
        arm: EngineArm,
        meter: Meter,
        device: DeviceThread,
        files: FileStore | None = None,
    ) -> None:
        """`files`: where the connector stores prefixes, if that is not host memory."""
        self._arm = arm
        self._meter = meter
        self._device = device
        self._files = files

    def forget(self) -> None:
        """See `HitArm`. Raises: `InterlaceError` if the engine is not idle."""
        self.forget_on_device()
        if self._files is not None:
            self._files.empty_memory()

    def forget_on_device(self) -> None:
        """See `TieredArm`. Raises: `InterlaceError` if the engine is not idle."""
        self._arm.forget()

    async def keep(self, prefix: Work) -> None:
        """See `HitArm`. Raises: what the engine raises; `InterlaceError` if files do not come
        about. Cancelling stops after the request in progress."""
        await self.run(prefix)
        if self._files is None:
            return
        (prompt,) = prefix.prompts
        again = Work(((*prompt, prompt[0]),), 1)
        for _ in range(_TRIES):  # a request may come before the look that finds new files
            self.forget()
            hit = await self.run(again, "bulk")
            if hit.sample.loaded_tokens == prefix.prompt_tokens:
                return
        require(hit.sample.loaded_tokens, prefix.prompt_tokens, "read from files")

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
        hit = Hit(sample, metered.device_s, metered.loads, self._meter.predicted_s)
        if self._files is not None:
            await self._files.written()
        return hit


class RestartedArm:
    """A `TieredArm` over an engine that opens when one prefix has been stored by another engine,
    which has ended."""

    def __init__(
        self,
        written: Callable[[Work], Awaitable[None]],
        restarted: Callable[[], Awaitable[MeteredArm]],
    ) -> None:
        """`written` has the prefix stored; then `restarted` opens the engine."""
        self._written = written
        self._restarted = restarted
        self._opened: MeteredArm | None = None

    @property
    def _arm(self) -> MeteredArm:
        assert self._opened is not None, "a prefix was kept"
        return self._opened

    def forget(self) -> None:
        """See `HitArm`."""
        self._arm.forget()

    def forget_on_device(self) -> None:
        """See `TieredArm`."""
        self._arm.forget_on_device()

    async def keep(self, prefix: Work) -> None:
        """See `HitArm`; once. Raises: what the engines raise; `InterlaceError` if it was done."""
        if self._opened is not None:
            raise InterlaceError("an engine that was restarted has one prefix: it has it already.")
        await self._written(prefix)
        self._opened = await self._restarted()

    @property
    def link_bytes_per_s(self) -> float:
        """See `HitArm`."""
        return self._arm.link_bytes_per_s

    def slow_down(self, times: int) -> None:
        """See `HitArm`."""
        self._arm.slow_down(times)

    async def run(self, work: Work, mode: LoadMode = "auto") -> Hit:
        """See `HitArm`."""
        return await self._arm.run(work, mode)


class FileStore:
    """The files of an engine's connector, and the host memory before them. Event loop."""

    def __init__(self, arm: EngineArm, meter: Meter) -> None:
        """`meter` is of the connector of the arm's engine."""
        self._arm = arm
        self._meter = meter

    @property
    def _scheduler(self) -> PipelineScheduler:
        assert self._meter.scheduler is not None, "the engine is open"
        return self._meter.scheduler

    def empty_memory(self) -> None:
        """Let host memory hold nothing: what is asked for from now on comes from files."""
        self._scheduler.index.clear()

    async def written(self) -> None:
        """Wait until all that is stored lies in files: nothing is to be written behind the next
        request's back.

        The connector hears of that in steps only, so requests of two tokens bring some about. The
        last one lets it look for new files. Raises: `InterlaceError` if it takes too long.
        """
        for _ in range(_MOST_POKES):
            is_written = self._scheduler.is_idle
            await self._arm.run(_POKE)
            if is_written:
                return
            await asyncio.sleep(_PAUSE_S)
        raise InterlaceError(
            "what was stored has not reached its files: is the disk too slow, or does it hang?"
        )


class WritingArm:
    """An arm whose runs end when what they store lies in files."""

    def __init__(self, arm: EngineArm, files: FileStore) -> None:
        self.name = arm.name
        self.num_blocks = 0
        """Whole blocks of all prompts that it has run."""
        self._arm = arm
        self._files = files

    def forget(self) -> None:
        """Forget all KV on the device. Raises: `InterlaceError` if the engine is not idle."""
        self._arm.forget()

    async def run(self, work: Work) -> Sample:
        """As `EngineArm.run`. Raises: also what `FileStore.written` does."""
        sample = await self._arm.run(work)
        self.num_blocks += work.batch_size * (work.prompt_tokens // BLOCK_SIZE)
        await self._files.written()
        return sample


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
