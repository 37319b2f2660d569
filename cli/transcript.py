"""Conversations as files: JSON, which can be read back, or Markdown if the name ends in `.md`.

Only its owner can read such a file, and a file that exists is never overwritten.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiofiles
import aiofiles.os

from interlace.cli.chat_engine import Message
from interlace.engine.errors import ConfigError

MAX_BYTES = 16 * 2**20
"""Of a transcript to read: far more than any model's context."""


@dataclasses.dataclass(frozen=True, slots=True)
class Transcript:
    """An earlier conversation: maybe a system message, then questions and answers in turns."""

    path: Path
    model: str
    """Name or path of the model that it was held with."""
    messages: tuple[Message, ...]


def as_json(model: str, messages: Sequence[Message]) -> str:
    """One object with the model's name and the messages, in the order of the conversation."""
    return json.dumps({"model": model, "messages": list(messages)}, indent=2, ensure_ascii=False)


def as_markdown(model: str, messages: Sequence[Message]) -> str:
    """A title and one section per message, headed by the role of its author."""
    sections = [f"## {m['role'].capitalize()}\n\n{m['content']}" for m in messages]
    return "\n\n".join([f"# Conversation with {model}", *sections])


async def save_transcript(name: str, model: str, messages: Sequence[Message]) -> Path:
    """Write a conversation to the new file `name` and return its path.

    Raises: `ConfigError` if the file exists or cannot be written; nothing is left behind then.
    Cancellation: a part of the file may stay.
    """
    path = Path(os.path.expanduser(name))  # noqa: ASYNC240, PTH111 - a ~ of nobody stays as it is
    render = as_markdown if path.suffix.lower() == ".md" else as_json
    with contextlib.closing(_OwnThread()) as thread:
        try:
            await _write_new(path, render(model, messages) + "\n", thread)
        except FileExistsError:
            raise ConfigError(f"{path} exists already; save under another name.") from None
        except (OSError, ValueError) as e:
            reason = getattr(e, "strerror", None) or str(e)
            raise ConfigError(f"Cannot write {path}: {reason}. Choose another place.") from e
    return path


async def load_transcript(name: str) -> Transcript:
    """Read back what `save_transcript` has written as JSON.

    Raises: `ConfigError` if the file cannot be read, or is damaged or no such transcript.
    """
    path = Path(os.path.expanduser(name))  # noqa: ASYNC240, PTH111 - as above
    with contextlib.closing(_OwnThread()) as thread:
        try:
            async with aiofiles.open(path, "rb", executor=thread) as file:
                content = await file.read(MAX_BYTES + 1)
        except (OSError, ValueError) as e:
            reason = getattr(e, "strerror", None) or str(e)
            raise ConfigError(f"Cannot read {path}: {reason}. Name what /save has written.") from e
    return parse_transcript(path, content)


def parse_transcript(path: Path, content: bytes) -> Transcript:
    """The conversation in `content`, which is what `path` holds. Raises: `ConfigError`."""
    if path.suffix.lower() == ".md":
        raise ConfigError(f"{path} is Markdown, for people to read; only JSON can be read back.")
    try:
        record = json.loads(content) if len(content) <= MAX_BYTES else None
    except (ValueError, RecursionError):
        record = None
    if isinstance(record, dict):
        model, messages = record.get("model"), _messages(record.get("messages"))
        if isinstance(model, str) and messages is not None:
            return Transcript(path, model, messages)
    raise ConfigError(
        f"{path} is damaged, or no conversation that /save has written; name another file."
    )


def _messages(found: Any) -> tuple[Message, ...] | None:
    """The messages if they are what a chat leaves behind, else None."""
    if not isinstance(found, list) or not all(isinstance(m, dict) for m in found):
        return None
    if not all(m.keys() == {"role", "content"} for m in found):
        return None
    if not all(isinstance(m["content"], str) for m in found):
        return None
    roles = [m["role"] for m in found]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    whole = turns == ["user", "assistant"] * (len(turns) // 2)
    return tuple({"role": m["role"], "content": m["content"]} for m in found) if whole else None


class _OwnThread(ThreadPoolExecutor):
    """aiofiles' own worker: a slow disk must not hold up what else runs in threads."""

    def __init__(self) -> None:
        super().__init__(max_workers=1, thread_name_prefix="interlace-files")

    def close(self) -> None:
        self.shutdown(wait=False)


async def _write_new(path: Path, text: str, thread: ThreadPoolExecutor) -> None:
    async with aiofiles.open(
        path, "x", encoding="utf-8", errors="replace", opener=_owner_only, executor=thread
    ) as file:
        try:
            await file.write(text)
            await file.flush()
        except OSError:
            await aiofiles.os.unlink(path, executor=thread)
            raise


def _owner_only(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
