"""A connector under the whole engine: the loop polls, sleeps, closes in order, and never hangs."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from connected import NOTHING, Sides, scripted_sides
from engine_kit import PATIENCE_S, OpenEngine, greedy, open_engine, read_all, until
from paged_oracle import answer
from tiny_model import tiny_model

from interlace import EngineConfig, KVTransferConfig, front_door
from interlace.connectors.conformance import Async, Rule, Script, Sync
from interlace.engine import loop
from interlace.engine.errors import EngineDeadError, RequestError

both_depths = pytest.mark.parametrize("depth", [1, 2])
PROMPT = [(i * i + 3 * i) % 47 for i in range(17)]


async def warm(script: Script) -> None:
    rules, script.default = script.default, NOTHING
    async with open_engine(is_open=True, connector=scripted_sides(script)) as it:
        await it.engine.complete([*PROMPT, 0], greedy(1))
        await until(lambda: len(script.store) >= 4)
    script.default = rules


def sides_of(script: Script, num_blocks: int = 32) -> Sides:
    return scripted_sides(script, num_blocks=num_blocks)


def _states(it: OpenEngine) -> list[str]:
    return [request.status for request in it.engine.snapshot().waiting]


async def assert_answer(it: OpenEngine, num_tokens: int = 6) -> Any:
    done = await it.engine.complete(PROMPT, greedy(num_tokens))
    assert list(done.token_ids) == answer(PROMPT, num_tokens)
    return done


@both_depths
@pytest.mark.parametrize("delay", [0, 1, 7])
async def test_b23_an_idle_engine_ends_a_load_by_itself(depth: int, delay: int) -> None:
    """No other traffic wakes it; with one failure and without."""
    script = Script(default=Rule(answers=(Async(16),), load_delay=delay))
    await warm(script)
    async with open_engine(is_open=True, depth=depth, connector=sides_of(script)) as it:
        done = await assert_answer(it)
        assert done.usage.num_external_cached_tokens == 16
        script.default = Rule(
            answers=(Async(16),), load_delay=delay, fail=frozenset({0}), num_failing_loads=1
        )
        assert it.engine.reset_prefix_cache()
        await assert_answer(it)
        await it.assert_nothing_left()


@both_depths
async def test_an_answer_of_none_is_asked_for_again(depth: int) -> None:
    script = Script(default=Rule(answers=(None, None, None, None, Sync(16))))
    await warm(script)
    async with open_engine(is_open=True, depth=depth, connector=sides_of(script)) as it:
        done = await assert_answer(it)
        assert done.usage.num_external_cached_tokens == 16


async def test_waiting_for_a_connector_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every empty step but the first one comes after a pause."""
    pauses: list[float] = []
    wait_for = asyncio.wait_for

    async def noted(awaitable: Any, pause_s: float) -> Any:
        pauses.append(pause_s)
        return await wait_for(awaitable, 0.001)

    monkeypatch.setattr(asyncio, "wait_for", noted)
    script = Script(default=Rule(answers=(Async(16),), load_delay=12))
    await warm(script)
    pauses.clear()
    async with open_engine(is_open=True, connector=sides_of(script)) as it:
        await assert_answer(it)
    assert len(pauses) == 12
    assert all(loop.SHORTEST_POLL_S <= pause <= loop.LONGEST_POLL_S for pause in pauses)


def test_pauses_grow_with_the_time_that_was_waited() -> None:
    assert loop.poll_pause(0.0) == loop.SHORTEST_POLL_S
    assert loop.poll_pause(0.032) == pytest.approx(0.002)
    assert loop.poll_pause(1000.0) == loop.LONGEST_POLL_S


async def test_an_engine_that_waits_for_nothing_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(default=NOTHING)
    async with open_engine(is_open=True, connector=sides_of(script)) as it:
        await assert_answer(it)
        await it.assert_nothing_left()
        calls = len(script.calls)
        await asyncio.sleep(0.05)
        assert len(script.calls) == calls


@both_depths
async def test_closing_sees_off_requests_that_are_held(depth: int) -> None:
    """A connector that has saved something may still have to publish it."""
    script = Script(default=Rule(answers=((0, False),), hold=True, send_delay=5))
    async with open_engine(is_open=True, depth=depth, connector=sides_of(script)) as it:
        await assert_answer(it)
        assert it.engine.snapshot().num_held_requests == 1
    assert it.engine.snapshot().num_held_requests == 0
    assert it.engine.snapshot().idle
    assert script.count("shutdown") == 2


async def test_closing_tells_the_connector_of_every_end() -> None:
    """I18: also of requests that closing itself aborts."""
    script = Script(default=NOTHING)
    async with open_engine(is_open=True, connector=sides_of(script)) as it:
        stream = it.generate(PROMPT, 50, request_id="cut")
        await anext(aiter(stream))
    ends = [call.summary for call in script.calls if call.hook == "get_finished"]
    assert len([summary for summary in ends if "cut" in summary]) == 1
    assert script.count("request_finished") == 1


async def test_closing_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "CLOSING_S", 0.1)
    script = Script(default=Rule(answers=((0, False),), hold=True, send_delay=None))
    async with open_engine(is_open=True, connector=sides_of(script)) as it:
        await assert_answer(it)
    assert it.engine.snapshot().num_held_requests == 1
    assert script.count("shutdown") == 2


@both_depths
@pytest.mark.parametrize("bad", [frozenset[int](), frozenset({3})])
async def test_an_idle_engine_ends_a_load_from_the_back_by_itself(
    bad: frozenset[int], depth: int
) -> None:
    script = Script()
    await warm(script)
    script.default = Rule(answers=(Async(16),), compute_ends=(8,), load_delay=7, fail=bad)
    async with open_engine(is_open=True, depth=depth, connector=sides_of(script)) as it:
        done = await assert_answer(it)
        assert done.usage.num_local_cached_tokens == 0
        assert done.usage.num_external_cached_tokens == (4 if bad else 8)
        assert it.engine.snapshot().stats.num_external_cached_tokens == (4 if bad else 8)
        await it.assert_nothing_left()


@both_depths
@pytest.mark.parametrize("delay", [7, None])
async def test_closing_while_a_request_is_loaded_from_the_back(
    delay: int | None, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks are filled until the load ends, if it does."""
    if delay is None:
        monkeypatch.setattr(loop, "CLOSING_S", 0.1)
    script = Script()
    await warm(script)
    script.default = Rule(answers=(Async(16),), compute_ends=(8,), load_delay=delay)
    async with open_engine(is_open=True, depth=depth, connector=sides_of(script)) as it:
        stream = it.generate(PROMPT, 6)
        await until(lambda: [r.num_computed_tokens for r in it.engine.snapshot().running] == [8])
    assert (await read_all(stream))[-1].finish_reason == "abort"
    assert it.engine.snapshot().num_held_requests == (delay is None)
    assert script.count("shutdown") == 4  # of two engines


@both_depths
async def test_aborts_while_it_loads(depth: int) -> None:
    script = Script(default=Rule(answers=(Async(16),), load_delay=14))
    await warm(script)
    async with open_engine(is_open=True, depth=depth, connector=sides_of(script, 8)) as it:
        stream = it.generate(PROMPT, 6, request_id="one")
        await until(lambda: _states(it) == ["WAITING_FOR_REMOTE_KVS"])
        assert it.engine.abort("one")
        deltas = await read_all(stream)
        assert deltas[-1].finish_reason == "abort"
        with pytest.raises(RequestError, match="in use"):
            it.generate(PROMPT, 6, request_id="one")
        await assert_answer(it)
        await it.assert_nothing_left()
        again = it.generate(PROMPT, 1, request_id="one")
        assert (await read_all(again))[-1].finish_reason == "length"


async def test_a_failed_load_under_fail_reaches_the_caller() -> None:
    script = Script(default=Rule(answers=(Sync(16),), fail=frozenset({1})))
    await warm(script)
    async with open_engine(is_open=True, connector=sides_of(script), failure_policy="fail") as it:
        done = await it.engine.complete(PROMPT, greedy(6))
        assert done.finish_reason == "error"
        assert "recompute" in (done.error or "")
        assert done.token_ids == ()
        await it.assert_nothing_left()


async def test_a_request_that_its_match_query_ends_is_told_at_once() -> None:
    script = Script(default=Rule(answers=((99, False),)))
    async with open_engine(is_open=True, connector=sides_of(script)) as it:
        done = await it.engine.complete(PROMPT, greedy(6))
        assert done.finish_reason == "error"
        assert "get_num_new_matched_tokens answered (99, False)" in (done.error or "")
        script.default = NOTHING
        await assert_answer(it)
        await it.assert_nothing_left()


async def test_a_fatal_hook_ends_every_waiter_and_both_sides_are_shut_down() -> None:
    script = Script(default=NOTHING, raises={"save_kv_layer": (3, ValueError("oh"))})
    async with open_engine(is_open=True, connector=sides_of(script)) as it:
        streams = [it.generate([i] * 5, 9) for i in range(3)]
        for stream in streams:
            with pytest.raises(EngineDeadError, match="save_kv_layer raised ValueError: oh"):
                await read_all(stream)
    assert script.count("shutdown") == 2


async def test_parameters_reach_the_connector_and_the_caller() -> None:
    script = Script(default=Rule(answers=((0, False),), response_params={"remote": [1]}))
    async with open_engine(is_open=True, connector=sides_of(script)) as it:
        given = {"do_remote_decode": True}
        done = await it.engine.complete(PROMPT, greedy(2), kv_transfer_params=given)
        assert done.kv_transfer_params == {"remote": [1]}
        with pytest.raises(RequestError, match="must be a mapping"):
            it.engine.generate(PROMPT, kv_transfer_params=[1])  # type: ignore[arg-type]


async def test_resetting_the_connector_too() -> None:
    script = Script(default=Rule(answers=(Sync(),)))
    async with open_engine(is_open=True, connector=sides_of(script)) as it:
        await assert_answer(it)
        await it.assert_nothing_left()
        assert it.engine.reset_prefix_cache()
        assert script.store
        assert it.engine.reset_prefix_cache(reset_connector=True)
        assert not script.store
        done = await assert_answer(it)
        assert done.usage.num_computed_prompt_tokens == len(PROMPT)


async def test_an_engine_that_is_cancelled_while_it_opens_closes_what_was_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script, begun, gate = Script(), threading.Event(), threading.Event()
    make_parts = front_door.make_parts

    def slow(*args: Any) -> Any:
        begun.set()
        assert gate.wait(PATIENCE_S)
        return make_parts(*args)

    monkeypatch.setattr(front_door, "make_parts", slow)
    transfer = KVTransferConfig(
        kv_connector="ScriptedConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"script": script},
    )

    async def open_it() -> None:
        config = EngineConfig(kv_transfer_config=transfer)
        async with front_door.AsyncEngine.from_loaded(config, tiny_model()):
            raise AssertionError("it never opens")

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(open_it())
        await until(begun.is_set)
        task.cancel()
        await asyncio.sleep(0.01)
        gate.set()
    assert task.cancelled()
    assert script.count("shutdown") == 2
