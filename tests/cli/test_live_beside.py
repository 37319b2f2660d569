"""The pane that a chat gets under tmux, by a tmux that is made up; what a benchmark shows when its
viewer has been ended."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from interlace.cli.live import beside
from interlace.cli.live.beside import pane_beside, screen_beside
from interlace.cli.progress import NotedProgress
from interlace.engine.errors import ConfigError

Tmux = Callable[..., Path]


@pytest.fixture
def tmux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tmux:
    """Makes one that tells the width of a pane, and writes down how it was called: a word a
    line."""

    def make(width: str, *, splits: bool = True) -> Path:
        called = tmp_path / "called"
        program = tmp_path / "tmux"
        program.write_text(
            "#!/bin/sh\n"
            f"if [ \"$1\" = display-message ]; then echo '{width}'; exit 0; fi\n"
            f"printf '%s\\n' \"$@\" > {called}\n"
            f"exit {0 if splits else 1}\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setenv("TMUX", "/tmp/tmux-1/default,1,0")
        monkeypatch.setenv("TMUX_PANE", "%3")
        monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1 2")
        return called

    return make


@pytest.mark.parametrize(
    ("width", "how", "place"),
    [
        ("160", ["-h"], "beside"),
        ("100", ["-h"], "beside"),
        ("99", ["-v", "-l", "60%"], "below"),
        ("80", ["-v", "-l", "60%"], "below"),
        ("not told", ["-v", "-l", "60%"], "below"),
    ],
)
def test_the_pane_is_where_there_is_room(
    tmux: Tmux, width: str, how: list[str], place: str
) -> None:
    called = tmux(width)
    assert pane_beside() == f"The live view is in the pane {place}; it ends with the chat."
    words = called.read_text().splitlines()
    assert words[: 2 + len(how)] == ["split-window", "-d", *how]
    assert "XDG_RUNTIME_DIR=/run/user/1 2" in words
    assert words[-1] == f"{sys.executable} -m interlace top {os.getpid()} --follow"


def test_without_a_pane_a_remark_says_what_to_type(
    tmux: Tmux, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = f"Live view: type `interlace top {os.getpid()}` in another terminal."
    tmux("160", splits=False)
    assert pane_beside() == said
    monkeypatch.delenv("TMUX")
    assert pane_beside() == said


class Viewer(subprocess.Popen[bytes]):
    """Stands for one: it waits for a line."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__(["cat"], stdin=subprocess.PIPE)

    def leave(self) -> None:
        """As `q` does."""
        assert self.stdin is not None
        self.stdin.close()
        self.wait()


def test_progress_is_shown_when_the_viewer_has_been_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    viewers: list[Viewer] = []

    def start(*_: object, **__: object) -> Viewer:
        viewers.append(Viewer())
        return viewers[-1]

    monkeypatch.setattr(beside, "is_terminal", lambda stream: True)
    monkeypatch.setattr(subprocess, "Popen", start)
    shown = io.StringIO()
    with screen_beside(wanted=True, otherwise=NotedProgress(shown)) as progress:
        with progress.task("first", 3) as advance:
            advance(1)
            assert shown.getvalue() == ""
            viewers[0].leave()
            advance(1)
            assert shown.getvalue() == "first ...\n"
            advance(1)
        with progress.task("second", None):
            assert shown.getvalue() == "first ...\nsecond ...\n"


def test_a_viewer_is_ended_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "is_terminal", lambda stream: True)
    monkeypatch.setattr(beside, "viewer_command", lambda pid: ["sleep", "60"])
    with pytest.raises(KeyError), screen_beside(wanted=True, otherwise=NotedProgress(None)):
        raise KeyError
    with screen_beside(wanted=False, otherwise=NotedProgress(None)) as progress:
        assert isinstance(progress, NotedProgress)


def test_a_viewer_needs_a_terminal() -> None:
    with pytest.raises(ConfigError, match="needs a terminal"):
        screen_beside(wanted=True, otherwise=NotedProgress(None)).__enter__()
