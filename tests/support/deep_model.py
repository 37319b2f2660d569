"""A tiny random decoder with more layers than `tiny_model`: some of them share a gate."""

from __future__ import annotations

import torch
from tiny_model import tiny_model

from interlace.layers.checkpoint import LoadedModel

MAX_MODEL_LEN = 128


def deep_model(
    num_layers: int = 4,
    *,
    head_dim: int = 8,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> LoadedModel:
    """Grouped heads, no tokenizer; the weights depend on `num_layers` and `head_dim` alone."""
    return tiny_model(
        max_model_len=MAX_MODEL_LEN,
        dtype=dtype,
        head_dim=head_dim,
        device=device,
        num_layers=num_layers,
        seed=4,
    )
