"""The pane that a chat gets under tmux, by a tmux that is made up."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from interlace.cli.live.beside import pane_beside

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
