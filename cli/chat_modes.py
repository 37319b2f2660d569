"""The two ways to chat: one question, or line after line, with what Ctrl-C does in both."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Awaitable

from interlace.cli.chat_commands import ChatCommands, is_command
from interlace.cli.chat_session import ChatSession, Turn
from interlace.cli.lines import LineSource
from interlace.cli.screen import Screen
from interlace.engine.errors import ConfigError, EngineBusyError, PromptError, RequestError

EXIT_FAILED = 1
EXIT_CTRL_C = 130


async def one_shot(session: ChatSession, text: str, screen: Screen, *, as_json: bool) -> int:
    """Answer one question. Returns the exit code.

    Raises: what `ChatSession.turn` raises.
    """
    if not session.has_template:
        await screen.note(
            "This model has no chat template: it continues the text instead of answering it."
        )

    async def answer() -> int:
        turn = await ask(session, text, screen, as_json=as_json)
        return EXIT_CTRL_C if turn.finish_reason == "abort" else 0

    return await until_ctrl_c(session, answer())


async def converse(
    session: ChatSession,
    lines: LineSource,
    screen: Screen,
    *,
    interactive: bool,
    as_json: bool = False,
) -> int:
    """Answer line after line until `/quit`, the end of the input, or Ctrl-C.

    With `interactive` there is a greeting; without it, a turn that failed makes the exit code 1.
    Returns the exit code. Raises: whatever ends all requests, such as `EngineDeadError`.
    """
    if interactive:
        await screen.note(_greeting(session))
    code = await until_ctrl_c(session, _converse(session, lines, screen, as_json))
    if not interactive:
        return code
    await screen.end_prompt()
    return 0 if code == EXIT_FAILED else code


async def _converse(session: ChatSession, lines: LineSource, screen: Screen, as_json: bool) -> int:
    commands = ChatCommands(session, screen)
    code = 0
    while True:
        try:
            line = await lines.line()
            if line is None:
                return code
            if is_command(line):
                if not await commands.run(line):
                    return code
            elif line.strip():
                await ask(session, line, screen, as_json=as_json)
        except (RequestError, EngineBusyError, ConfigError) as e:
            code = EXIT_FAILED
            await screen.error(_with_remedy(e, session))


async def ask(session: ChatSession, text: str, screen: Screen, *, as_json: bool) -> Turn:
    """Show one turn: as it arrives and with its cost, or whole as one JSON object on one line."""
    if as_json:
        turn = await session.turn(text, _show_nothing)
        await screen.answer(turn_as_json(turn) + "\n")
        await screen.end_answer()
        return turn
    turn = await session.turn(text, screen.answer)
    await screen.end_answer()
    await screen.note(describe_turn(turn))
    return turn


def turn_as_json(turn: Turn) -> str:
    """One JSON object, in ASCII so that it survives any terminal and locale."""
    usage = turn.usage
    return json.dumps(
        {
            "text": turn.text,
            "token_ids": turn.token_ids,
            "finish_reason": turn.finish_reason,
            "usage": {
                "num_prompt_tokens": usage.num_prompt_tokens,
                "num_local_cached_tokens": usage.num_local_cached_tokens,
                "num_external_cached_tokens": usage.num_external_cached_tokens,
                "num_generated_tokens": usage.num_generated_tokens,
            },
        }
    )


def describe_turn(turn: Turn) -> str:
    """The line under an answer: where its tokens came from, speed, an odd end.

    Prompt tokens are cached on the device, loaded by the KV connector, or computed.
    """
    usage = turn.usage
    text = (
        f"[{usage.num_local_cached_tokens} cached, {usage.num_external_cached_tokens} loaded, "
        f"{usage.num_computed_prompt_tokens} computed, {usage.num_generated_tokens} generated"
    )
    if turn.tokens_per_second is not None:
        text += f", {turn.tokens_per_second:.1f} tokens/s"
    if turn.finish_reason == "abort":
        text += "; stopped"
    elif turn.finish_reason == "length":
        full = turn.context_is_full
        text += "; the context is full, /clear begins anew" if full else "; --max-tokens reached"
    return text + "]"


async def until_ctrl_c(session: ChatSession, work: Awaitable[int]) -> int:
    """Await `work`; meanwhile Ctrl-C stops the answer, and if there is none, or again, leaves.

    Returns what `work` returns, or 130 when it was left. Runs on the main thread, since it handles
    a signal. Cancellation: cancels `work`.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    left = False

    def interrupt() -> None:
        nonlocal left
        if not session.stop() and not left:
            left = True
            task.cancel()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        return await work
    except asyncio.CancelledError:
        if not left:
            raise
        task.uncancel()
        return EXIT_CTRL_C
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def _show_nothing(_: str) -> None:
    """For answers that are shown only when they are whole."""


def _greeting(session: ChatSession) -> str:
    text = f"{session.model}, {session.max_model_len} tokens of context. "
    if not session.has_template:
        text += "It has no chat template, so each line is continued on its own. "
    return text + "/help lists the commands, /quit leaves."


def _with_remedy(error: Exception, session: ChatSession) -> str:
    if isinstance(error, PromptError) and session.messages:
        return (
            f"{error} The conversation is as it was: ask something shorter, or begin a new one "
            f"with /clear."
        )
    return str(error)
