"""FE01, FE02, FE03: whoever leaves, in whatever way and state, leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
from engine_kit import (
    PATIENCE_S,
    GatedRunner,
    OpenEngine,
    build_engine,
    greedy,
    open_engine,
    read_all,
    tokens_of,
    toy_tokenizer,
    until,
)
from paged_oracle import answer

from interlace import front_door
from interlace.engine.config import EngineConfig
from interlace.engine.errors import EngineBusyError, EngineDeadError, RequestError
from interlace.engine.ports import Progress
from interlace.engine.request_stream import RequestStream

STATES = ["preparing", "queued", "prefill", "decode"]
PROMPT = [0, 1, 2, 3, 4, 5, 6, 8, 9]  # "abcdefgij"
TEXT = "abcdefgij"

both_depths = pytest.mark.parametrize("depth", [1, 2])
every_state = pytest.mark.parametrize("state", STATES)


@pytest.fixture
def text_gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds every tokenising thread until it is set."""
    gate = threading.Event()
    encode = toy_tokenizer().encode

    def held(self: object, text: str, add_special_tokens: bool = True) -> list[int]:
        assert gate.wait(PATIENCE_S)
        return encode(text, add_special_tokens)

    monkeypatch.setattr("interlace.engine.tokenizer.Tokenizer.encode", held)
    yield gate
    gate.set()


@asynccontextmanager
async def engine_for(state: str, depth: int) -> AsyncIterator[OpenEngine]:
    budget = 4 if state == "prefill" else 64
    seqs = 1 if state == "queued" else 8
    async with open_engine(depth=depth, max_num_batched_tokens=budget, max_num_seqs=seqs) as it:
        yield it


async def start(it: OpenEngine, state: str) -> RequestStream:
    """A request in `state`; but for "preparing", a step waits at the gate."""
    if state == "preparing":
        return it.generate(TEXT, 30, request_id="mine")
    if state == "queued":
        it.kept.append(it.generate(PROMPT, 30, request_id="other"))
        await it.runner.next_step()
        stream = it.generate(PROMPT, 30, request_id="mine")
        await asyncio.sleep(0.01)
        assert [r.request_id for r in it.engine.snapshot().waiting] == ["mine"]
        return stream
    stream = it.generate(PROMPT, 30, request_id="mine")
    await it.runner.next_step()
    it.runner.allow()
    if state == "decode":
        assert (await anext(stream)).token_ids == (answer(PROMPT, 1)[0],)
    await it.runner.next_step()
    assert it.engine.snapshot().num_inflight_steps > 0
    return stream


# --- ways to leave: each is handed the only reference to the stream ------------------------------


async def read(stream: RequestStream) -> None:
    async for _ in stream:
        pass


async def cancel(it: OpenEngine, streams: list[RequestStream]) -> None:
    it.kept += streams  # so that the cancellation is all that happens
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(read(streams.pop()))
        await asyncio.sleep(0)
        task.cancel()
    assert task.cancelled()


async def time_out(it: OpenEngine, streams: list[RequestStream]) -> None:
    it.kept += streams
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(streams.pop()), 0.01)


async def close(it: OpenEngine, streams: list[RequestStream]) -> None:
    stream = streams.pop()
    await stream.aclose()
    await stream.aclose()
    last = (await read_all(stream))[-1]
    assert last.finish_reason == "abort", "who reads on is told, and does not wait"


async def drop(it: OpenEngine, streams: list[RequestStream]) -> None:
    streams.clear()
    gc.collect()


async def drop_in_another_thread(it: OpenEngine, streams: list[RequestStream]) -> None:
    thread = threading.Thread(target=streams.clear)
    thread.start()
    await until(lambda: not thread.is_alive())


async def abort(it: OpenEngine, streams: list[RequestStream]) -> None:
    assert it.engine.abort("mine")
    assert not it.engine.abort("mine"), "it has ended"
    assert (await read_all(streams.pop()))[-1].finish_reason == "abort"


WAYS = [cancel, time_out, close, drop, drop_in_another_thread, abort]


@both_depths
@every_state
@pytest.mark.parametrize("leave", WAYS)
async def test_leaving_frees_everything(
    leave: Callable[[OpenEngine, list[RequestStream]], Awaitable[None]],
    state: str,
    depth: int,
    text_gate: threading.Event,
) -> None:
    async with engine_for(state, depth) as it:
        streams = [await start(it, state)]
        await leave(it, streams)
        it.engine.abort("other")
        text_gate.set()
        await until(lambda: "mine" not in it.engine._scheduler.requests)
        await it.assert_works()
        told = [i for step in it.runner.executed for i in step.finished_req_ids]
        assert len(told) == len(set(told)), "each end is told once"


@both_depths
async def test_breaking_out_of_the_loop(depth: int) -> None:
    async with open_engine(is_open=True, depth=depth) as it:
        async for delta in it.generate(PROMPT, 30):
            assert not delta.finished
            break
        gc.collect()
        await it.assert_works()


@both_depths
@every_state
async def test_abort_from_another_task_wakes_the_reader(
    state: str, depth: int, text_gate: threading.Event
) -> None:
    """FE01, while the step stays held: the reader does not wait for the device."""
    async with engine_for(state, depth) as it:
        stream = await start(it, state)
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(read_all(stream))
            await asyncio.sleep(0)
            assert it.engine.abort("mine")
        last = reader.result()[-1]
        assert (last.finish_reason, last.error) == ("abort", None)
        assert last.usage is not None
        it.engine.abort("other")
        text_gate.set()
        await it.assert_works()


@both_depths
async def test_completing_is_cancelled_like_any_reader(depth: int) -> None:
    """FE03"""
    async with open_engine(depth=depth) as it:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(it.engine.complete(PROMPT, greedy(30)), 0.01)
        await it.assert_works()


@both_depths
async def test_only_the_one_that_left_ends(depth: int) -> None:
    """FE02: of three answers to one prompt, two go on."""
    async with open_engine(depth=depth) as it:
        streams = [it.generate(PROMPT, 12) for _ in range(3)]
        await it.runner.next_step()
        await streams[1].aclose()
        it.runner.open()
        for stream in (streams[0], streams[2]):
            assert tokens_of(await read_all(stream)) == answer(PROMPT, 12)
        await it.assert_works()


async def test_aborting_what_is_not_there() -> None:
    async with open_engine(is_open=True) as it:
        assert not it.engine.abort("nobody")
        await read_all(it.generate(PROMPT, 2, request_id="mine"))
        assert not it.engine.abort("mine")
        await it.assert_works()


@both_depths
async def test_an_id_is_free_at_once_though_its_old_step_is_in_flight(depth: int) -> None:
    async with open_engine(depth=depth) as it:
        old = it.generate(PROMPT, 30, request_id="mine")
        await it.runner.next_step()
        assert it.engine.abort("mine")
        new = it.generate([5, 6, 8], 10, request_id="mine")
        await old.aclose()  # must not end the new one
        it.runner.open()
        assert tokens_of(await read_all(new)) == answer([5, 6, 8], 10)
        assert [d.token_ids for d in await read_all(old)] == [()]
        await it.assert_works()


async def test_an_id_is_free_at_once_though_its_old_text_is_in_a_thread(
    text_gate: threading.Event,
) -> None:
    async with open_engine(is_open=True, max_waiting_requests=3) as it:
        old = it.generate(TEXT, 9, request_id="mine")
        assert it.engine.abort("mine")
        assert not it.engine.abort("mine")
        new = it.generate("bcd", 9, request_id="mine")
        await old.aclose()
        with pytest.raises(RequestError, match="in use"):
            it.generate("abc", 9, request_id="mine")
        it.kept.append(it.generate("abc", 9))
        with pytest.raises(EngineBusyError):
            it.generate("abc", 9)  # what a thread still works on counts, aborted or not
        text_gate.set()
        assert tokens_of(await read_all(new)) == answer([1, 2, 3], 9)
        await read_all(it.kept.pop())
        await it.assert_works()


@both_depths
async def test_dropping_an_old_stream_leaves_a_new_request_of_its_id_alone(depth: int) -> None:
    async with open_engine(depth=depth) as it:
        streams = [it.generate(PROMPT, 30, request_id="mine")]
        await it.runner.next_step()
        it.engine.abort("mine")
        new = it.generate([5, 6, 8], 10, request_id="mine")
        streams.clear()
        gc.collect()
        it.runner.open()
        assert tokens_of(await read_all(new)) == answer([5, 6, 8], 10)


# --- the engine goes away ------------------------------------------------------------------------


@both_depths
@every_state
async def test_closing_the_engine_ends_its_requests(
    state: str, depth: int, text_gate: threading.Event
) -> None:
    async with engine_for(state, depth) as it:
        stream = await start(it, state)
        text_gate.set()
        it.runner.open()
    assert (await read_all(stream))[-1].finish_reason == "abort"
    assert it.engine.snapshot().idle
    assert it.engine.snapshot().num_fenced_blocks == 0
    assert it.runner.closed


@both_depths
async def test_closing_waits_for_the_step_in_flight_even_when_cancelled(depth: int) -> None:
    # I8
    runner = GatedRunner()
    engine = build_engine(runner, depth=depth)
    streams: list[RequestStream] = []

    async def live() -> None:
        async with engine:
            streams.append(engine.generate(PROMPT, greedy(30)))
            await runner.next_step()

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(live())
        await until(lambda: engine._dead is not None)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.01)
        assert (task.done(), runner.closed) == (False, False)
        with pytest.raises(EngineDeadError):
            engine.generate(PROMPT)
        runner.open()
    assert task.cancelled()
    assert runner.closed, "after the last step, and all the same"
    assert len(runner.executed) == min(depth, engine.snapshot().stats.num_steps)
    assert (await read_all(streams[0]))[-1].finish_reason == "abort"


async def test_a_body_that_raises_still_closes() -> None:
    runner = GatedRunner(is_open=True)
    engine = build_engine(runner)
    streams: list[RequestStream] = []

    async def live() -> None:
        async with engine:
            streams.append(engine.generate(PROMPT, greedy(30)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await live()
    assert (await read_all(streams[0]))[-1].finish_reason == "abort"
    assert runner.closed


async def test_an_error_while_the_runner_closes_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = GatedRunner(is_open=True)

    def fail() -> None:
        raise ValueError("cannot close")

    monkeypatch.setattr(runner, "close", fail)
    engine = build_engine(runner)
    with pytest.raises(ValueError, match="cannot close"):
        async with engine:
            await engine.complete(PROMPT, greedy(2))
    with pytest.raises(RuntimeError):
        engine._device.submit(print)  # the thread has ended


async def _open_what_never_opens() -> None:
    async with front_door.AsyncEngine.from_config(EngineConfig()):
        raise AssertionError("it was never opened")


async def test_a_load_that_is_cancelled_ends_at_its_next_sign_of_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, ended = threading.Event(), threading.Event()

    def load(_: EngineConfig, progress: Progress, *__: object) -> None:
        try:
            with progress.task("Downloading", None) as advance:
                begun.set()
                give_up_s = time.monotonic() + PATIENCE_S
                while time.monotonic() < give_up_s:
                    advance(0)
        finally:
            ended.set()

    monkeypatch.setattr(front_door, "_load", load)

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(_open_what_never_opens())
        await until(begun.is_set)
        task.cancel()
    assert task.cancelled()
    assert ended.is_set()


async def test_cancelling_while_the_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, begun, ended = threading.Event(), threading.Event(), threading.Event()

    def load(*_: object) -> None:
        begun.set()
        assert gate.wait(PATIENCE_S)
        ended.set()

    monkeypatch.setattr(front_door, "_load", load)

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(_open_what_never_opens())
        await until(begun.is_set)
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done(), "the load is not abandoned"
        gate.set()
    assert task.cancelled()
    assert ended.is_set()
