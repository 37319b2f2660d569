"""`interlace bench store`: its options, and a run of two parts with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_kit import tiny_dummy
from typer.testing import CliRunner

from interlace.bench.store import session
from interlace.bench.store.rig import StoreSizes
from interlace.cli import bench


@pytest.fixture
def model(tmp_path: Path) -> str:
    return tiny_dummy(tmp_path)


def test_help_names_the_parts() -> None:
    result = CliRunner().invoke(bench.app, ["store", "--help"])
    assert result.exit_code == 0
    for name in ("read", "lookup", "first-token", "cold", "saving", "--path"):
        assert name in result.output


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--part", "speed"], "speed"),
        (["--new", "0"], "--new"),
        (["--path", "no such folder"], "--path"),
        (["--json", "no/such/file"], "--json"),
    ],
)
def test_bad_options_are_refused_before_a_model_is_looked_for(
    arguments: list[str], problem: str
) -> None:
    result = CliRunner().invoke(bench.app, ["store", "--model", "no such", *arguments])
    assert result.exit_code != 0
    assert problem in result.output + str(result.exception)


def test_two_parts_one_file_and_nothing_is_left(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = StoreSizes(1 << 16, num_records=50, lookup_blocks=9, lookups=2)
    whole = session.StoreWork
    monkeypatch.setattr(session, "StoreWork", lambda sizes, folder: whole(sizes, folder, few))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    target = tmp_path / "report.json"
    arguments = ["store", "--model", model, "--device", "cpu", "--json", str(target)]
    arguments += ["--part", "first-token", "--part", "lookup", "--repeats", "1"]
    arguments += ["--prompt-tokens", "64", "--new", "16", "--path", str(scratch)]
    result = CliRunner().invoke(bench.app, arguments)
    assert result.exit_code == 0, result.output
    assert "store: lookup" in result.output
    assert "store: first-token" in result.output
    report = json.loads(target.read_text())
    assert report["rows"][0]["case"] == "lookup: look-up of 9 blocks among 50 records in 1 files"
    assert report["rows"][-1]["case"] == "first-token: 64 + 16 new"
    assert not list(scratch.iterdir())
