"""What the chat shows: answers on standard output, remarks beside them.

On a terminal remarks are dim and stand between the answers. Elsewhere standard output carries the
answers alone, as plain text, and remarks go to standard error. Knows nothing of chats.
"""

from __future__ import annotations

import io
import os
import re
import sys
from typing import TextIO

from interlace.cli.blocking import BlockingThread
from interlace.engine.errors import InterlaceError

PROMPT = "> "
DIM, RED, RESET = "\x1b[2m", "\x1b[31m", "\x1b[0m"
# Control characters but newline and tab, and those that reorder the text around them.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def harmless(text: str) -> str:
    """`text` with control characters made visible, so that it cannot drive a terminal."""
    return _UNSAFE.sub(lambda match: _visible(ord(match[0])), text)


def _visible(code: int) -> str:
    if code < 0x20:
        return "^" + chr(code + 0x40)
    return "^?" if code == 0x7F else f"<U+{code:04X}>"


def is_terminal(stream: TextIO | None) -> bool:
    """Whether `stream` is open and a terminal."""
    return stream is not None and not stream.closed and stream.isatty()


class Screen:
    """Writes to two text streams, in order, on a thread: a reader that stalls stalls no loop.

    Every method raises `BrokenPipeError` when nobody reads any more, and `InterlaceError` when
    the output cannot be written for another reason, such as a full disk.
    Cancellation: what was handed over is still written.
    """

    def __init__(
        self, out: TextIO, err: TextIO, *, terminal: bool = False, colour: bool = False
    ) -> None:
        self._out = out
        self._err = err
        self._beside = out if terminal else err
        self._terminal = terminal
        self._colour = colour
        self._thread = BlockingThread("interlace-stdout")
        self._mid_line = False

    @classmethod
    def of_process(cls) -> Screen:
        """The screen of this process. A closed stream is replaced by one that forgets."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        terminal = is_terminal(sys.stdout)
        plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
        return cls(
            sys.stdout or io.StringIO(),
            sys.stderr or io.StringIO(),
            terminal=terminal,
            colour=terminal and not plain,
        )

    async def answer(self, text: str) -> None:
        """Write a piece of an answer at once."""
        if text:
            await self._write(self._out, self._safe(text))
            self._mid_line = not text.endswith("\n")

    async def end_answer(self) -> None:
        """Finish the line that an answer has begun, if it has."""
        if self._mid_line:
            self._mid_line = False
            await self._write(self._out, "\n")

    async def note(self, text: str) -> None:
        """Write a remark on lines of its own."""
        await self.end_answer()
        await self._write(self._beside, self._styled(DIM, self._safe(text)) + "\n")

    async def error(self, text: str) -> None:
        """Write what went wrong on standard error."""
        await self.end_answer()
        await self._write(self._err, self._styled(RED, f"interlace: {harmless(text)}") + "\n")

    async def prompt(self) -> None:
        """Ask for a line."""
        await self._write(self._beside, PROMPT)

    async def end_prompt(self) -> None:
        """Finish the line of a prompt that got no answer."""
        await self._write(self._beside, "\n")

    def _safe(self, text: str) -> str:
        return harmless(text) if self._terminal else text

    def _styled(self, style: str, text: str) -> str:
        return f"{style}{text}{RESET}" if self._colour else text

    async def _write(self, stream: TextIO, text: str) -> None:
        def write() -> None:
            try:
                stream.write(text)
                stream.flush()
            except BrokenPipeError:
                raise
            except OSError as error:
                raise InterlaceError(
                    f"the output cannot be written ({error.strerror}); send it somewhere else."
                ) from error

        await self._thread.call(write)
