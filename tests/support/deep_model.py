"""A tiny random decoder with more layers than `tiny_model`: some of them share a gate."""

from __future__ import annotations

import torch
from tiny_model import VOCAB_SIZE

from interlace.layers.architecture import Architecture
from interlace.layers.checkpoint import LoadedModel
from interlace.layers.decoder import Decoder
from interlace.layers.weights import weight_shapes

MAX_MODEL_LEN = 128


def deep_model(
    num_layers: int = 4,
    *,
    head_dim: int = 8,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> LoadedModel:
    """Grouped heads, no tokenizer; the weights depend on `num_layers` and `head_dim` alone."""
    architecture = Architecture(
        name="deep",
        num_layers=num_layers,
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        vocab_size=VOCAB_SIZE,
        rms_eps=1e-5,
        max_position=MAX_MODEL_LEN,
    )
    draw = torch.Generator().manual_seed(4)
    scale = 0.5 if head_dim == 8 else 0.3
    weights = {
        name: (torch.randn(shape, generator=draw, dtype=torch.float64) * scale).to(device, dtype)
        for name, shape in weight_shapes(architecture).items()
    }
    return LoadedModel(
        name="deep",
        decoder=Decoder(architecture, weights, max_model_len=MAX_MODEL_LEN),
        tokenizer=None,
        architecture=architecture,
        eos_token_ids=(),
        max_model_len=MAX_MODEL_LEN,
        weights=weights,
    )
