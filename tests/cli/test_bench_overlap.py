"""`interlace bench overlap`: its options, and a run of two parts with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_kit import tiny_dummy
from typer.testing import CliRunner

from interlace.bench.overlap import session
from interlace.bench.overlap.names import Part
from interlace.bench.overlap.parts import PARTS
from interlace.bench.overlap.rig import Outcome, Rig
from interlace.cli import bench
from interlace.engine.errors import InterlaceError


@pytest.fixture
def model(tmp_path: Path) -> str:
    return tiny_dummy(tmp_path)


def test_a_part_that_does_not_exist_is_refused_before_a_model_is_looked_for() -> None:
    arguments = ["overlap", "--part", "speed", "--model", "no such"]
    result = CliRunner().invoke(bench.app, arguments)
    assert result.exit_code == 2
    assert "speed" in result.output
    assert "first-token" in result.output


def test_help_names_the_parts() -> None:
    result = CliRunner().invoke(bench.app, ["overlap", "--help"])
    assert result.exit_code == 0
    for name in ("crossover", "modes", "beside", "all"):
        assert name in result.output


def test_two_parts_and_one_file(model: str, tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    arguments = ["overlap", "--model", model, "--device", "cpu", "--json", str(target)]
    arguments += ["--part", "first-token", "--part", "crossover", "--repeats", "1"]
    arguments += ["--prompt-tokens", "64", "--new", "16", "--decoders", "2"]
    result = CliRunner().invoke(bench.app, arguments)
    assert result.exit_code == 0, result.output
    assert "overlap: first-token" in result.output
    assert "overlap: crossover" in result.output
    cases = [row["case"] for row in json.loads(target.read_text())["rows"]]
    assert cases[0] == "first-token: 16 new"
    assert cases[1].startswith("crossover: ")


def test_from_files_and_nothing_is_left(model: str, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    arguments = ["overlap", "--model", model, "--device", "cpu", "--store", "file"]
    arguments += ["--path", str(scratch), "--repeats", "1", "--prompt-tokens", "64"]
    result = CliRunner().invoke(bench.app, [*arguments, "--new", "16"])
    assert result.exit_code == 0, result.output
    assert "overlap: first-token" in result.output
    assert "read ms" in result.output
    assert not list(scratch.iterdir())


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--store", "file", "--part", "mixed", "--part", "link"], "link, mixed"),
        (["--path", "somewhere"], "--store file"),
        (["--store", "file", "--path", "no such folder"], "--path"),
    ],
)
def test_what_files_are_not_for(model: str, arguments: list[str], problem: str) -> None:
    result = CliRunner().invoke(bench.app, ["overlap", "--model", model, *arguments])
    assert result.exit_code != 0
    assert problem in result.output + str(result.exception)


def test_what_is_done_is_written_when_a_later_part_fails(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(rig: Rig) -> Outcome:
        raise InterlaceError("no luck")

    monkeypatch.setattr(session, "PARTS", {**PARTS, Part.CROSSOVER: fail})
    target = tmp_path / "report.json"
    arguments = ["overlap", "--model", model, "--device", "cpu", "--json", str(target)]
    arguments += ["--part", "first-token", "--part", "crossover", "--repeats", "1"]
    arguments += ["--prompt-tokens", "64", "--new", "16", "--decoders", "2"]
    result = CliRunner().invoke(bench.app, arguments)
    assert isinstance(result.exception, InterlaceError)
    assert str(result.exception) == "crossover: no luck"
    assert len(json.loads(target.read_text())["rows"]) == 1


def test_parts_that_do_not_fit_are_refused(model: str) -> None:
    arguments = ["overlap", "--model", model, "--part", "mixed", "--prompt-tokens", "64"]
    result = CliRunner().invoke(bench.app, [*arguments, "--device", "cpu"])
    assert isinstance(result.exception, InterlaceError)
    assert "requests of 840 tokens do not fit into 512" in str(result.exception)
