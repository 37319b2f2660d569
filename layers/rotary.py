"""Rotary position embedding, rotate-half form, from tables made once."""

from __future__ import annotations

import math

import torch

from interlace.layers.architecture import Architecture, RopeScaling


class Rotary:
    """Cosines and sines of every position up to `max_model_len`.

    Tables, not a computation per step: vector and scalar code paths of `cos` may round
    differently, and a position must get the same bits whatever else is in the batch.
    """

    def __init__(
        self,
        architecture: Architecture,
        *,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        positions = torch.arange(max_model_len, dtype=torch.float32)
        angles = positions[:, None] * inverse_frequencies(architecture)[None, :]
        self.cos = angles.cos().to(device=device, dtype=dtype)  # [max_model_len, head_dim / 2]
        self.sin = angles.sin().to(device=device, dtype=dtype)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Factors for `rotate` at `positions` [T]: two of [T, 1, head_dim], made once a step."""
        cos, sin = self.cos[positions], self.sin[positions]
        return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads `x` [T, heads, head_dim] by the factors that `Rotary.at` returned."""
    tokens, heads, head_dim = x.shape
    halves = x.view(tokens, heads, 2, head_dim // 2)
    swapped = halves.flip(2).view(tokens, heads, head_dim)
    return (x * cos).addcmul_(swapped, signed_sin)


def inverse_frequencies(architecture: Architecture) -> torch.Tensor:
    """Radians per position of each pair of dimensions: float32 [head_dim / 2]."""
    dim = architecture.head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    frequencies = 1.0 / (architecture.rope_theta**exponents)
    scaling = architecture.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "factors":
        return frequencies / torch.tensor(scaling.factors, dtype=torch.float32)
    return _llama3(frequencies, scaling)


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1: stretch long wavelengths, keep short ones, blend in between."""
    old_len, low, high = (
        scaling.original_max_position,
        scaling.low_freq_factor,
        scaling.high_freq_factor,
    )
    wavelengths = 2 * math.pi / frequencies
    stretched = frequencies / scaling.factor
    blend = (old_len / wavelengths - low) / (high - low)
    blended = (1 - blend) * stretched + blend * frequencies
    result = torch.where(wavelengths > old_len / low, stretched, blended)
    return torch.where(wavelengths < old_len / high, frequencies, result)
