"""A conversation: what is sent, what is remembered, and what Ctrl-C and errors leave behind."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import pytest
from fake_engine import WAIT, FakeEngine, Script

from interlace.cli.chat_session import ChatSession
from interlace.engine.errors import ConfigError, PromptError, RequestError
from interlace.engine.outputs import Usage
from interlace.engine.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=None)


class Shown(list[str]):
    """Collects what is shown, and calls `then` when the text `at` was."""

    def __init__(self, at: str = "", then: Callable[[], object] = bool) -> None:
        super().__init__()
        self._at, self._then = at, then

    async def __call__(self, text: str) -> None:
        self.append(text)
        if text == self._at:
            self._then()


def session_with(engine: FakeEngine, system: str | None = None) -> ChatSession:
    ticks = itertools.count()
    return ChatSession(engine, PARAMS, system=system, now=lambda: float(next(ticks)))


async def test_each_turn_sends_all_that_was_said() -> None:
    engine = FakeEngine()
    session = session_with(engine, system="Be kind.")
    shown = Shown()
    first = await session.turn("Hi", shown)
    await session.turn("Again", shown)
    assert shown == ["Hel", "lo."] * 2
    assert first.text == "Hello."
    assert first.token_ids == (101, 102)
    assert first.finish_reason == "stop"
    assert engine.prompts[1] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Again"},
    ]
    assert all(stream.closed for stream in engine.streams)


async def test_speed_is_counted_from_the_first_token_on() -> None:
    turn = await session_with(FakeEngine(Script("abcde"))).turn("Hi", Shown())
    assert turn.tokens_per_second == 1.0  # four tokens in the four ticks after the first
    one = await session_with(FakeEngine(Script("a"))).turn("Hi", Shown())
    assert one.tokens_per_second is None


async def test_clear_keeps_the_system_message() -> None:
    engine = FakeEngine()
    session = session_with(engine, system="Be kind.")
    await session.turn("Hi", Shown())
    session.clear()
    await session.turn("New", Shown())
    assert engine.prompts[1] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "New"},
    ]


async def test_a_resumed_conversation_brings_its_own_system_message() -> None:
    earlier = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    session = session_with(FakeEngine(), system="Be kind.")
    session.resume(earlier)
    assert session.messages == earlier
    session.clear()
    assert session.messages == earlier[:1]
    session.resume([])
    session.clear()
    assert session.messages == []
    with pytest.raises(ConfigError, match="no chat template"):
        session_with(FakeEngine(has_template=False)).resume(earlier)


async def test_a_stopped_answer_is_remembered_as_far_as_it_came() -> None:
    engine = FakeEngine(Script(["One", " two", WAIT]))
    session = session_with(engine)
    assert not session.stop()
    stops: list[bool] = []
    shown = Shown(at=" two", then=lambda: stops.extend([session.stop(), session.stop()]))
    turn = await session.turn("Count", shown)
    assert stops == [True, False], "the second time it is ending already"
    assert turn.finish_reason == "abort"
    assert session.messages[-1] == {"role": "assistant", "content": "One two"}
    assert not session.stop()


async def test_a_turn_stopped_before_any_text_leaves_no_trace() -> None:
    session = session_with(FakeEngine(Script([WAIT])))
    async with asyncio.TaskGroup() as group:
        turn = group.create_task(session.turn("Count", Shown()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert session.stop()
    assert turn.result().text == ""
    assert session.messages == []


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (Script(refusal=PromptError("too long")), PromptError),
        (Script(refusal_at_first_item=PromptError("too long")), PromptError),
        (Script(["He"], finish_reason="error", error="no such token"), RequestError),
    ],
)
async def test_a_failed_turn_leaves_the_conversation_as_it_was(
    script: Script, error: type[Exception]
) -> None:
    engine = FakeEngine(Script(), script, Script(["Fine"]))
    session = session_with(engine)
    await session.turn("Hi", Shown())
    before = list(session.messages)
    with pytest.raises(error):
        await session.turn("Bad", Shown())
    assert session.messages == before
    assert all(stream.closed for stream in engine.streams)
    assert (await session.turn("Good", Shown())).text == "Fine"


async def test_cancelling_a_turn_closes_its_stream() -> None:
    engine = FakeEngine(Script(["One", WAIT]))
    session = session_with(engine)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await session.turn("Count", Shown())
    assert engine.streams[0].closed
    assert session.messages == []


@pytest.mark.parametrize("text", ["", " ", "\n\t"])
async def test_an_empty_prompt_is_refused(text: str) -> None:
    engine = FakeEngine()
    with pytest.raises(PromptError, match="empty"):
        await session_with(engine).turn(text, Shown())
    assert engine.prompts == []


async def test_without_a_template_each_turn_is_a_completion_of_its_own() -> None:
    engine = FakeEngine(has_template=False)
    session = session_with(engine)
    await session.turn("Once upon", Shown())
    await session.turn("a time", Shown())
    assert engine.prompts == ["Once upon", "a time"]
    with pytest.raises(ConfigError, match="--system"):
        session_with(engine, system="Be kind.")


async def test_a_full_context_is_told() -> None:
    usage = Usage(90, 0, 0, 10)
    engine = FakeEngine(Script(finish_reason="length", usage=usage))
    assert (await session_with(engine).turn("Hi", Shown())).context_is_full
    engine = FakeEngine(Script(finish_reason="length", usage=Usage(80, 0, 0, 10)))
    assert not (await session_with(engine).turn("Hi", Shown())).context_is_full
