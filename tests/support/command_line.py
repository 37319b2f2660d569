"""The command line of this process, as a test's."""

from __future__ import annotations

import sys

import pytest

from interlace.cli import app


def run_main(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str
) -> tuple[int, str, str]:
    """Run `interlace` with these: its exit code, output and errors."""
    monkeypatch.setattr(sys, "argv", ["interlace", *args])
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code, *capsys.readouterr()
