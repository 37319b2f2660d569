"""`interlace check --device`: what is refused, and that it reaches the check."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from interlace.cli.app import app


def run(*args: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error, the latter on one line."""
    result = CliRunner().invoke(app, ["check", *args], env={"COLUMNS": "300"})
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


def test_a_cpu_may_be_named() -> None:
    code, out, _ = run("ScriptedConnector", "--device", "cpu", "--only", "tokens-cold", "--quick")
    assert code == 0, out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--device", "tpu"], "--device"),
        (["--device", "cuda", "--workers", "2"], "workers=2 share KV heads on a CPU only"),
        pytest.param(
            ["--device", "cuda"],
            "Invalid value: device='cuda' needs an NVIDIA GPU that torch can use",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_what_cannot_be_is_refused(args: list[str], message: str) -> None:
    code, out, err = run("ScriptedConnector", *args)
    assert code == 2
    assert out == ""
    assert message in err
    assert "Traceback" not in err
