"""`interlace bench run` and `interlace bench compare` as they are typed, with a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TextIO

import pytest
from bench_kit import tiny_dummy
from grid_kit import a_run, loading
from typer.testing import CliRunner

from interlace.bench.grid.session import GridRunner
from interlace.cli.app import app
from interlace.cli.bench_output import StillProgress
from interlace.engine.errors import ConfigError


def run(*args: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error with the error that `main` would tell."""
    result = CliRunner().invoke(app, ["bench", *args], env={"COLUMNS": "300"})
    message = f" {result.exception}" if isinstance(result.exception, ConfigError) else ""
    return result.exit_code, result.stdout, result.stderr + message


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    file = tmp_path / "ways.toml"
    file.write_text(
        f"""
title = "ways to load"
repeats = 3
[grid]
model = "{tiny_dummy(tmp_path)}"
device = "cpu"
connector = "PipelineConnector"
load_mode = ["recompute", "layerwise"]
prefix = [32, 64]
"""
    )
    return file


def results(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


def test_a_grid_is_run_and_compared(grid: Path, tmp_path: Path) -> None:
    code, out, err = run("run", str(grid), "--json", "-")
    assert code == 0, err
    record = json.loads(out)
    (written,) = results(tmp_path / "results")
    assert json.loads(written.read_text()) == record
    assert written.name.startswith("ways-20")
    assert written.name.endswith(f"-{record['digest'][:8]}.json")
    assert record["machine"]["cores"] > 0
    assert record["is_partial"] is False
    assert [len(arm["samples"]) for arm in record["arms"]] == [4] * 4
    assert "ways to load: median (lowest to highest)" in err
    assert "layerwise, prefix 64" in err
    assert "layerwise: sooner than computing again" in err
    code, _, err = run("run", str(grid), "--out", str(tmp_path / "new" / "place"))
    assert code == 0, err
    (second,) = results(tmp_path / "new" / "place")
    code, out, err = run("compare", str(written), str(second), "--json", "-")
    assert code == 0, err
    assert len(json.loads(out)["compared"]) == 4
    assert "B / A: ratio of medians" in err
    assert "differ" not in err


def test_ctrl_c_keeps_what_is_done(
    grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = GridRunner._round
    calls = []

    async def stopped(self: GridRunner, *args: object) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        await once(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(GridRunner, "_round", stopped)
    code, out, err = run("run", str(grid), "--json", str(tmp_path / "copy.json"))
    assert code == 130, err
    (written,) = results(tmp_path / "results")
    record = json.loads(written.read_text())
    assert (record["is_partial"], record["rounds"]) == (True, 1)
    assert json.loads((tmp_path / "copy.json").read_text()) == record
    assert "stopped: 1 of 3 rounds are whole" in out
    assert f"so far: {written}" in out


def test_help_shows_a_grid_with_its_brackets() -> None:
    code, out, _ = run("run", "--help")
    assert code == 0
    for words in ("[grid]", "[[exclude]]", "[[points]]", "[connectors.NAME]", "interlace[plot]"):
        assert words in out


def test_refusals_come_before_a_model_is_looked_for(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('[grid]\nmodel = "no such"\nprefx = 3')
    code, _, err = run("run", str(file))
    assert code == 1
    assert "a.toml: grid.prefx: there is no such key; did you mean 'prefix'?" in err
    assert not (tmp_path / "results").exists()
    assert "name a grid's file; bench/runs/ has some" in run("run", str(tmp_path / "none.toml"))[2]
    file.write_bytes(b"#" * (1 << 21))
    assert "that is no grid" in run("run", str(file))[2]


def test_a_folder_that_cannot_be_made(grid: Path) -> None:
    code, _, err = run("run", str(grid), "--out", str(grid))
    assert code == 1
    assert "cannot be made (File exists): name a folder for results by --out" in err


def test_plots_need_matplotlib_and_say_so_first(
    grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = run("run", str(grid), "--plot")
    assert code == 1
    assert "pip install interlace[plot], or leave --plot out" in err
    assert not (tmp_path / "results").exists(), "nothing was measured"


def test_plots(grid: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, out, err = run("run", str(grid), "--plot")
    assert code == 0, err
    for kind in ("bars", "prefix", "timeline"):
        (picture,) = (tmp_path / "results").glob(f"*-{kind}.svg")
        assert b"</svg>" in picture.read_bytes()
        assert f"written: {picture}" in out


def test_other_grids_and_machines_are_named(tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    arms = [(loading("bulk", 32), [0.2] * 3), (loading("bulk", 64), [0.4] * 3)]
    a.write_text(a_run(arms).to_json())
    b.write_text(a_run(arms[:1], machine="\x1b[2Jthere").to_json())
    code, out, err = run("compare", str(a), str(b))
    assert (code, err) == (0, "")
    assert "within noise" in out
    assert "the grids differ: prefix is 32, 64 in A, 32 in B" in out
    assert "the machines differ: cpu is here for A, ^[[2Jthere for B" in out


def test_what_is_no_result(grid: Path) -> None:
    code, _, err = run("compare", str(grid), str(grid))
    assert code == 1
    assert "is no result of `interlace bench run`" in err


class _Terminal:
    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


def test_the_time_left_is_told() -> None:
    class Turned:
        now = 100.0

        def monotonic(self) -> float:
            return self.now

    clock, terminal = Turned(), _Terminal()
    stream: TextIO = terminal  # type: ignore[assignment]
    with StillProgress(stream, clock).task("8 arms", 10) as advance:
        clock.now += 30
        advance(2)
        assert terminal.text.endswith("2/10, 2:00 left")
        clock.now += 30
        advance(6)
        assert terminal.text.endswith("8/10, 15 s left")
