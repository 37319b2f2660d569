"""`--live`: the viewer beside the command that it watches, in a process of its own.

A benchmark prints only when it has ended, so the viewer has the terminal until then. A chat needs
its terminal: under tmux the viewer gets a pane of its own, beside or below, and elsewhere a remark
says what to type in another terminal.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator

from interlace.cli.screen import is_terminal
from interlace.engine.errors import ConfigError
from interlace.engine.ports import Progress

_END_S = 5.0
_TMUX_S = 5.0
_WIDE = 100
"""Columns that are enough for a chat and a viewer beside each other."""
_BELOW = "60%"
"""Of the rows, for a viewer below a chat: 24 rows are enough for layers and lanes."""
_PASSED_ON = ("PYTHONPATH", "XDG_RUNTIME_DIR", "TMPDIR", "LANG", "LC_ALL", "NO_COLOR")
_RESTORED = "\x1b[?1049l\x1b[?25h"
"""The terminal's own screen, with its cursor: for a viewer that was killed."""


def viewer_command(pid: int) -> list[str]:
    """What watches the engines of a process until that ends."""
    return [sys.executable, "-m", "interlace", "top", str(pid), "--follow"]


def check_terminal(wanted: bool) -> None:
    """For commands that use `screen_beside` when a model is loaded. Raises: `ConfigError` if there
    is no terminal for a viewer that is `wanted`."""
    if wanted and not (is_terminal(sys.stdout) and is_terminal(sys.stdin)):
        raise ConfigError(
            "--live needs a terminal to draw on: leave it out, and let `interlace top` watch from"
            " another terminal."
        )


@contextlib.contextmanager
def screen_beside(wanted: bool, otherwise: Progress) -> Iterator[Progress]:
    """The viewer has the terminal meanwhile, if it is `wanted`; how far long work is goes to what
    this yields: to `otherwise`, as soon as no viewer has the terminal. Before any event loop runs.

    Raises: `ConfigError` if there is no terminal.
    """
    check_terminal(wanted)
    if not wanted:
        yield otherwise
        return
    viewer = subprocess.Popen(viewer_command(os.getpid()), stderr=subprocess.DEVNULL)
    try:
        yield _Behind(viewer, otherwise)
    finally:
        _end(viewer)


class _Behind:
    """Shows nothing until somebody has ended the viewer, and then what another `Progress` does.
    Implements that port."""

    def __init__(self, viewer: subprocess.Popen[bytes], otherwise: Progress) -> None:
        self._viewer = viewer
        self._otherwise = otherwise

    @contextlib.contextmanager
    def task(self, description: str, total: float | None) -> Iterator[Callable[[float], None]]:
        """One task. Whether the viewer is there is looked at whenever it gets on."""
        done = 0.0
        show: Callable[[float], None] | None = None
        with contextlib.ExitStack() as stack:

            def advance(amount: float) -> None:
                nonlocal done, show
                done += amount
                if show is not None:
                    show(amount)
                elif self._viewer.poll() is not None:
                    show = stack.enter_context(self._otherwise.task(description, total))
                    show(done)

            advance(0.0)
            yield advance


def _end(viewer: subprocess.Popen[bytes]) -> None:
    viewer.terminate()
    try:
        viewer.wait(_END_S)
    except subprocess.TimeoutExpired:
        viewer.kill()
        viewer.wait()
        sys.stdout.write(_RESTORED)
        sys.stdout.flush()


def pane_beside() -> str:
    """Where the viewer of this process is, or how to get one: a remark for people. Blocking."""
    if os.environ.get("TMUX") and shutil.which("tmux") is not None:
        is_wide = _width_of_pane() >= _WIDE
        # A pane has the environment of tmux itself, and not that of this process.
        known = (f"{name}={os.environ[name]}" for name in _PASSED_ON if name in os.environ)
        passed_on = [word for one in known for word in ("-e", one)]
        command = shlex.join(viewer_command(os.getpid()))
        where = ["-h"] if is_wide else ["-v", "-l", _BELOW]
        if _tmux("split-window", "-d", *where, *passed_on, command) is not None:
            place = "beside" if is_wide else "below"
            return f"The live view is in the pane {place}; it ends with the chat."
    return f"Live view: type `interlace top {os.getpid()}` in another terminal."


def _width_of_pane() -> int:
    """Columns of the pane that this process is in; 0 if that is not told."""
    pane = os.environ.get("TMUX_PANE")
    told = _tmux("display-message", "-p", *(["-t", pane] if pane else []), "#{pane_width}")
    return int(told) if told is not None and told.strip().isdecimal() else 0


def _tmux(*words: str) -> str | None:
    """What it prints; None if it cannot do that."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            ["tmux", *words], capture_output=True, text=True, timeout=_TMUX_S, check=False
        )
        if done.returncode == 0:
            return done.stdout
    return None
