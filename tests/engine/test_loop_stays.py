"""While nothing computes, the device thread moves on what a connector has under way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from connected import NOTHING, prompt_of, scripted_sides, warm
from engine_kit import BLOCK_SIZE, PATIENCE_S, GatedRunner, build_engine, greedy
from paged_oracle import answer

from interlace.connectors.conformance import Async, Rule, Script
from interlace.engine import loop
from interlace.engine.async_engine import AsyncEngine
from interlace.engine.ports import WorkerConnector

PROMPT = [3, 1, 4, 1, 5]


class Looking(GatedRunner):
    """Says `has_more` when it is asked, and counts."""

    def __init__(self, connector: WorkerConnector) -> None:
        super().__init__(is_open=True, connector=connector)
        self.num_looks = 0
        self.is_asked = threading.Event()
        self.has_more = True

    def advance_transfers(self) -> bool:
        self.num_looks += 1
        self.is_asked.set()
        return self.has_more


def loading_engine(load_delay: int = 3) -> tuple[AsyncEngine, Looking]:
    """One whose request "loads" has 32 of 36 tokens loaded, in so many steps."""
    script = Script()
    warm(script, prompt_of(40), block_size=BLOCK_SIZE)
    script.rules["loads"] = Rule(answers=(Async(32),), load_delay=load_delay, save=False)
    script.default = NOTHING
    scheduler_side, worker_side = scripted_sides(script, block_size=BLOCK_SIZE)
    runner = Looking(worker_side)
    return build_engine(runner, depth=1, connector=scheduler_side), runner


@contextmanager
def staying_for_ever(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(loop, "STAY_S", 1e9)
        yield


async def test_transfers_are_moved_on_between_empty_steps() -> None:
    engine, runner = loading_engine()
    async with asyncio.timeout(PATIENCE_S), engine:
        done = await engine.complete(prompt_of(36), greedy(3), request_id="loads")
    assert list(done.token_ids) == answer(prompt_of(36), 3)
    assert done.usage.num_external_cached_tokens == 32
    assert runner.num_looks >= 3


async def test_where_there_is_nothing_to_move_on_one_look_is_enough() -> None:
    engine, runner = loading_engine()
    runner.has_more = False
    async with asyncio.timeout(PATIENCE_S), engine:
        done = await engine.complete(prompt_of(36), greedy(3), request_id="loads")
    assert list(done.token_ids) == answer(prompt_of(36), 3)
    empty = [one for one in runner.executed if not one.total_num_scheduled_tokens]
    assert runner.num_looks <= len(empty)


@pytest.mark.parametrize("stays_long", [False, True])
async def test_news_that_end_a_stay_are_asked_for_at_once(
    stays_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the load has taken by then: no pause comes in between."""
    engine, runner = loading_engine(load_delay=2)
    with staying_for_ever(monkeypatch):
        async with asyncio.timeout(PATIENCE_S), engine, asyncio.TaskGroup() as tasks:
            loads = tasks.create_task(engine.complete(prompt_of(36), greedy(3), request_id="loads"))
            await asyncio.to_thread(runner.is_asked.wait, PATIENCE_S)
            monkeypatch.setattr(loop, "poll_pause", lambda _: 1e9)
            if stays_long:
                await asyncio.sleep(0.01)
            runner.has_more = False
    assert list(loads.result().token_ids) == answer(prompt_of(36), 3)


async def test_who_comes_meanwhile_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = loading_engine()
    with staying_for_ever(monkeypatch):
        async with asyncio.timeout(PATIENCE_S), engine, asyncio.TaskGroup() as tasks:
            loads = tasks.create_task(engine.complete(prompt_of(36), greedy(3), request_id="loads"))
            await asyncio.to_thread(runner.is_asked.wait, PATIENCE_S)
            done = await engine.complete(PROMPT, greedy(3))
            assert list(done.token_ids) == answer(PROMPT, 3)
            runner.has_more = False
    assert list(loads.result().token_ids) == answer(prompt_of(36), 3)


async def test_who_shares_the_device_thread_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another engine, for instance, whose steps this one's loop knows nothing of."""
    engine, runner = loading_engine()
    with staying_for_ever(monkeypatch):
        async with asyncio.timeout(PATIENCE_S), engine, asyncio.TaskGroup() as tasks:
            tasks.create_task(engine.complete(prompt_of(36), greedy(3), request_id="loads"))
            await asyncio.to_thread(runner.is_asked.wait, PATIENCE_S)
            try:
                async with asyncio.timeout(PATIENCE_S / 4):
                    assert await asyncio.shield(engine._device.submit(lambda: 1)) == 1
            finally:
                runner.has_more = False


@pytest.mark.parametrize("how", ["abort", "close", "cancel"])
async def test_who_ends_meanwhile_does_not_wait(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = loading_engine(load_delay=6)
    with staying_for_ever(monkeypatch):
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks, engine:
            asked = engine.complete(prompt_of(36), greedy(3), request_id="loads")
            loads = tasks.create_task(asked)
            await asyncio.to_thread(runner.is_asked.wait, PATIENCE_S)
            if how == "abort":
                assert engine.abort("loads")
            elif how == "cancel":
                loads.cancel()
    assert loads.cancelled() if how == "cancel" else loads.result().finish_reason == "abort"
    assert runner.closed
