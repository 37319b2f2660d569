"""Tokenizers without models: what lies here is read, nothing is fetched, and nothing is raised."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models

from interlace.layers.checkpoint import DEFAULT_MODEL
from interlace.layers.checkpoint.cache_folder import CACHE_VARIABLE
from interlace.layers.checkpoint.tokenizer_at_hand import tokenizer_at_hand

SRC = Path(__file__).resolve().parents[2] / "src"


@pytest.fixture
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    monkeypatch.setenv(CACHE_VARIABLE, str(cache))
    return cache


def test_that_of_a_folder(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    backend.decoder = decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    found = tokenizer_at_hand(str(tmp_path))
    assert found is not None
    assert found.decode([1, 0]) == "ba"


@pytest.mark.parametrize(
    "model", ["nothing", "dummy:llama-3.1-8b", "org/name", "", "a\0b", "x" * 5000, "~nobody/x"]
)
def test_none_of_what_does_not_lie_here(model: str, no_cache: Path) -> None:
    assert tokenizer_at_hand(model) is None
    assert not no_cache.exists()


def test_none_of_what_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(20))
    assert tokenizer_at_hand(str(tmp_path)) is None
    assert tokenizer_at_hand(str(tmp_path / "model.gguf")) is None


def test_the_default_model_is_not_fetched_for_it(no_cache: Path) -> None:
    assert tokenizer_at_hand(DEFAULT_MODEL) is None
    (no_cache / f"{DEFAULT_MODEL}-1").mkdir(parents=True)
    (no_cache / f"{DEFAULT_MODEL}-1" / "model.json").write_bytes(b"damaged")
    assert tokenizer_at_hand(DEFAULT_MODEL) is None


def test_it_imports_no_torch() -> None:
    code = (
        "import sys; from interlace.layers.checkpoint.tokenizer_at_hand import tokenizer_at_hand;"
        " tokenizer_at_hand('/'); sys.exit('torch' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(SRC)}).returncode == 0
    )
