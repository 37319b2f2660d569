"""Many requests that decode together, and the gaps between the tokens that each of them sees.

    async with crowd_of(opened.engine, clock, work) as crowd:
        await crowd.steps(8)
        begin = crowd.now()
        ...
        gaps = crowd.gaps(begin, crowd.now())

Loop thread. Other requests may run beside them meanwhile: `ask`.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from interlace.bench.engine_arm import TokenEngine, params_for, refuse_failed, until_idle
from interlace.bench.workload import Work
from interlace.engine.errors import InterlaceError
from interlace.engine.outputs import RequestOutput
from interlace.engine.ports import Clock


class Answer(NamedTuple):
    """One request that asked for one token. Times on the crowd's clock."""

    started_s: float
    arrived_s: float
    cached_tokens: int
    loaded_tokens: int


class StepGaps(NamedTuple):
    """At the median over the crowd, in seconds."""

    step_s: float
    """The gap that ends with a step."""
    following_s: float
    """The next one."""


class Crowd:
    """For `crowd_of`."""

    def __init__(self, engine: TokenEngine, clock: Clock, work: Work) -> None:
        self._engine = engine
        self._clock = clock
        self._work = work
        self._arrivals: list[list[float]] = [[] for _ in work.prompts]
        """Of each request, when something reached its reader: two tokens at once are one gap."""
        self._news = asyncio.Event()

    def now(self) -> float:
        """Seconds on the clock of all times here."""
        return self._clock.monotonic()

    async def steps(self, count: int) -> None:
        """Wait until each request has got something `count` times more."""
        goals = [len(times) + count for times in self._arrivals]
        while any(len(times) < goal for times, goal in zip(self._arrivals, goals, strict=True)):
            self._news.clear()
            await self._news.wait()

    def gaps(self, begin_s: float, end_s: float) -> list[float]:
        """Of all requests, those that lie within, in seconds."""
        pairs = itertools.chain.from_iterable(map(itertools.pairwise, self._arrivals))
        return [b - a for a, b in pairs if begin_s <= a and b <= end_s]

    def gaps_at(self, time_s: float) -> StepGaps:
        """Of the step whose tokens came about then; another one must have followed it."""
        found = [self._gaps_at(times, time_s) for times in self._arrivals]
        return StepGaps(
            statistics.median(gaps.step_s for gaps in found),
            statistics.median(gaps.following_s for gaps in found),
        )

    @staticmethod
    def _gaps_at(times: Sequence[float], time_s: float) -> StepGaps:
        inner = range(1, len(times) - 1)
        if not inner:
            raise InterlaceError("a request has not decoded long enough to tell its gaps.")
        place = min(inner, key=lambda i: abs(times[i] - time_s))
        return StepGaps(times[place] - times[place - 1], times[place + 1] - times[place])

    async def ask(self, prompt: Sequence[int]) -> Answer:
        """One token of another request. Raises: what the engine raises; `InterlaceError` if it
        fails. Cancelling aborts the request."""
        started = self.now()
        last: RequestOutput | None = None
        arrived = started
        async for out in self._engine.generate(prompt, params_for(1)):
            arrived = self.now() if out.token_ids else arrived
            refuse_failed(out)
            last = out
        assert last is not None, "a stream has an end"
        usage = last.usage
        assert usage is not None, "a stream ends with its usage"
        return Answer(
            started, arrived, usage.num_local_cached_tokens, usage.num_external_cached_tokens
        )

    async def read(self, index: int) -> None:
        """Read one of the crowd. For `crowd_of`."""
        times, most = self._arrivals[index], self._work.output_tokens
        async for out in self._engine.generate(self._work.prompts[index], params_for(most)):
            refuse_failed(out)
            if out.token_ids:
                times.append(self.now())
                self._news.set()
        raise InterlaceError(
            f"a request that decodes beside others ended after its {most} tokens: ask for fewer"
            " rounds, or shorter prompts."
        )


@asynccontextmanager
async def crowd_of(engine: TokenEngine, clock: Clock, work: Work) -> AsyncIterator[Crowd]:
    """Let all prompts of `work` decode while the context lasts.

    At its end they are aborted, and the engine is idle. Raises: what the engine raises;
    `InterlaceError` if one ends before. Cancelling aborts them.
    """
    crowd = Crowd(engine, clock, work)
    try:
        async with asyncio.TaskGroup() as group:
            readers = [
                group.create_task(crowd.read(i), name=f"decoder {i}")
                for i in range(work.batch_size)
            ]
            try:
                yield crowd
            finally:
                for reader in readers:
                    reader.cancel()
    except ExceptionGroup as several:
        raise _first(several) from None  # the others were cancelled for it
    await until_idle(engine)


def _first(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
