"""A tiny random decoder as the loader would hand it over, and its plain greedy answers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from interlace.layers.architecture import Architecture
from interlace.layers.checkpoint import LoadedModel
from interlace.layers.decoder import Decoder
from interlace.layers.weights import weight_shapes

VOCAB_SIZE = 64


def tiny_model(
    *,
    max_model_len: int = 128,
    dtype: torch.dtype = torch.float64,
    head_dim: int = 8,
    device: str = "cpu",
    num_layers: int = 2,
    seed: int = 3,
) -> LoadedModel:
    """Grouped heads, no tokenizer; the weights depend on `head_dim`, `num_layers` and `seed`."""
    architecture = Architecture(
        name="tiny",
        num_layers=num_layers,
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        vocab_size=VOCAB_SIZE,
        rms_eps=1e-5,
        max_position=max_model_len,
    )
    random = torch.Generator().manual_seed(seed)
    scale = 0.5 if head_dim == 8 else 0.3
    weights = {
        name: (torch.randn(shape, generator=random, dtype=torch.float64) * scale).to(device, dtype)
        for name, shape in weight_shapes(architecture).items()
    }
    return LoadedModel(
        name="tiny",
        decoder=Decoder(architecture, weights, max_model_len=max_model_len),
        tokenizer=None,
        architecture=architecture,
        eos_token_ids=(),
        max_model_len=max_model_len,
        weights=weights,
    )


def dense_causal(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of one whole sequence, with no pages."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1).flatten(1)


@torch.inference_mode()
def plain_logits(model: LoadedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits [vocab] after `token_ids`, all computed at once."""
    ids = torch.tensor(token_ids)
    hidden = model.decoder.forward(ids, torch.arange(len(ids)), dense_causal)
    return model.decoder.logits(hidden[-1:])[0]


def plain_answer(model: LoadedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Greedy tokens after `prompt`, each from a computation of everything before it."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(plain_logits(model, tokens).argmax()))
    return tokens[len(prompt) :]
