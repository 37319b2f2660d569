"""Lines from standard input, be it a terminal, a pipe, a file or closed.

Knows nothing of what the lines mean. One daemon thread reads, with `os.read`: the event loop could
not watch a file, and a thread blocked inside `sys.stdin` would hold its lock when Python ends.
"""

from __future__ import annotations

import os
import select
import sys
from typing import Protocol

from interlace.cli.blocking import BlockingThread
from interlace.engine.errors import PromptError

MAX_LINE_BYTES = 4 * 2**20
_CHUNK_BYTES = 65536


class LineSource(Protocol):
    """Where a chat's lines come from."""

    async def line(self) -> str | None:
        """The next line without its end, or None when there are no more."""
        ...


class LineReader:
    """A `LineSource` that reads a file descriptor, a line only when one is asked for."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._thread = BlockingThread("interlace-stdin")
        self._buffer = bytearray()
        self._ended = fd is None

    @classmethod
    def of_stdin(cls) -> LineReader:
        """A reader of standard input.

        If it was closed at the start its number may by now name another file: then there is
        nothing to read.
        """
        return cls(None if sys.stdin is None else sys.stdin.fileno())

    async def line(self) -> str | None:
        """The next line, decoded as UTF-8 with errors replaced; None at the end.

        Raises: `PromptError` for a line of more than 4 MiB, which is skipped.
        Cancellation: the line that is being read is lost.
        """
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
