"""What the chat shows: answers on standard output, remarks beside them.

On a terminal remarks are dim and stand between the answers, and so do warnings. Elsewhere standard
output carries the answers alone, as plain text, and remarks go to standard error. Knows nothing of
chats.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

from interlace.cli.above_prompt import above, cells_of, rows_of
from interlace.cli.blocking import BlockingThread
from interlace.engine.errors import InterlaceError

MOST_WAITING = 100
"""Warnings that wait for the end of an answer. One more, and they break its line: none is lost."""
STUCK_S = 2.0
PROMPT = "> "
DIM, RED, RESET = "\x1b[2m", "\x1b[31m", "\x1b[0m"
# Control characters but newline and tab, those that reorder the text around them, and those that no
# encoding has, which stand for bytes of a path that is no text.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


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
        self._typed: Callable[[], str] | None = None  # of who is asked; set by any thread
        # What follows is used on that thread alone, but that any thread adds to `_waiting`.
        self._in_answer = False
        self._mid_line = False
        self._waiting: collections.deque[str] = collections.deque()

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

    @property
    def shares_terminal(self) -> bool:
        """Whether answers and what goes to standard error stand on a terminal both."""
        return self._terminal and is_terminal(self._err)

    async def answer(self, text: str) -> None:
        """Write a piece of an answer at once. `end_answer`, or what begins with it, ends it."""
        if text:
            await self._thread.call(lambda: self._put_answer(text))

    async def end_answer(self) -> None:
        """Finish the line that an answer has begun, if it has, and show what waits for that."""
        await self._thread.call(self._end_answer)

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
        await self._thread.call(self._end_prompt)

    @contextlib.contextmanager
    def asking(self, typed: Callable[[], str]) -> Iterator[None]:
        """Somebody else asks for a line meanwhile, and shows `PROMPT` and what is `typed`: warnings
        stand above that. Any thread."""
        self._typed = typed
        try:
            yield
        finally:
            self._typed = None

    def warn(self, text: str) -> None:
        """Write a warning on standard error between two answers: it waits while one is written, and
        stands above a line that is being typed. Any thread; returns at once, and raises nothing."""
        self._waiting.append(self._safe(text) + "\n")
        self._thread.post(self._put_warnings)

    async def show_warnings(self) -> None:
        """Write what waits, also behind an answer that was broken off: nothing may be left when the
        screen goes. Raises nothing, and gives up a terminal that takes nothing for `STUCK_S`.
        Cancelling ends the wait."""
        if self._waiting:
            await asyncio.wait({self._thread.submit(self._break_off)}, timeout=STUCK_S)

    def _safe(self, text: str) -> str:
        return harmless(text) if self._terminal else text

    def _styled(self, style: str, text: str) -> str:
        return f"{style}{text}{RESET}" if self._colour else text

    async def _write(self, stream: TextIO, text: str) -> None:
        await self._thread.call(lambda: _put(stream, text))

    # ---------------------------------------------------------------- on the thread

    def _put_answer(self, text: str) -> None:
        self._in_answer = True
        _put(self._out, self._safe(text))
        self._mid_line = not text.endswith("\n")

    def _end_answer(self) -> None:
        if self._mid_line:
            self._mid_line = False
            _put(self._out, "\n")
        self._in_answer = False
        self._put_warnings()

    def _end_prompt(self) -> None:
        _put(self._beside, "\n")
        if self._beside is self._out:
            self._mid_line = False

    def _break_off(self) -> None:
        self._in_answer = False
        self._put_warnings()

    def _put_warnings(self) -> None:
        """Those that wait, unless it is for an answer."""
        if not self._waiting or (self._in_answer and len(self._waiting) <= MOST_WAITING):
            return
        # As logging does: who cannot be told of a warning cannot be told of that either.
        unsaid = contextlib.suppress(OSError, ValueError, InterlaceError)
        if self._mid_line:
            self._mid_line = False
            with unsaid:
                _put(self._out, "\n")
        while self._waiting:
            with unsaid:
                _put(self._err, self._placed(self._waiting[0]))
            self._waiting.popleft()  # now: `show_warnings` waits for what is not written

    def _placed(self, warning: str) -> str:
        """As it is to be written where the cursor stands."""
        typed = self._typed
        if typed is None:
            return warning
        shown = PROMPT + typed()
        columns, lines = _size_of(self._err)
        rows, cells = rows_of(warning, columns), cells_of(shown, columns)
        fits = len(rows) + cells // columns < lines
        if fits and os.environ.get("TERM", "dumb") != "dumb":
            return above(rows, cells, columns)
        return f"\n{warning}{shown}"


def _size_of(stream: TextIO) -> tuple[int, int]:
    """Columns and lines of a terminal, as far as it tells."""
    try:
        columns, lines = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        columns = lines = 0
    return columns or 80, lines or 24


def _put(stream: TextIO, text: str) -> None:
    """Write at once. Raises: as `Screen` says."""
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise InterlaceError(
            f"the output cannot be written ({error.strerror}); send it somewhere else."
        ) from error
