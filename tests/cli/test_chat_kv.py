"""KV in files across processes: the same question again, and a conversation on the next day."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from interlace.layers.checkpoint import LoadedModel

ROOT = Path(__file__).resolve().parents[2]
QUESTION = (
    "Please tell me in a few plain words what a lighthouse is for, who kept its lamp burning in "
    "former times, and what became of these people when the lamps began to burn by themselves."
)
FURTHER = "And which of them is the tallest?"


@pytest.fixture(autouse=True)
def _cached(default_model: LoadedModel) -> None:
    """The processes find the model in the cache."""


def chat(*args: str, stdin: str = "") -> tuple[str, str]:
    """Standard output and standard error of one process that must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "interlace", "chat", "--max-tokens", "12", *args],
        input=stdin,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def answer(*args: str) -> tuple[str, dict[str, Any]]:
    """Text and usage of an answer to one question."""
    record = json.loads(chat("--json", *args)[0])
    return record["text"], record["usage"]


def test_a_second_process_loads_what_the_first_has_saved(tmp_path: Path) -> None:
    kept, saved = str(tmp_path / "kv"), str(tmp_path / "chat.json")
    out, err = chat("--kv-dir", kept, stdin=f"{QUESTION}\n/save {saved}\n")
    assert "[0 cached, 0 loaded, " in err

    again, usage = answer("--kv-dir", kept, "-p", QUESTION)
    assert again + "\n" == out
    assert usage["num_external_cached_tokens"] >= usage["num_prompt_tokens"] - 16

    before = usage["num_prompt_tokens"]
    text, usage = answer("--kv-dir", kept, "--continue", saved, "-p", FURTHER)
    assert usage["num_external_cached_tokens"] > before - 16, "of the answer, too"
    plain, cold = answer("--continue", saved, "-p", FURTHER)
    assert text == plain
    assert cold["num_prompt_tokens"] == usage["num_prompt_tokens"]
    assert cold["num_external_cached_tokens"] == 0


def test_an_unknown_connector_is_one_clear_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "interlace", "chat", "-p", "Hi", "--kv-connector", "Exampel"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "ExampleConnector" in done.stderr
    assert "Traceback" not in done.stderr
