"""A tiny random decoder in float64, as the loader would hand it over."""

from __future__ import annotations

import torch

from interlace.layers.architecture import Architecture
from interlace.layers.checkpoint import LoadedModel
from interlace.layers.decoder import Decoder
from interlace.layers.weights import weight_shapes

VOCAB_SIZE = 64
NUM_LAYERS = 3
"""A wait that is left out for one layer must show, be it the first, the last, or one between."""
MAX_MODEL_LEN = 128


def tiny_model(seed: int, num_kv_heads: int = 2) -> LoadedModel:
    """Three layers, grouped heads, no tokenizer. Equal seeds give equal weights.

    `num_kv_heads` is what workers share: as many of them can be had.
    """
    architecture = Architecture(
        name="tiny",
        num_layers=NUM_LAYERS,
        hidden_size=32,
        intermediate_size=48,
        num_heads=2 * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        vocab_size=VOCAB_SIZE,
        rms_eps=1e-5,
        max_position=MAX_MODEL_LEN,
    )
    random = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(shape, generator=random, dtype=torch.float64) * 0.5
        for name, shape in weight_shapes(architecture).items()
    }
    return LoadedModel(
        name="tiny",
        decoder=Decoder(architecture, weights, max_model_len=MAX_MODEL_LEN),
        tokenizer=None,
        architecture=architecture,
        eos_token_ids=(),
        max_model_len=MAX_MODEL_LEN,
        weights=weights,
    )
