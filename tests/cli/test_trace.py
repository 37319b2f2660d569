"""`interlace trace` and `interlace bench timeline` as they are typed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from bench_kit import tiny_dummy
from step_trace_kit import a_trace, facts, steady_marks
from typer.testing import CliRunner

from interlace.bench.step_trace.build import build_trace
from interlace.bench.step_trace.file import read_file, to_json
from interlace.bench.step_trace.text import lines
from interlace.bench.step_trace.trace import HybridTrace
from interlace.cli.app import app
from interlace.engine.errors import ConfigError


def run(*args: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error, the latter on one line. Our own errors, which
    `main` would tell, have the code 1."""
    result = CliRunner().invoke(app, list(args), env={"COLUMNS": "300"})
    message = f" {result.exception}" if isinstance(result.exception, ConfigError) else ""
    return result.exit_code, result.stdout, " ".join(result.stderr.split()) + message


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "step.json"
    path.write_text(to_json(a_trace(8)))
    return path


def test_a_timeline_is_shown(file: Path) -> None:
    code, out, err = run("trace", str(file))
    assert (code, err) == (0, "")
    assert out.splitlines() == lines(a_trace(8))


def test_names_cannot_drive_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    path.write_text(to_json(build_trace(steady_marks(), facts(model="\x1b[2Jmodel"))))
    code, out, _ = run("trace", str(path))
    assert code == 0
    assert out.startswith("^[[2Jmodel,")


def test_pictures(file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png, svg = tmp_path / "a.png", tmp_path / "a.svg"
    code, _, _ = run("trace", str(file), "--png", str(png), "--svg", str(svg))
    assert code == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    assert b"</svg>" in svg.read_bytes()


def test_no_picture_without_matplotlib(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = run("trace", str(file), "--svg", str(tmp_path / "a.svg"))
    assert code == 1
    assert "pip install interlace[plot]" in err
    assert out.startswith("dummy:llama"), "words need no matplotlib"
    assert not (tmp_path / "a.svg").exists()


def test_bad_files(file: Path, tmp_path: Path) -> None:
    code, out, err = run("trace", str(tmp_path / "none.json"))
    assert (code, out) == (1, "")
    assert f"{tmp_path}/none.json cannot be read (No such file or directory): name what" in err
    file.write_text("{}")
    code, out, err = run("trace", str(file))
    assert (code, out) == (1, "")
    assert "is no timeline of a step (KeyError: 'otherData')" in err


@pytest.mark.parametrize("option", ["--png", "--svg"])
def test_a_picture_that_cannot_be_written(option: str, file: Path, tmp_path: Path) -> None:
    code, out, err = run("trace", str(file), option, str(tmp_path / "none" / "a"))
    assert (code, out) == (1, "")
    assert f"{option} {tmp_path}/none/a cannot be written" in err


def test_a_step_is_recorded(tmp_path: Path) -> None:
    target = tmp_path / "step.json"
    options = ["--device", "cpu", "--prompt-tokens", "64", "--new", "8", "--repeats", "1"]
    code, out, err = run(
        "bench", "timeline", "--model", tiny_dummy(tmp_path), *options,
        "--group-size", "1", "--trace", str(target), "--json", "-",
    )  # fmt: skip
    assert code == 0, out + err
    report = json.loads(out)
    assert report["benchmark"] == "timeline"
    assert report["rows"][0]["figures"]["total ms"]["median"] > 0
    trace = read_file(target)
    assert (trace.facts.loaded_tokens, trace.facts.new_tokens) == (64, 8)
    assert "64 tokens loaded, 8 computed" in err


def test_a_prompt_from_both_ends_is_recorded_and_shown(tmp_path: Path) -> None:
    target = tmp_path / "both.json"
    options = ["--device", "cpu", "--prompt-tokens", "128", "--new", "8", "--repeats", "1"]
    code, out, err = run(
        "bench", "timeline", "--model", tiny_dummy(tmp_path), *options,
        "--load-mode", "hybrid", "--trace", str(target), "--json", "-",
    )  # fmt: skip
    assert code == 0, out + err
    figures = json.loads(out)["rows"][0]["figures"]
    assert figures["front tokens"]["median"] + figures["back tokens"]["median"] == 128
    trace = read_file(target)
    assert isinstance(trace, HybridTrace)
    assert "128 tokens from both ends, 8 behind them" in err
    code, out, err = run("trace", str(target))
    assert (code, err) == (0, "")
    assert out.splitlines() == lines(trace)
    assert f"met               at block {trace.facts.meeting_block} of 8" in out


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ([], 2, "--trace"),
        (["--trace", "/no/such/folder/x.json"], 1, "--trace /no/such/folder/x.json cannot be"),
        (["--trace", "{tmp}"], 1, "cannot be written"),
        (["--trace", "{tmp}/x", "--json", "/no/such/folder/x"], 1, "--json /no/such/folder/x"),
        (["--trace", "{tmp}/x", "--prompt-tokens", "100"], 1, "not whole blocks"),
        (["--trace", "{tmp}/x", "--load-mode", "bulk"], 2, "--load-mode"),
        (["--trace", "{tmp}/x", "--load-mode", "hybrid", "--prompt-tokens", "16"], 1, "take 32"),
        (["--trace", "{tmp}/x", "--load-mode", "hybrid", "--group-size", "2"], 1, "leave it out"),
        (["--trace", "{tmp}/x", "--new", "0"], 2, "--new"),
        (["--trace", "{tmp}/x", "--repeats", "0"], 2, "--repeats"),
        (["--trace", "{tmp}/x", "--group-size", "0"], 2, "--group-size"),
    ],
)
def test_bad_options_are_refused_before_a_model_is_loaded(
    args: list[str], code: int, message: str, tmp_path: Path
) -> None:
    given = [arg.replace("{tmp}", str(tmp_path)) for arg in args]
    found, out, err = run("bench", "timeline", "--model", "no such model", *given)
    assert (found, out) == (code, "")
    assert message in err
