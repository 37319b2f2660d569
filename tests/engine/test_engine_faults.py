"""What one request breaks ends that request; what breaks the loop ends everyone, at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from engine_kit import (
    PATIENCE_S,
    OpenEngine,
    build_engine,
    greedy,
    open_engine,
    read_all,
    tokens_of,
)
from paged_oracle import answer

from interlace.engine.errors import EngineDeadError, RequestError
from interlace.engine.outputs import RequestOutput
from interlace.engine.request_stream import RequestStream
from interlace.engine.sampling_params import SamplingParams
from interlace.engine.scheduler import Scheduler
from interlace.engine.text_stream import TextDelta, TextStream
from interlace.engine.tokenizer import Tokenizer

both_depths = pytest.mark.parametrize("depth", [1, 2])
BAD, GOOD = [9, 9, 9], [1, 2, 3]


async def _fate(stream: RequestStream) -> str:
    with pytest.raises(EngineDeadError) as caught:
        await read_all(stream)
    return str(caught.value)


async def _all_fates(it: OpenEngine, streams: Sequence[RequestStream]) -> set[str]:
    """Messages that pending readers and later callers get, without any step being let through."""
    async with asyncio.timeout(PATIENCE_S):
        fates = set(await asyncio.gather(*(_fate(stream) for stream in streams)))
    for _ in range(2):
        with pytest.raises(EngineDeadError) as caught:
            it.engine.generate(GOOD)
        fates.add(str(caught.value))
    with pytest.raises(EngineDeadError) as caught:
        await it.engine.complete("abc")
    return fates | {str(caught.value)}


@pytest.mark.parametrize(
    "error",
    [ValueError("boom"), StopIteration("boom"), asyncio.CancelledError("boom"), SystemExit("boom")],
    ids=lambda error: type(error).__name__,
)
@both_depths
async def test_fe04_a_step_that_raises_ends_everyone(depth: int, error: BaseException) -> None:
    async with open_engine(depth=depth, max_num_seqs=1) as it:
        events = it.engine.events()
        streams = [it.generate(GOOD, 20), it.generate(BAD, 20), it.generate("abc", 20)]
        await it.runner.next_step()
        it.runner.error = error
        it.runner.allow()
        if depth == 2:
            await it.runner.next_step()  # which hangs from now on
        fates = await _all_fates(it, streams)
        assert len(fates) == 1
        assert "boom" in fates.pop()
        assert not any(it.engine.abort(stream.request_id) for stream in streams)
        assert (await anext(events)).name == "request.queued", "what happened can still be read"
        assert "step.scheduled" in [event.name async for event in events]
        assert it.engine.snapshot().num_preparing_requests <= 1


@both_depths
async def test_fe04_a_scheduler_that_raises_ends_everyone(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_engine(depth=depth) as it:
        stream = it.generate(GOOD, 20)
        await it.runner.next_step()

        def fail(*_: object, **__: object) -> None:
            raise KeyError("lost count")

        monkeypatch.setattr(Scheduler, "schedule", fail)
        it.runner.allow()
        fates = await _all_fates(it, [stream])
        assert len(fates) == 1
        assert "KeyError: 'lost count'" in fates.pop()


@both_depths
async def test_fe04_a_step_loop_that_is_killed_ends_everyone(depth: int) -> None:
    async with open_engine(depth=depth) as it:
        streams = [it.generate(GOOD, 20), it.generate("abc", 20)]
        await it.runner.next_step()
        for task in asyncio.all_tasks():
            if task.get_name() == "interlace-step-loop":
                task.cancel()
        fates = await _all_fates(it, streams)
        assert len(fates) == 1
        assert "cancelled" in fates.pop()
    assert it.runner.closed


async def test_each_caller_gets_an_error_of_its_own_with_the_same_cause() -> None:
    async with open_engine() as it:
        stream = it.generate(GOOD, 20)
        await it.runner.next_step()
        it.runner.error = ValueError("boom")
        it.runner.allow()
        with pytest.raises(EngineDeadError) as first:
            await read_all(stream)
        with pytest.raises(EngineDeadError) as second:
            it.engine.generate(GOOD)
        assert first.value is not second.value
        assert first.value.__cause__ is second.value.__cause__
        assert isinstance(first.value.__cause__, ValueError)


async def test_what_was_computed_before_the_fault_can_still_be_read() -> None:
    async with open_engine() as it:
        stream = it.generate(GOOD, 20)
        it.runner.allow(2)
        for _ in range(3):
            await it.runner.next_step()
        it.runner.error = ValueError("boom")
        it.runner.allow()
        deltas: list[RequestOutput] = []

        async def read() -> None:
            async for delta in stream:
                deltas.append(delta)

        with pytest.raises(EngineDeadError, match="boom"):
            await read()
        assert tokens_of(deltas) == answer(GOOD, 2)


@both_depths
async def test_closing_a_dead_engine_waits_for_the_step_that_hangs(depth: int) -> None:
    async with open_engine(depth=depth) as it:
        stream = it.generate(GOOD, 20)
        await it.runner.next_step()
        it.runner.error = ValueError("boom")
        it.runner.allow()
        await _fate(stream)
    assert it.runner.closed
    with pytest.raises(EngineDeadError, match="boom"):
        it.engine.generate(GOOD)  # the first cause stays, also after closing


@both_depths
async def test_a_fault_while_closing_hides_nothing(depth: int) -> None:
    async with open_engine(depth=depth) as it:
        stream = it.generate(GOOD, 20)
        await it.runner.next_step()
        it.runner.error = ValueError("boom")
    assert (await read_all(stream))[-1].finish_reason == "abort"
    assert it.runner.closed


# --- one request's own faults --------------------------------------------------------------------


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> list[TextStream]:
    """The text streams of requests whose prompt is `BAD`."""
    found: list[TextStream] = []
    init = TextStream.__init__

    def marking(
        self: TextStream, tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams
    ) -> None:
        init(self, tokenizer, prompt, params)
        if list(prompt) == BAD:
            found.append(self)

    monkeypatch.setattr(TextStream, "__init__", marking)
    return found


async def _only_the_bad_one_fails(it: OpenEngine, why: str, max_tokens: int = 6) -> None:
    done = await asyncio.gather(
        *(it.engine.complete(p, greedy(max_tokens)) for p in (GOOD, BAD, GOOD, [5, 6, 8]))
    )
    assert [d.finish_reason for d in done] == ["length", "error", "length", "length"]
    assert why in (done[1].error or "")
    for d, prompt in zip((done[0], done[3]), (GOOD, [5, 6, 8]), strict=True):
        assert list(d.token_ids) == answer(prompt, max_tokens)
    await it.assert_works()


@both_depths
@pytest.mark.parametrize("at", [1, 3, 6])
async def test_an_exception_in_one_requests_text_ends_it_alone(
    depth: int, at: int, marked: list[TextStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    # I9
    push, calls = TextStream.push, [0]

    def failing(
        self: TextStream, token_ids: Sequence[int], *, hide_last: bool = False
    ) -> TextDelta:
        if self in marked:
            calls[0] += 1
            if calls[0] == at:
                raise ValueError("no text")
        return push(self, token_ids, hide_last=hide_last)

    monkeypatch.setattr(TextStream, "push", failing)
    async with open_engine(is_open=True, depth=depth) as it:
        await _only_the_bad_one_fails(it, "ValueError: no text")


@both_depths
async def test_an_exception_in_one_requests_last_text_ends_it_alone(
    depth: int, marked: list[TextStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = TextStream.finish

    def failing(self: TextStream) -> str:
        if self in marked:
            raise ValueError("no end")
        return finish(self)

    monkeypatch.setattr(TextStream, "finish", failing)
    async with open_engine(is_open=True, depth=depth) as it:
        await _only_the_bad_one_fails(it, "ValueError: no end")
        # Aborting is an end, too, and a reader must be told whatever happens in its text.
        stream = it.generate(BAD, 1000 // 20)
        await anext(stream)
        it.engine.abort(stream.request_id)
        assert (await read_all(stream))[-1].finish_reason in ("abort", "error")
        await it.assert_works()


async def test_an_exception_as_the_text_begins_fails_the_call_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For text it comes after the call, in the engine's own task: that must survive it."""
    init = TextStream.__init__

    def failing(
        self: TextStream, tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams
    ) -> None:
        if list(prompt) == [0, 1, 2]:
            raise ValueError("no beginning")
        init(self, tokenizer, prompt, params)

    monkeypatch.setattr(TextStream, "__init__", failing)
    async with open_engine(is_open=True) as it:
        good = it.generate(GOOD, 20)
        with pytest.raises(RequestError, match="no beginning"):
            await read_all(it.generate("abc", 3))
        with pytest.raises(ValueError, match="no beginning"):
            it.generate([0, 1, 2], 3)
        assert tokens_of(await read_all(good)) == answer(GOOD, 20)
        await it.assert_works()


@pytest.mark.parametrize("error", [ValueError("bad text"), StopIteration("bad text")], ids=repr)
async def test_an_exception_in_the_tokenizer_ends_its_request_alone(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = Tokenizer.encode

    def failing(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        if text == "bad":
            raise error
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", failing)
    async with open_engine(is_open=True) as it:
        good = it.generate("abc", 5)
        with pytest.raises(RequestError, match=r"the prompt cannot be read: .*bad text"):
            await read_all(it.generate("bad", 5))
        assert tokens_of(await read_all(good)) == answer([0, 1, 2], 5)
        await it.assert_works()


@both_depths
@pytest.mark.parametrize("num_good_steps", [0, 2])
async def test_a_request_that_cannot_be_sampled_ends_alone(depth: int, num_good_steps: int) -> None:
    # I9
    async with open_engine(depth=depth) as it:
        bad = it.generate(BAD, 9, request_id="bad")
        good = it.generate(GOOD, 9, request_id="good")
        it.runner.allow(num_good_steps)
        for _ in range(num_good_steps + 1):
            await it.runner.next_step()
        it.runner.request_errors["bad"] = "its weights are NaN"
        it.runner.open()
        deltas = await read_all(bad)
        assert (deltas[-1].finish_reason, deltas[-1].error) == ("error", "its weights are NaN")
        assert tokens_of(deltas) == answer(BAD, num_good_steps)
        assert tokens_of(await read_all(good)) == answer(GOOD, 9)
        await it.assert_works()


async def test_an_engine_that_was_never_opened_holds_no_thread() -> None:
    async with open_engine(is_open=True) as it:
        engine = build_engine(it.runner)
        with pytest.raises(EngineDeadError):
            engine.generate(GOOD)
        assert not engine._device._executor._threads
