"""Dummy models on a GPU: the CPU's own numbers, made there; what does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from interlace.engine.errors import ModelError
from interlace.layers.checkpoint import load_checkpoint, model_identity

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_gpu_makes_the_numbers_that_a_cpu_makes(tmp_path: Path, dtype: str) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "vocab_size": 20000,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    name = f"dummy:{tmp_path}/config.json"
    here = load_checkpoint(name, dtype=dtype, seed=5)
    there = load_checkpoint(name, dtype=dtype, seed=5, device="cuda")
    for key, weight in there.weights.items():
        assert weight.is_cuda
        assert torch.equal(weight.cpu(), here.weights[key]), key
    assert there.decoder.device.type == "cuda"
    assert model_identity(here) == model_identity(there)


def test_the_known_shapes_load_and_stay_on_the_gpu() -> None:
    loaded = load_checkpoint("dummy:qwen3-0.6b", device="cuda")
    assert loaded.decoder.dtype == torch.bfloat16
    assert loaded.tokenizer is None
    assert all(weight.is_cuda for weight in loaded.weights.values())


def test_weights_larger_than_the_gpu_are_refused_at_once(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 2**16,
        "intermediate_size": 2**20,
        "num_hidden_layers": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"GiB on cuda in bfloat16 and .* GiB are free"):
        load_checkpoint(f"dummy:{tmp_path}/config.json", device="cuda")
