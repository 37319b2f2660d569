"""The arm that runs our own engine and reads its stream as any caller would."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from interlace.bench.lag_probe import LagProbe
from interlace.bench.timeline import Sample, sample_of
from interlace.bench.workload import Work
from interlace.engine.errors import InterlaceError
from interlace.engine.outputs import RequestOutput
from interlace.engine.ports import Clock
from interlace.engine.sampling_params import SamplingParams

IDLE_POLL_S = 0.001
MAX_IDLE_POLLS = 10_000


class Picture(Protocol):
    """The part of `EngineSnapshot` that the benchmarks read."""

    @property
    def idle(self) -> bool:
        """Whether nothing is queued, running or in flight."""
        ...


class TokenEngine(Protocol):
    """The part of `AsyncEngine` that the benchmarks use."""

    def snapshot(self) -> Picture:
        """How the engine stands now."""
        ...

    def generate(
        self, prompt: Sequence[int], sampling_params: SamplingParams, /
    ) -> AsyncIterator[RequestOutput]:
        """A stream of deltas for a prompt of token ids."""
        ...

    def reset_prefix_cache(self) -> bool:
        """Forget all KV on the device; False if some is in use."""
        ...


@dataclasses.dataclass(slots=True)
class _Reading:
    """What the reader of one stream saw."""

    arrivals: list[float] = dataclasses.field(default_factory=list)
    cached_tokens: int = 0
    loaded_tokens: int = 0


class EngineArm:
    """Runs work on an idle engine: greedy, past every end of sequence, without text."""

    def __init__(self, engine: TokenEngine, clock: Clock, name: str = "interlace") -> None:
        """`name` is what tables call this arm."""
        self.name = name
        self._engine = engine
        self._clock = clock

    async def run(self, work: Work) -> Sample:
        """Submit all prompts at once and time their tokens, as they reach the readers.

        Returns when the engine is idle again, since the step that follows the last token would
        delay the next run. Raises: what the engine raises; `InterlaceError` if a request ends
        early. Cancelling closes every stream.
        """
        readings = [_Reading() for _ in work.prompts]
        with LagProbe(self._clock) as probe:
            started = self._clock.monotonic()
            try:
                async with asyncio.TaskGroup() as group:
                    for prompt, reading in zip(work.prompts, readings, strict=True):
                        group.create_task(self._read(prompt, work.output_tokens, reading))
            except ExceptionGroup as several:
                raise several.exceptions[0] from None  # the others were cancelled for it
        await until_idle(self._engine)
        idle = self._clock.monotonic()
        sample = sample_of(
            work,
            started,
            [reading.arrivals for reading in readings],
            cached_tokens=sum(reading.cached_tokens for reading in readings),
        )
        return dataclasses.replace(
            sample,
            loaded_tokens=sum(reading.loaded_tokens for reading in readings),
            idle_s=idle - started,
            worst_lag_s=probe.worst_s,
        )

    def forget(self) -> None:
        """Forget all KV on the device, but not what a connector keeps elsewhere.

        Raises: `InterlaceError` if the engine is not idle.
        """
        if not self._engine.reset_prefix_cache():
            raise InterlaceError("the engine still uses KV, so it cannot forget it.")

    async def _read(self, prompt: Sequence[int], output_tokens: int, reading: _Reading) -> None:
        async for out in self._engine.generate(prompt, params_for(output_tokens)):
            reading.arrivals += [self._clock.monotonic()] * len(out.token_ids)
            if out.usage is not None:
                reading.cached_tokens = out.usage.num_local_cached_tokens
                reading.loaded_tokens = out.usage.num_external_cached_tokens
            refuse_failed(out)
        if len(reading.arrivals) != output_tokens:
            raise InterlaceError(
                f"a benchmark request ended after {len(reading.arrivals)} of {output_tokens} "
                "tokens; use fewer --output-tokens or --prompt-tokens."
            )


def params_for(num_tokens: int) -> SamplingParams:
    """Greedy, past every end of sequence, without text."""
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)


def refuse_failed(out: RequestOutput) -> None:
    """Raises: `InterlaceError` if the request has failed, or was aborted."""
    if out.finish_reason in ("error", "abort"):
        raise InterlaceError(f"a benchmark request failed: {out.error or 'aborted'}")


async def until_idle(engine: TokenEngine) -> None:
    """Wait until nothing is queued, running or in flight. Raises: `InterlaceError` after 10 s."""
    for _ in range(MAX_IDLE_POLLS):
        if engine.snapshot().idle:
            return
        await asyncio.sleep(IDLE_POLL_S)
    raise InterlaceError("the engine was not idle 10 s after its last request; nothing is timed.")
