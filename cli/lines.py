"""Lines from standard input, be it a terminal, a pipe, a file or closed.

Knows nothing of what the lines mean. One daemon thread reads, since the event loop can't watch a
file. It never reads through `sys.stdin`, whose lock it would still hold when Python ends.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from interlace.cli.blocking import BlockingThread
from interlace.cli.screen import is_terminal
from interlace.engine.errors import PromptError

MAX_LINE_BYTES = 4 * 2**20
_CHUNK_BYTES = 65536
Asking = Callable[[Callable[[], str]], AbstractContextManager[None]]


class LineSource(Protocol):
    """Where a chat's lines come from."""

    async def line(self) -> str | None:
        """The next line without its end, or None when there are no more.

        Asks for it first, if there is someone to ask.
        """
        ...


class TypedLines:
    """A `LineSource` for someone who types at a terminal and reads there too.

    With line editing, history, and pasted text of several lines as one, where Python has readline.
    """

    def __init__(self, prompt: str, asking: Asking) -> None:
        """`asking` is around each question, with what tells how much of an answer is typed."""
        self._prompt = prompt
        self._asking = asking
        self._typed: Callable[[], str] = str
        self._thread = BlockingThread("interlace-stdin")
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")
        with contextlib.suppress(ImportError):  # `input` finds it once it is imported
            import readline

            self._typed = readline.get_line_buffer

    async def line(self) -> str | None:
        """Ask for a line. Cancellation: the terminal stays as readline needs it meanwhile."""
        return await self._thread.call(self._ask)

    def _ask(self) -> str | None:
        try:
            with self._asking(self._typed):
                return input(self._prompt)
        except EOFError:
            return None


@contextlib.contextmanager
def terminal_restored() -> Iterator[None]:
    """Leave the terminal as it was, even if a thread is left behind that waits for a line."""
    if not is_terminal(sys.stdin):
        yield
        return
    import termios

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        yield
    finally:
        if termios.tcgetattr(fd) != before:
            termios.tcsetattr(fd, termios.TCSANOW, before)
            os.write(fd, b"\x1b[?2004l")  # readline marks pasted text by this mode


class LineReader:
    """A `LineSource` that reads a file descriptor, a line only when one is asked for.

    `ask` is awaited before each line.
    """

    def __init__(self, fd: int | None, ask: Callable[[], Awaitable[None]] | None = None) -> None:
        self._fd = fd
        self._ask = ask
        self._thread = BlockingThread("interlace-stdin")
        self._buffer = bytearray()
        self._ended = fd is None

    @classmethod
    def of_stdin(cls, ask: Callable[[], Awaitable[None]] | None = None) -> LineReader:
        """A reader of standard input.

        If it was closed at the start its number may by now name another file: then there is
        nothing to read.
        """
        return cls(None if sys.stdin is None else sys.stdin.fileno(), ask)

    async def line(self) -> str | None:
        """The next line, decoded as UTF-8 with errors replaced; None at the end.

        Raises: `PromptError` for a line of more than 4 MiB, which is skipped.
        Cancellation: the line that is being read is lost.
        """
        if self._ask is not None:
            await self._ask()
        return await self._thread.call(self._read_line)

    def _read_line(self) -> str | None:
        """On the reading thread: take one line out of the buffer, filling it as needed."""
        too_long = False
        while (end := self._buffer.find(b"\n")) < 0 and not self._ended:
            if len(self._buffer) > MAX_LINE_BYTES:
                too_long = True
                self._buffer.clear()
            self._fill()
        if end < 0:
            end = len(self._buffer)
            if end == 0 and not too_long:
                return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        if too_long or end > MAX_LINE_BYTES:
            raise PromptError(f"A line is longer than {MAX_LINE_BYTES} bytes; it was skipped.")
        return line.removesuffix(b"\r").decode("utf-8", "replace")

    def _fill(self) -> None:
        assert self._fd is not None
        try:
            chunk = os.read(self._fd, _CHUNK_BYTES)
        except BlockingIOError:  # whoever shares the terminal has made it non-blocking
            select.select([self._fd], [], [])
            return
        except OSError:  # the terminal is gone
            chunk = b""
        self._buffer += chunk
        self._ended = not chunk
