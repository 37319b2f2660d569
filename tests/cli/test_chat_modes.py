"""Questions and conversations on a screen: what goes where, commands, exit codes."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import signal
import stat
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
from fake_engine import WAIT, FakeEngine, Script

from interlace.cli import screen as screen_module
from interlace.cli.chat_modes import converse, one_shot
from interlace.cli.chat_session import ChatSession
from interlace.cli.log_lines import log_between_answers
from interlace.cli.screen import MOST_WAITING, Screen
from interlace.engine.errors import EngineDeadError, PromptError
from interlace.engine.outputs import Usage
from interlace.engine.sampling_params import SamplingParams


class Lines:
    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = iter(lines)

    async def line(self) -> str | None:
        return next(self._lines, None)


class Chat:
    """A session with a fake engine, and what it wrote."""

    def __init__(
        self,
        engine: FakeEngine | None = None,
        terminal: bool = False,
        out: io.StringIO | None = None,
    ) -> None:
        self.engine = engine or FakeEngine()
        self.session = ChatSession(self.engine, SamplingParams(temperature=0.0))
        self.out, self.err = out or io.StringIO(), io.StringIO()
        self.screen = Screen(self.out, self.err, terminal=terminal)

    async def ask(self, text: str, as_json: bool = False) -> int:
        return await one_shot(self.session, text, self.screen, as_json=as_json)

    async def talk(self, *lines: str, interactive: bool = False, as_json: bool = False) -> int:
        return await converse(
            self.session, Lines(lines), self.screen, interactive=interactive, as_json=as_json
        )


async def test_the_answer_alone_goes_to_standard_output() -> None:
    chat = Chat()
    assert await chat.ask("Hi") == 0
    assert chat.out.getvalue() == "Hello.\n"
    assert chat.err.getvalue().startswith("[4 cached, 1 loaded, 5 computed, 2 generated")
    assert chat.err.getvalue().endswith("]\n")


async def test_json_is_one_object_and_nothing_else() -> None:
    chat = Chat(FakeEngine(Script(["né", "\x1b"])))
    assert await chat.ask("Hi", as_json=True) == 0
    assert json.loads(chat.out.getvalue()) == {
        "text": "né\x1b",
        "token_ids": [101, 102],
        "finish_reason": "stop",
        "usage": {
            "num_prompt_tokens": 10,
            "num_local_cached_tokens": 4,
            "num_external_cached_tokens": 1,
            "num_generated_tokens": 2,
        },
    }
    assert chat.out.getvalue().isascii()
    assert chat.err.getvalue() == ""


async def test_a_model_without_template_is_noted() -> None:
    chat = Chat(FakeEngine(has_template=False))
    await chat.ask("Once upon")
    assert "no chat template" in chat.err.getvalue()
    assert chat.out.getvalue() == "Hello.\n"


async def test_piped_lines_are_turns_of_one_conversation() -> None:
    chat = Chat()
    assert await chat.talk("Hi", "", "Again") == 0
    assert chat.out.getvalue() == "Hello.\nHello.\n"
    assert len(chat.engine.prompts) == 2
    assert len(chat.engine.prompts[1]) == 3
    assert ">" not in chat.err.getvalue()


async def test_piped_lines_as_json_are_one_object_per_line() -> None:
    chat = Chat()
    await chat.talk("Hi", "Again", as_json=True)
    assert [json.loads(line)["text"] for line in chat.out.getvalue().splitlines()] == ["Hello."] * 2


async def test_a_terminal_gets_prompts_and_costs_between_the_answers() -> None:
    chat = Chat(terminal=True)
    assert await chat.talk("Hi", interactive=True) == 0
    shown = chat.out.getvalue()
    assert shown.startswith(
        "fake, 100 tokens of context. /help lists the commands, /quit leaves.\n"
    )
    assert "Hello.\n[4 cached, 1 loaded, 5 computed, 2 generated" in shown
    assert chat.err.getvalue() == ""


async def test_control_characters_cannot_drive_a_terminal() -> None:
    chat = Chat(FakeEngine(Script(["\x1b[2J", "a\tb\n", "\x9b\u202e\r"])), terminal=True)
    await chat.ask("Hi")
    assert chat.out.getvalue().startswith("^[[2Ja\tb\n<U+009B><U+202E>^M\n")


async def test_commands() -> None:
    chat = Chat(terminal=True)
    assert (
        await chat.talk("/help", "Hi", "/stats", "/clear", "/quit", "unread", interactive=True) == 0
    )
    shown = chat.out.getvalue()
    assert "/save FILE" in shown
    assert "/load FILE" in shown
    assert "1 turns: 4 prompt tokens cached, 1 loaded, 5 computed, 2 generated" in shown
    assert "filled 12 of 100 tokens" in shown
    assert chat.session.messages == []
    assert len(chat.engine.prompts) == 1


async def test_an_unknown_command_gets_a_hint_and_is_not_sent() -> None:
    chat = Chat()
    await chat.talk("/sav x", "/zzz", " /usr/bin is a folder")
    assert "Did you mean /save?" in chat.err.getvalue()
    assert "/help lists the commands." in chat.err.getvalue()
    assert len(chat.engine.prompts) == 1


def test_save_writes_a_file_for_its_owner_alone(tmp_path: Path) -> None:
    as_json, as_markdown = tmp_path / "a chat.json", tmp_path / "chat.md"
    said = asyncio.run(said_beside("Hi", f"/save {as_json}", f"/save {as_markdown}", "/save"))
    saved = json.loads(as_json.read_text())
    assert saved["model"] == "fake"
    assert [m["content"] for m in saved["messages"]] == ["Hi", "Hello."]
    assert "## User\n\nHi\n\n## Assistant\n\nHello.\n" in as_markdown.read_text()
    assert stat.S_IMODE(as_json.stat().st_mode) == 0o600
    assert "Which file?" in said


def test_save_never_replaces_a_file_and_the_chat_goes_on(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("mine")
    said = asyncio.run(said_beside(f"/save {kept}", f"/save {tmp_path}/no/such", "Still there?"))
    assert "exists already" in said
    assert "No such file" in said
    assert "2 generated" in said
    assert kept.read_text() == "mine"


def test_what_was_saved_is_loaded_and_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "a chat.json"
    asyncio.run(said_beside("Hi", "And?", f"/save {file}"))

    async def next_day() -> Chat:
        chat = Chat()
        await chat.talk("Forgotten", f"/load {file}", "Go on", "/clear", "Anew", "/load")
        return chat

    chat = asyncio.run(next_day())
    said = [[m["content"] for m in p if isinstance(m, dict)] for p in chat.engine.prompts]
    assert said == [["Forgotten"], ["Hi", "Hello.", "And?", "Hello.", "Go on"], ["Anew"]]
    assert f"Going on after 4 messages of {file}.\n" in chat.err.getvalue()
    assert "Which file? /load FILE" in chat.err.getvalue()


def test_a_conversation_that_cannot_be_loaded_leaves_the_one_there_is(tmp_path: Path) -> None:
    for name in ("bad.json", "chat.md"):
        (tmp_path / name).write_text("{}")
    names = ("bad.json", "chat.md", "none.json", "nul\0")
    said = asyncio.run(said_beside("Hi", *(f"/load {tmp_path / name}" for name in names), "/stats"))
    assert "bad.json is damaged" in said
    assert "chat.md is Markdown" in said
    assert "none.json: No such file" in said
    assert "1 turns" in said


async def said_beside(*lines: str) -> str:
    chat = Chat()
    await chat.talk(*lines)
    return chat.err.getvalue()


async def test_a_conversation_that_is_too_long_is_kept_and_clear_is_named() -> None:
    too_long = Script(refusal_at_first_item=PromptError("101 tokens do not fit 100."))
    chat = Chat(FakeEngine(Script(), too_long, Script()))
    assert await chat.talk("Hi", "Too long", "Go on", interactive=True) == 0
    assert "101 tokens do not fit 100. The conversation is as it was" in chat.err.getvalue()
    assert "/clear" in chat.err.getvalue()
    assert len(chat.engine.prompts[2]) == 3


async def test_a_failed_turn_shows_in_the_exit_code_of_a_pipe() -> None:
    chat = Chat(FakeEngine(Script(refusal=PromptError("no")), Script()))
    assert await chat.talk("Bad", "Good") == 1
    assert chat.out.getvalue() == "Hello.\n"


async def test_a_dead_engine_ends_the_chat() -> None:
    chat = Chat(FakeEngine(Script(refusal=EngineDeadError("dead"))))
    with pytest.raises(EngineDeadError):
        await chat.talk("Hi", "Again")


async def test_an_answer_at_a_limit_says_which() -> None:
    chat = Chat(FakeEngine(Script(finish_reason="length")))
    await chat.ask("Hi")
    assert "--max-tokens reached" in chat.err.getvalue()
    chat = Chat(FakeEngine(Script(finish_reason="length", usage=Usage(98, 0, 0, 2))))
    await chat.ask("Hi")
    assert "/clear begins anew" in chat.err.getvalue()


class CtrlC(io.StringIO):
    """An output at which someone presses Ctrl-C when they have read `after`."""

    def __init__(self, after: str) -> None:
        super().__init__()
        self._after = after

    def write(self, text: str) -> int:
        written = super().write(text)
        if text == self._after:
            os.kill(os.getpid(), signal.SIGINT)
        return written


async def test_ctrl_c_stops_the_answer_and_the_chat_goes_on() -> None:
    chat = Chat(FakeEngine(Script(["Hel", WAIT]), Script(["Yes."])), out=CtrlC(after="Hel"))
    assert await chat.talk("Hi", "Again") == 0
    assert chat.out.getvalue() == "Hel\nYes.\n"
    assert "; stopped]" in chat.err.getvalue()
    assert len(chat.engine.prompts[1]) == 3


async def test_ctrl_c_makes_one_question_end_with_130() -> None:
    chat = Chat(FakeEngine(Script(["Hel", WAIT])), out=CtrlC(after="Hel"))
    assert await chat.ask("Hi") == 130
    assert chat.out.getvalue() == "Hel\n"


async def test_ctrl_c_at_the_prompt_leaves() -> None:
    class Silent:
        async def line(self) -> str | None:
            await chat.screen.prompt()
            await asyncio.Event().wait()
            return None

    chat = Chat(terminal=True, out=CtrlC(after="> "))
    code = await converse(chat.session, Silent(), chat.screen, interactive=True)
    assert code == 130
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


# -------------------------------------------------------------------- warnings


class Tty(io.StringIO):
    """Takes what both streams get, as one terminal does."""

    def isatty(self) -> bool:
        return True


def warn_by_default(text: str) -> None:
    """As the log does where nobody has configured it; here pytest has."""
    assert logging.lastResort is not None
    logging.lastResort.handle(
        logging.LogRecord("interlace", logging.WARNING, "x.py", 1, text, (), None)
    )


async def test_warnings_wait_for_the_end_of_the_answer() -> None:
    tty = Tty()
    screen = Screen(tty, tty, terminal=True)
    before = logging.lastResort
    async with log_between_answers(screen):
        warn_by_default("early")
        await screen.answer("One\n")
        await asyncio.to_thread(warn_by_default, "bad\x1b[2J")
        await screen.answer("two")
        warn_by_default("worse")
        await screen.answer(" three")
        await screen.note("done")
        await screen.answer("Four")
        warn_by_default("last")
        assert not tty.getvalue().endswith("last\n")
    assert tty.getvalue() == ("early\nOne\ntwo three\nbad^[[2J\nworse\ndone\nFour\nlast\n"), (
        "the last answer was broken off"
    )
    assert logging.lastResort is before


async def test_so_many_warnings_do_not_wait_and_none_is_lost() -> None:
    tty = Tty()
    screen = Screen(tty, tty, terminal=True)
    async with log_between_answers(screen):
        await screen.answer("One")
        for number in range(MOST_WAITING + 2):
            warn_by_default(f"number {number}")
        await screen.answer(" two")
    lines = tty.getvalue().splitlines()
    assert lines[0] == "One"
    assert [line for line in lines if line.startswith("number")] == [
        f"number {number}" for number in range(MOST_WAITING + 2)
    ]
    assert " two" in lines


@pytest.mark.parametrize("error", [EngineDeadError("dead"), asyncio.CancelledError()])
async def test_warnings_are_told_when_the_chat_crashes(error: BaseException) -> None:
    tty = Tty()
    screen = Screen(tty, tty, terminal=True)

    async def crash() -> None:
        async with log_between_answers(screen):
            await screen.answer("One")
            warn_by_default("why")
            raise error

    with pytest.raises(type(error)):
        await crash()
    assert tty.getvalue() == "One\nwhy\n"


async def test_a_stuck_terminal_does_not_keep_a_cancelled_chat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(screen_module, "STUCK_S", 0.01)
    go_on, tty = threading.Event(), Tty()

    class Stuck(Tty):
        def write(self, text: str, /) -> int:
            if text == "lo":
                go_on.wait(5)
            return tty.write(text)

    async def chat() -> None:
        screen = Screen(Stuck(), tty, terminal=True)
        async with log_between_answers(screen):
            await screen.answer("Hel")
            warn_by_default("why")
            await screen.answer("lo")

    with pytest.raises(TimeoutError):  # which cancels it
        async with asyncio.timeout(0.1):
            await chat()
    go_on.set()


async def test_a_thread_that_comes_late_is_heard(capsys: pytest.CaptureFixture[str]) -> None:
    tty = Tty()
    async with log_between_answers(Screen(tty, tty, terminal=True)):
        found = logging.lastResort
    assert found is not None
    found.handle(logging.LogRecord("interlace", logging.WARNING, "x.py", 1, "late", (), None))
    assert capsys.readouterr().err == "late\n"


async def test_nothing_is_changed_where_answers_do_not_meet_warnings() -> None:
    before = logging.lastResort
    for out, err, terminal in ((Tty(), io.StringIO(), True), (io.StringIO(), Tty(), False)):
        async with log_between_answers(Screen(out, err, terminal=terminal)):
            assert logging.lastResort is before
