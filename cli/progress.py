"""Shows how far long work is, on standard error: bars on a terminal, else one line per task.

Implements the engine's `Progress` port. May be called from any thread.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TextIO

from interlace.cli.screen import is_terminal
from interlace.engine.ports import Progress


def progress_for(stream: TextIO | None = None) -> Progress:
    """The progress display that suits `stream`, by default standard error."""
    stream = sys.stderr if stream is None else stream
    return RichProgress(stream) if is_terminal(stream) else NotedProgress(stream)


class NotedProgress:
    """Writes one line when a task begins, for logs and pipes. None as `stream` writes nothing."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    @contextlib.contextmanager
    def task(self, description: str, total: float | None) -> Iterator[Callable[[float], None]]:
        """Announce a task; how far it is stays untold."""
        if self._stream is not None:
            print(f"{description} ...", file=self._stream, flush=True)
        yield lambda advance: None


class RichProgress:
    """Draws a bar per task, all in one display that is gone when no task is left."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            Progress,
            SpinnerColumn,
            TaskProgressColumn,
            TextColumn,
            TimeElapsedColumn,
        )

        self._lock = threading.Lock()
        self._open_tasks = 0
        self._display = Progress(
            SpinnerColumn("line"),
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=Console(file=stream),
            transient=True,
        )

    @contextlib.contextmanager
    def task(self, description: str, total: float | None) -> Iterator[Callable[[float], None]]:
        """Show one bar until the context ends; without `total` it only moves to and fro."""
        from rich.markup import escape

        with self._lock:
            self._open_tasks += 1
            if self._open_tasks == 1:
                self._display.start()
        bar = self._display.add_task(escape(description), total=total)
        try:
            yield lambda advance: self._display.advance(bar, advance)
        finally:
            self._display.remove_task(bar)
            with self._lock:
                self._open_tasks -= 1
                if self._open_tasks == 0:
                    self._display.stop()
