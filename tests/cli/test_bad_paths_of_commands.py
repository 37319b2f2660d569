"""Every file or folder that a command is given and cannot use is one line that says what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import run_main

from interlace.bench import session
from interlace.bench.grid import session as grid_session

WRITTEN = "written"
READ = "read"
FOLDER = "folder"
GRID = str(Path(__file__).parents[2] / "bench/runs/readme-prefill.toml")
TARGETS: dict[str, tuple[str, tuple[str, ...]]] = {
    "decode --json": (WRITTEN, ("bench", "decode", "--json")),
    "overlap --json": (WRITTEN, ("bench", "overlap", "--json")),
    "store --json": (WRITTEN, ("bench", "store", "--json")),
    "kv --json": (WRITTEN, ("bench", "kv", "--json")),
    "schedule --json": (WRITTEN, ("bench", "schedule", "--steps", "1", "--json")),
    "run --json": (WRITTEN, ("bench", "run", GRID, "--json")),
    "timeline --json": (WRITTEN, ("bench", "timeline", "--trace", "step.json", "--json")),
    "timeline --trace": (WRITTEN, ("bench", "timeline", "--trace")),
    "run FILE": (READ, ("bench", "run")),
    "trace FILE": (READ, ("trace",)),
    "compare A": (READ, ("bench", "compare", GRID)),
    "chat --continue": (READ, ("chat", "--continue")),
    "chat --kv-dir": (FOLDER, ("chat", "-p", "Hi", "--model", "dummy:tiny", "--kv-dir")),
    "kv --kv-dir": (FOLDER, ("bench", "kv", "--kv-dir")),
    "store --path": (FOLDER, ("bench", "store", "--path")),
    "run --path": (FOLDER, ("bench", "run", GRID, "--out", ".", "--path")),
    "run --out": (FOLDER, ("bench", "run", GRID, "--out")),
    "store ls": (FOLDER, ("store", "ls")),
}
PLACES: dict[str, Callable[[Path], str]] = {
    "in a file": lambda root: f"{root}/file/x",
    "a long name": lambda root: f"{root}/{'x' * 300}",
    "a long path": lambda root: f"{root}/" + "/".join(["xxxx"] * 1000),
    "a link to itself": lambda root: f"{root}/loop",
    "nothing": lambda root: "",
}
REMEDY = re.compile(r"(?i)\b(give|choose|set|name|names|by)\b")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "places"
    root.mkdir()
    (root / "file").write_text("")
    (root / "loop").symlink_to(root / "loop")
    monkeypatch.chdir(root)
    return root


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(session, "prepare", refuse)
    monkeypatch.setattr(grid_session, "prepare_grid", refuse)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("target", TARGETS)
def test_a_bad_place_is_one_line_with_a_remedy(
    target: str,
    place: str,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if (target, place) == ("run --out", "nothing"):
        pytest.skip("that is the current folder")
    args = TARGETS[target][1]
    before = sorted(root.rglob("*"))
    code, _, err = run_main(monkeypatch, capsys, *args, PLACES[place](root))
    assert code in (1, 2), err
    assert "Traceback" not in err
    if code == 1:  # else the usage is told too
        assert err.count("\n") == 1
        assert err.startswith("interlace: ")
    assert REMEDY.search(err.removeprefix("interlace: ")), err
    assert sorted(root.rglob("*")) == before


@pytest.mark.parametrize("target", [name for name, (kind, _) in TARGETS.items() if kind == WRITTEN])
def test_a_folder_is_no_file_to_write(
    target: str, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run_main(monkeypatch, capsys, *TARGETS[target][1], str(root))
    assert (code, err.count("\n")) == (1, 1)
    assert "cannot be written (Is a directory): name a file in an existing folder" in err
    assert sorted(root.rglob("*")) == [root / "file", root / "loop"]
