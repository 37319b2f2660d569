"""Progress on a terminal and elsewhere."""

from __future__ import annotations

import io
import threading

from interlace.cli.progress import NotedProgress, RichProgress, progress_for


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_elsewhere_than_on_a_terminal_a_task_is_one_line() -> None:
    stream = io.StringIO()
    progress = progress_for(stream)
    assert isinstance(progress, NotedProgress)
    with progress.task("Downloading [93 MB]", 93e6) as advance:
        advance(1e6)
    assert stream.getvalue() == "Downloading [93 MB] ...\n"


def test_no_stream_no_words() -> None:
    with NotedProgress(None).task("Downloading", None) as advance:
        advance(1)


def test_a_terminal_gets_bars_also_nested_and_from_a_thread() -> None:
    stream = Tty()
    progress = progress_for(stream)
    assert isinstance(progress, RichProgress)

    def inner() -> None:
        with progress.task("Converting [bold]", 10) as advance:
            advance(10)

    with progress.task("Loading", None):
        thread = threading.Thread(target=inner)
        thread.start()
        thread.join()
    with progress.task("Once more", 2) as advance:
        advance(1)
    shown = stream.getvalue()
    assert "Loading" in shown
    assert "Once more" in shown
