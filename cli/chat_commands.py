"""The commands of an interactive chat: lines that begin with a slash."""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable

from interlace.cli.chat_session import ChatSession
from interlace.cli.screen import Screen
from interlace.cli.transcript import Transcript, load_transcript, save_transcript

HELP = """\
/help        show this
/clear       begin a new conversation; a system message stays
/save FILE   write the conversation to a new file: JSON, or Markdown if it ends in .md
/load FILE   go on with a conversation that was saved as JSON, in place of this one
/stats       show what the conversation has cost so far
/quit        leave (so does Ctrl-D)

Ctrl-C stops an answer; what was said so far stays in the conversation. Ctrl-C again, or when no
answer is being given, leaves. A line that begins with a blank is never taken for a command."""


def is_command(line: str) -> bool:
    """Whether a line is meant for the chat and not for the model."""
    return line.startswith("/")


class ChatCommands:
    """Carries out the slash commands of one chat."""

    def __init__(self, session: ChatSession, screen: Screen) -> None:
        self._session = session
        self._screen = screen
        self._known: dict[str, Callable[[str], Awaitable[bool]]] = {
            "/help": self._help,
            "/clear": self._clear,
            "/save": self._save,
            "/load": self._load,
            "/stats": self._stats,
            "/quit": self._quit,
        }

    async def run(self, line: str) -> bool:
        """Carry out one command. Returns whether the chat goes on.

        Raises: `ConfigError` if `/save` cannot write its file, or `/load` cannot read it.
        """
        name, _, argument = line.strip().partition(" ")
        command = self._known.get(name.lower())
        if command is not None:
            return await command(argument.strip())
        near = difflib.get_close_matches(name.lower(), self._known, n=1)
        hint = f"Did you mean {near[0]}?" if near else "/help lists the commands."
        await self._screen.error(f"There is no command {name}. {hint}")
        return True

    async def _help(self, _: str) -> bool:
        await self._screen.note(HELP)
        return True

    async def _clear(self, _: str) -> bool:
        self._session.clear()
        await self._screen.note("A new conversation begins.")
        return True

    async def _save(self, name: str) -> bool:
        if not name:
            await self._screen.error("Which file? /save FILE")
            return True
        path = await save_transcript(name, self._session.model, self._session.messages)
        await self._screen.note(f"Saved to {path}.")
        return True

    async def _load(self, name: str) -> bool:
        if not name:
            await self._screen.error("Which file? /load FILE")
            return True
        await self._screen.note(resume(self._session, await load_transcript(name)))
        return True

    async def _stats(self, _: str) -> bool:
        await self._screen.note(describe_session(self._session))
        return True

    async def _quit(self, _: str) -> bool:
        return False


def resume(session: ChatSession, transcript: Transcript) -> str:
    """Let `session` go on with an earlier conversation; returns a remark that says so.

    Raises: `ConfigError` if the model cannot hold a conversation.
    """
    session.resume(transcript.messages)
    text = f"Going on after {len(transcript.messages)} messages of {transcript.path}."
    if transcript.model != session.model:
        text += f" They were exchanged with {transcript.model}; now {session.model} answers."
    return text


def describe_session(session: ChatSession) -> str:
    """The cost of all turns since the start, and how full the context is, in two lines."""
    turns = session.turns
    cached = sum(u.num_local_cached_tokens for u in turns)
    loaded = sum(u.num_external_cached_tokens for u in turns)
    computed = sum(u.num_computed_prompt_tokens for u in turns)
    generated = sum(u.num_generated_tokens for u in turns)
    context = 0
    if turns and session.messages:
        context = turns[-1].num_prompt_tokens + turns[-1].num_generated_tokens
    return (
        f"{len(turns)} turns: {cached} prompt tokens cached, {loaded} loaded, "
        f"{computed} computed, {generated} generated\n"
        f"The last turn filled {context} of {session.max_model_len} tokens of context"
    )
