"""`interlace check` as a command against hostile modules and options: exit codes, and what it
says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from interlace.cli.app import app
from interlace.engine.errors import InterlaceError

MODULE = """
import sys
from memory_connector import MemoryConnector
from interlace.connectors.base import CheckSetup

class Exits(MemoryConnector):
    def wait_for_save(self):
        sys.exit(0)

class Prints(MemoryConnector):
    def wait_for_save(self):
        super().wait_for_save()
        print("saved")

class NoSetup(MemoryConnector):
    @classmethod
    def check_setup(cls, scratch):
        return None

class SmallPool(MemoryConnector):
    @classmethod
    def check_setup(cls, scratch):
        extra = super().check_setup(scratch).extra_config
        return CheckSetup(extra, {"num_gpu_blocks_override": 3})

class TwoRanks(MemoryConnector):
    @classmethod
    def check_setup(cls, scratch):
        return CheckSetup(super().check_setup(scratch).extra_config, {"tensor_parallel_size": 2})
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"hostile_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / f"{name}_exits.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def run(*args: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error on one line. Raises: what was not handled."""
    result = CliRunner().invoke(app, ["check", *args, "--only", "tokens-cold"])
    if result.exception is not None and not isinstance(
        result.exception, SystemExit | InterlaceError
    ):
        raise result.exception
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


def test_a_hook_that_exits_is_no_success(module: str) -> None:
    code, out, _ = run(f"{module}:Exits")
    assert code == 1
    assert "Exits.wait_for_save" in out


def test_a_module_that_exits_on_import_is_refused(module: str) -> None:
    code, _, err = run(f"{module}_exits:Connector")
    assert code == 2
    assert f"{module}_exits" in err


def test_json_is_json_whatever_a_connector_prints(module: str) -> None:
    _, out, _ = run(f"{module}:Prints", "--json")
    assert json.loads(out)["passed"] is True


@pytest.mark.parametrize(
    "args",
    [
        ["{module}:NoSetup"],
        ["{module}:SmallPool"],
        ["ExampleConnector", "--seed", "9" * 30],
        ["MultiConnector", "--config", '{"connectors": []}'],
    ],
    ids=["check_setup-answers-None", "pool-too-small", "seed-too-large", "no-children"],
)
def test_what_cannot_be_checked_is_bad_input_and_no_violation(args: list[str], module: str) -> None:
    code, out, _ = run(*(arg.replace("{module}", module) for arg in args))
    assert code == 2
    assert out == ""


def test_the_report_says_how_many_workers_there_were(module: str) -> None:
    code, out, _ = run(f"{module}:TwoRanks")
    assert code == 2 or "2 workers" in out


def test_a_role_that_only_loads_or_only_saves_is_not_accused(module: str) -> None:
    for role in ("kv_producer", "kv_consumer"):
        code, out, _ = run(f"{module}:Prints", "--role", role)
        assert code == 0, out
