"""Where benchmarks show how far they are and what came out. Knows no engine."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from interlace.engine.file_access import refusing

if TYPE_CHECKING:
    from interlace.bench.report import Report
    from interlace.engine.ports import Clock

BAR_WIDTH = 30
PIPE_WIDTH = 240
"""Columns of a table that goes to a file or pipe, where nothing says how wide it may be."""


class StillProgress:
    """A bar on a terminal that is drawn only when a run has ended.

    No thread redraws it: drawing takes the interpreter's lock, and would be measured as lag.
    Anything but a terminal gets one line per task. Implements the `Progress` port.
    """

    def __init__(self, stream: TextIO, clock: Clock | None = None) -> None:
        """With a clock it tells the time left, as if what is left took as long as what is done."""
        self._stream = stream
        self._clock = clock

    @contextlib.contextmanager
    def task(self, description: str, total: float | None) -> Iterator[Callable[[float], None]]:
        """Show one task until the context ends; on a terminal its line is then wiped."""
        if not self._stream.isatty():
            print(f"{description} ...", file=self._stream, flush=True)
            yield lambda advance: None
            return
        done = 0.0
        began = 0.0 if self._clock is None else self._clock.monotonic()

        def advance(amount: float) -> None:
            nonlocal done
            done += amount
            left = ""
            if self._clock is not None and total and done > 0:
                seconds = (self._clock.monotonic() - began) * max(0.0, total - done) / done
                left = f", {_duration(seconds)} left"
            self._draw(description, done, total, left)

        self._draw(description, done, total)
        try:
            yield advance
        finally:
            print("\r\033[2K", end="", file=self._stream, flush=True)

    def _draw(self, description: str, done: float, total: float | None, left: str = "") -> None:
        line = f"{description} ..."
        if total:
            filled = min(BAR_WIDTH, int(BAR_WIDTH * done / total))
            bar = "#" * filled + "-" * (BAR_WIDTH - filled)
            line = f"{description} [{bar}] {done:.0f}/{total:.0f}{left}"
        print(f"\r\033[2K{line}", end="", file=self._stream, flush=True)


def _duration(seconds: float) -> str:
    """`45 s`, `2:05`."""
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60}:{whole % 60:02}"


def check_json_target(target: str | None) -> None:
    """Refuse a file that cannot be written, before minutes are spent on its content.

    Raises: `ConfigError`.
    """
    if target is not None and target != "-":
        check_target("--json", target)


def check_target(option: str, target: str) -> None:
    """Open the file that `option` names as who writes it will, and leave all as it was. Blocks.

    Raises: `ConfigError`.
    """
    with writing(option, target):
        path = Path(target)
        is_new = not os.path.lexists(path)
        if not path.is_fifo():  # which would wait for its reader
            path.open("ab").close()
        if is_new:
            path.unlink()


def writing(option: str, target: str) -> AbstractContextManager[None]:
    """Raises: `ConfigError` for what a file that cannot be written raises."""
    return refusing(
        f"{option} {target} cannot be written",
        "name a file in an existing folder that this user may write to",
    )


def show(report: Report, json_target: str | None) -> None:
    """Print the table, and write JSON to `json_target`: a file, or - for standard output.

    With - the JSON has standard output to itself and the table goes to standard error. Raises:
    `ConfigError` if the file cannot be written.
    """
    print_table(report, json_target)
    write_json(report, json_target)


def print_table(report: Report, json_target: str | None) -> None:
    """To standard output, or to standard error if `json_target` is -."""
    from rich.console import Console

    from interlace.bench.tables import draw

    stream = sys.stderr if json_target == "-" else sys.stdout
    console = Console(file=stream, width=None if stream.isatty() else PIPE_WIDTH, highlight=False)
    console.print(draw(report))


def write_json(report: Report, json_target: str | None) -> None:
    """To a file, or to standard output if it is -.

    Raises: `ConfigError` if it cannot be written.
    """
    if json_target is not None:
        write_text(report.to_json(), json_target)


def write_text(content: str, json_target: str) -> None:
    """As `write_json`, of what is JSON already."""
    if json_target == "-":
        sys.stdout.write(content)
        return
    with writing("--json", json_target):
        Path(json_target).write_text(content, encoding="utf-8")
