"""The decoder gives transformers' token ids for every family, from folders that it saved."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from interlace.layers.checkpoint import LoadedModel, load_checkpoint
from interlace.layers.decoder import Decoder

SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# name -> class of configuration, what differs from SIZES
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with llama3 RoPE": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama with linear RoPE": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "llama with biases and wide heads": (
        "LlamaConfig",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 24, "tie_word_embeddings": True},
    ),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 16}),
    "qwen2, tied": ("Qwen2Config", {"tie_word_embeddings": True, "use_sliding_window": False}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3 with biases": ("Qwen3Config", {"head_dim": 16, "attention_bias": True}),
}
PROMPT = [5, 17, 99, 3, 42, 42, 0, 151]
NUM_NEW_TOKENS = 12


def dense_causal(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of one whole sequence in the plainest way: the oracle of these tests."""
    tokens, heads, head_dim = q.shape
    k, v = (x.repeat_interleave(heads // k.shape[1], 1).transpose(0, 1) for x in (k, v))
    scores = q.transpose(0, 1) @ k.transpose(1, 2) / math.sqrt(head_dim)
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return (weights @ v).transpose(0, 1).reshape(tokens, heads * head_dim)


def logits_of(decoder: Decoder, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        hidden = decoder.forward(torch.tensor(ids), torch.arange(len(ids)), dense_causal)
        return decoder.logits(hidden)


def greedy(decoder: Decoder) -> list[int]:
    ids = list(PROMPT)
    for _ in range(NUM_NEW_TOKENS):
        ids.append(int(logits_of(decoder, ids)[-1].argmax()))
    return ids[len(PROMPT) :]


def save_random_model(family: str, folder: Path, **save: Any) -> tuple[list[int], torch.Tensor]:
    """A random float64 model in `folder`; returns its greedy ids and its logits of the prompt."""
    import transformers

    class_name, differences = FAMILIES[family]
    config = getattr(transformers, class_name)(**{**SIZES, **differences})
    model = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model = model.double().eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.25 * noise)
        ids = list(PROMPT)
        for _ in range(NUM_NEW_TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        logits = model(torch.tensor([PROMPT])).logits[0].float()
    model.save_pretrained(folder, **save)
    return ids[len(PROMPT) :], logits


def load(folder: Path, dtype: str = "float64") -> LoadedModel:
    return load_checkpoint(str(folder), skip_tokenizer=True, dtype=dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_ids_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    ids, logits = save_random_model(family, tmp_path)
    model = load(tmp_path)
    torch.testing.assert_close(logits_of(model.decoder, PROMPT), logits, rtol=1e-4, atol=1e-4)
    assert greedy(model.decoder) == ids
    assert model.eos_token_ids == (2, 3)


def test_shards_are_read_like_one_file(tmp_path: Path) -> None:
    ids, _ = save_random_model("qwen3", tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert greedy(load(tmp_path).decoder) == ids


def test_float32_and_bfloat16_stay_near(tmp_path: Path) -> None:
    _, logits = save_random_model("qwen3 with biases", tmp_path)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.05)):
        decoder = load(tmp_path, str(dtype).removeprefix("torch.")).decoder
        assert decoder.dtype == dtype
        ours = logits_of(decoder, PROMPT)
        assert ours.dtype == torch.float32
        assert float((ours - logits).abs().max()) < tolerance * float(logits.abs().max())


def test_a_token_does_not_depend_on_what_is_beside_it(tmp_path: Path) -> None:
    """One row runs as two, so a lone token goes another way than a batch."""
    save_random_model("qwen2, tied", tmp_path)
    decoder = load(tmp_path).decoder
    with torch.inference_mode():
        alone = decoder.forward(torch.tensor([9]), torch.tensor([0]), dense_causal)
    together = logits_of(decoder, [9, 8, 7])
    with torch.inference_mode():
        torch.testing.assert_close(decoder.logits(alone)[0], together[0], rtol=1e-6, atol=1e-6)
