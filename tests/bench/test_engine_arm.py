"""Our own arm, on an engine whose time the test turns."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence

import pytest

from interlace.bench import engine_arm
from interlace.bench.engine_arm import EngineArm
from interlace.bench.workload import Work
from interlace.engine.errors import EngineBusyError, InterlaceError
from interlace.engine.outputs import FinishReason, RequestOutput, Usage
from interlace.engine.sampling_params import SamplingParams

WORK = Work(((1, 2, 3), (4, 5, 6)), output_tokens=4)


class FakeClock:
    """Time that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@dataclasses.dataclass(frozen=True)
class Picture:
    idle: bool


class FakeEngine:
    """Answers every prompt with one token at each full second since it was made."""

    def __init__(
        self,
        clock: FakeClock,
        *,
        finish_reason: FinishReason = "length",
        error: str | None = None,
        raises: Exception | None = None,
    ) -> None:
        self.requests: list[tuple[tuple[int, ...], SamplingParams]] = []
        self.closed = 0
        self.looks = 0
        self.resets = 0
        self.holds_kv = False
        self._clock = clock
        self._started = clock.now
        self._finish_reason = finish_reason
        self._error = error
        self._raises = raises

    def snapshot(self) -> Picture:
        self.looks += 1
        self._clock.now += 0.5
        return Picture(idle=self.looks > 2)

    def reset_prefix_cache(self) -> bool:
        self.resets += 1
        return not self.holds_kv

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, /
    ) -> AsyncIterator[RequestOutput]:
        self.requests.append((tuple(prompt), params))
        try:
            if self._raises is not None:
                raise self._raises
            assert params.max_tokens is not None
            for index in range(params.max_tokens):
                await asyncio.sleep(0)
                self._clock.now = self._started + index + 1.0
                last = index == params.max_tokens - 1 or self._finish_reason != "length"
                yield RequestOutput(
                    request_id="r",
                    token_ids=(7,),
                    finish_reason=self._finish_reason if last else None,
                    error=self._error,
                    usage=Usage(len(prompt), 5, 2, index + 1) if last else None,
                )
                if last:
                    return
        finally:
            self.closed += 1


async def test_times_all_requests_together() -> None:
    clock = FakeClock()
    engine = FakeEngine(clock)
    sample = await EngineArm(engine, clock).run(WORK)
    assert (sample.batch_size, sample.prompt_tokens) == (2, 3)
    assert (sample.first_token_s, sample.decode_s) == (1.0, 3.0)
    assert (sample.decode_steps, sample.decode_tokens) == (3, 6)
    assert (sample.cached_tokens, sample.loaded_tokens) == (10, 4)
    assert sample.idle_s == 4.0 + 3 * 0.5
    assert sample.worst_lag_s is not None
    assert engine.closed == 2


async def test_asks_for_greedy_tokens_without_text_and_without_an_early_end() -> None:
    clock = FakeClock()
    engine = FakeEngine(clock)
    await EngineArm(engine, clock).run(WORK)
    assert [prompt for prompt, _ in engine.requests] == [(1, 2, 3), (4, 5, 6)]
    params = engine.requests[0][1]
    assert (params.temperature, params.ignore_eos, params.detokenize) == (0.0, True, False)
    assert params.max_tokens == 4


async def test_waits_until_the_engine_is_idle_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    engine = FakeEngine(clock)
    await EngineArm(engine, clock).run(WORK)
    assert engine.looks == 3
    monkeypatch.setattr(engine_arm, "MAX_IDLE_POLLS", 2)
    busy = FakeEngine(clock)
    with pytest.raises(InterlaceError, match="not idle"):
        await EngineArm(busy, clock).run(WORK)


async def test_forgets_what_the_device_holds_and_says_if_it_cannot() -> None:
    clock = FakeClock()
    engine = FakeEngine(clock)
    arm = EngineArm(engine, clock)
    arm.forget()
    assert engine.resets == 1
    engine.holds_kv = True
    with pytest.raises(InterlaceError, match="cannot forget"):
        arm.forget()


async def test_a_request_that_ends_early_is_an_error() -> None:
    clock = FakeClock()
    with pytest.raises(InterlaceError, match="ended after 1 of 4 tokens"):
        await EngineArm(FakeEngine(clock, finish_reason="stop"), clock).run(WORK)


async def test_a_failed_request_is_an_error_with_its_reason() -> None:
    clock = FakeClock()
    engine = FakeEngine(clock, finish_reason="error", error="no blocks")
    with pytest.raises(InterlaceError, match="no blocks"):
        await EngineArm(engine, clock).run(WORK)


async def test_what_the_engine_raises_comes_out_as_it_is() -> None:
    clock = FakeClock()
    with pytest.raises(EngineBusyError, match="full"):
        await EngineArm(FakeEngine(clock, raises=EngineBusyError("full")), clock).run(WORK)
