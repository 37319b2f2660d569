"""`interlace bench overlap` on a real GPU: all parts, with a small model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import interlace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SECONDS = 300
PAUSES_MS = 2.0
PARTS = ("link", "first-token", "crossover", "modes", "split", "mixed", "beside", "saving", "idle")
"""All but the one whose requests come at a pace that is too slow for so small a model."""
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 5000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def test_all_parts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    target = tmp_path / "report.json"
    source = str(Path(interlace.__file__).parent.parent)
    command = [sys.executable, "-m", "interlace", "bench", "overlap"]
    for part in PARTS:
        command += ["--part", part]
    command += ["--model", f"dummy:{tmp_path}/config.json", "--prompt-tokens", "1024"]
    command += ["--new", "16,128", "--decoders", "8", "--repeats", "2", "--json", str(target)]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([source, *sys.path])},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    _check(json.loads(target.read_text()))


def _check(report: Any) -> None:
    rows = {row["case"]: row["figures"] for row in report["rows"]}
    parts = {case.split(":")[0] for case in rows}
    assert parts == set(PARTS)
    for case, figures in rows.items():
        if case.startswith(("first-token", "crossover")):
            median = {name: spread["median"] for name, spread in figures.items()}
            assert 0 < median["load ms"] < median["layer-wise ms"] + median["bulk ms"]
            assert 0 < median["compute ms"] <= median["cached ms"]
            # A load that is waited for ends before its step: nothing hides more than all, but the
            # host's pauses, which are as long as the rest of a tiny model's times.
            assert median["pipelined ms"] >= 0.9 * median["load ms"]
            assert median["pipelined ms"] >= median["compute ms"] - PAUSES_MS
            assert median["copies"] >= CONFIG["num_hidden_layers"]
        if case.startswith("link: 4 layers") and "one run" in case:
            assert "strided" in case or "gather" in case
            assert figures["GB/s"]["median"] > 1
