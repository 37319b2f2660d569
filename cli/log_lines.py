"""What the log says while a chat is on the screen: between two answers, not in the midst of one,
and above a line that is being typed.

Knows nothing of who logs. Who has configured logging is left alone: only what Python would print
for want of a handler goes another way.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator

from interlace.cli.screen import Screen


@contextlib.asynccontextmanager
async def log_between_answers(screen: Screen) -> AsyncIterator[None]:
    """Let warnings of the log wait on `screen` for the end of an answer, if both are on a terminal.

    Elsewhere they are printed at once, as ever: they are not where the answers are. All have been
    written when the context ends, in whatever way. Cancellation: as `Screen.show_warnings`.
    """
    if not screen.shares_terminal:
        yield
        return
    before = logging.lastResort
    handler = _ToScreen(screen, before)
    logging.lastResort = handler
    try:
        yield
    finally:
        logging.lastResort = before
        handler.close()
        await screen.show_warnings()


class _ToScreen(logging.Handler):
    """Hands lines to a screen until it is closed, and then to who had them before."""

    def __init__(self, screen: Screen, before: logging.Handler | None) -> None:
        super().__init__(logging.WARNING)
        self._screen = screen
        self._before = before
        self._is_closed = False

    def emit(self, record: logging.LogRecord) -> None:
        """Any thread, under the handler's lock; raises nothing."""
        if self._is_closed:  # a thread had found this handler just before it was taken away
            if self._before is not None:
                self._before.handle(record)
            return
        try:
            text = self.format(record)
        except Exception:  # noqa: BLE001 - as all handlers of logging do
            self.handleError(record)
        else:
            self._screen.warn(text)

    def close(self) -> None:
        """Hand on what still comes."""
        self.acquire()
        try:
            self._is_closed = True
        finally:
            self.release()
        super().close()
