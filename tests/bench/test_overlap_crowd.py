"""Gaps between the tokens of many requests, on an engine whose steps a test sets."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.bench.overlap.crowd import crowd_of
from interlace.bench.spread import percentile
from interlace.bench.workload import Work
from interlace.engine.errors import InterlaceError
from interlace.engine.outputs import RequestOutput, Usage
from interlace.engine.sampling_params import SamplingParams

WORK = Work(((1,), (2,)), 50)


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@dataclasses.dataclass
class Picture:
    idle: bool = True


class SteppedEngine:
    """A token for every stream whenever `step` is called."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self._steps = asyncio.Condition()
        self._num_steps = 0
        self.num_open = 0
        self.error: str | None = None

    def snapshot(self) -> Picture:
        return Picture(self.num_open == 0)

    def reset_prefix_cache(self) -> bool:
        return True

    async def step(self, seconds: float) -> None:
        self._clock.now_s += seconds
        async with self._steps:
            self._num_steps += 1
            self._steps.notify_all()
        for _ in range(5):  # the readers read
            await asyncio.sleep(0)

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams
    ) -> AsyncIterator[RequestOutput]:
        self.num_open += 1
        try:
            seen = self._num_steps
            most = params.max_tokens or 0
            for count in range(1, most + 1):
                async with self._steps:
                    await self._steps.wait_for(lambda seen=seen: self._num_steps > seen)  # type: ignore[misc]
                    seen = self._num_steps
                if self.error is not None:
                    yield RequestOutput("r", finish_reason="error", error=self.error)
                usage = Usage(1, 16, 32, count) if count == most else None
                yield RequestOutput(
                    "r", token_ids=(7,), usage=usage, finish_reason="length" if usage else None
                )
        finally:
            self.num_open -= 1


async def test_gaps_and_a_request_beside() -> None:
    clock = FakeClock()
    engine = SteppedEngine(clock)
    async with crowd_of(engine, clock, WORK) as crowd:
        await asyncio.sleep(0)
        for seconds in (1.0, 2.0, 3.0):
            await engine.step(seconds)
        asked = asyncio.create_task(crowd.ask((5,)))  # noqa: TID251 - awaited below
        await asyncio.sleep(0)
        await engine.step(4.0)
        answer = await asked
        await engine.step(5.0)
        assert crowd.gaps(0.0, 6.0) == [2.0, 3.0] * 2
        assert crowd.gaps(0.5, 99.0) == [2.0, 3.0, 4.0, 5.0] * 2
        assert (answer.started_s, answer.arrived_s) == (6.0, 10.0)
        assert crowd.gaps_at(answer.arrived_s) == (4.0, 5.0)
        waiting = asyncio.create_task(crowd.steps(2))  # noqa: TID251 - awaited below
        await engine.step(1.0)
        assert not waiting.done()
        await engine.step(1.0)
        await waiting
    assert engine.num_open == 0


async def test_too_few_steps_to_tell() -> None:
    clock = FakeClock()
    engine = SteppedEngine(clock)

    async def asks_too_soon() -> None:
        async with crowd_of(engine, clock, WORK) as crowd:
            await asyncio.sleep(0)
            await engine.step(1.0)
            crowd.gaps_at(1.0)

    with pytest.raises(InterlaceError, match="not decoded long enough"):
        await asks_too_soon()
    assert engine.num_open == 0


async def test_what_fails_one_ends_all() -> None:
    clock = FakeClock()
    engine = SteppedEngine(clock)

    async def fails() -> None:
        async with crowd_of(engine, clock, WORK) as crowd:
            await asyncio.sleep(0)
            engine.error = "no luck"
            await engine.step(1.0)
            await crowd.steps(1)

    with pytest.raises(InterlaceError, match="a benchmark request failed: no luck"):
        await fails()


@given(st.lists(st.floats(0, 1), min_size=1), st.floats(0.01, 1))
def test_a_percentile(values: list[float], share: float) -> None:
    found = percentile(values, share)
    num_below = sum(value <= found for value in values)
    assert found in values
    assert num_below >= share * len(values) - 1e-6
    assert sum(value < found for value in values) < share * len(values) + 1e-6


def test_percentiles_of_a_hundred() -> None:
    assert percentile([float(i) for i in range(1, 101)], 0.99) == 99.0
    assert percentile([3.0], 0.99) == 3.0
