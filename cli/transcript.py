"""Conversations as files: JSON, or Markdown if the name ends in `.md`.

Only its owner can read such a file, and a file that exists is never overwritten.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiofiles
import aiofiles.os

from interlace.cli.chat_engine import Message
from interlace.engine.errors import ConfigError


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
