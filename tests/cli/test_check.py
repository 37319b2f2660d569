"""`interlace check` as it is typed: output, exit codes, bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from interlace.cli.app import app

CONNECTOR = """
from interlace.connectors.conformance import Rule, Script, ScriptedConnector
from interlace.connectors.base import CheckSetup


class Right(ScriptedConnector):
    @classmethod
    def check_setup(cls, scratch):
        return CheckSetup({"script": Script()})


class Wrong(Right):
    def wait_for_save(self):
        raise TimeoutError("the queue is full")


class NoConnector:
    pass
"""
ONLY = ["--only", "tokens-cold"]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An importable module with a right connector and a wrong one."""
    name = f"checked_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(CONNECTOR)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def run(*args: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error, the latter on one line."""
    result = CliRunner().invoke(app, ["check", *args], env={"COLUMNS": "300"})
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


def test_a_right_connector(module: str) -> None:
    code, out, err = run(f"{module}:Right", *ONLY, "--only", "plan-reset")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("ok      plan-reset ")
    assert lines[1].startswith("ok      tokens-cold ")
    assert lines[-1].startswith("Right: 2 ok, 0 failed, 0 skipped in ")
    assert f"check {module}:Right" in err, "what is going on stands beside it"


def test_a_wrong_connector(module: str) -> None:
    code, out, _ = run(f"{module}:Wrong", *ONLY)
    assert code == 1
    assert "FAILED  hooks-do-not-raise" in out
    assert "Wrong.wait_for_save raised TimeoutError: the queue is full" in out
    assert "raise TimeoutError" in out, "the connector's own traceback"
    assert "in tokens-cold at depth 1, lanes eager, after:" in out


def test_json_has_standard_output_to_itself(module: str) -> None:
    code, out, _ = run(f"{module}:Wrong", *ONLY, "--json", "--seed", "3")
    assert code == 1
    said = json.loads(out)
    assert said["passed"] is False
    assert said["seed"] == 3


def test_a_quick_check_says_that_it_was_one(module: str) -> None:
    code, out, _ = run(f"{module}:Right", *ONLY, "--quick")
    assert code == 0, out
    assert "note    each scenario was played in one way only" in out


def test_two_workers(module: str) -> None:
    code, out, _ = run(f"{module}:Right", *ONLY, "--workers", "2")
    assert code == 0, out
    assert "2 workers" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["NoSuchConnector"], "there is no KV connector 'NoSuchConnector'"),
        (["no.such.module:Thing"], "no.such.module"),
        (["{module}:NoConnector"], "not a KV connector"),
        (["{module}:Missing"], "has no 'Missing'"),
        (["{module}:"], "neither a NAME nor a MODULE:CLASS"),
        (["{module}:Right", "--config", "{"], "this is not JSON"),
        (["{module}:Right", "--config", "[1]"], "give a JSON object"),
        (["{module}:Right", "--config", "{}"], "ScriptedConnector is for tests"),
        (["{module}:Right", "--only", "tokens"], "there is no property 'tokens'"),
        (["{module}:Right", "--workers", "0"], "--workers"),
        (["{module}:Right", "--role", "kv_none"], "--role"),
    ],
)
def test_bad_input_has_a_clear_error(args: list[str], message: str, module: str) -> None:
    code, out, err = run(*(arg.replace("{module}", module) for arg in args))
    assert code == 2
    assert out == ""
    assert message in err
    assert "Traceback" not in err
