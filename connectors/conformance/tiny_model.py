"""A tiny random decoder, as the loader would hand it over."""

from __future__ import annotations

import torch

from interlace.connectors.conformance.subject import Device, Subject
from interlace.engine.errors import ConfigError
from interlace.layers.architecture import Architecture
from interlace.layers.checkpoint import LoadedModel
from interlace.layers.decoder import Decoder
from interlace.layers.weights import weight_shapes

VOCAB_SIZE = 64
NUM_LAYERS = 3
"""A wait that is left out for one layer must show, be it the first, the last, or one between."""
MAX_MODEL_LEN = 128


def tiny_model(
    seed: int,
    num_kv_heads: int = 2,
    *,
    dtype: torch.dtype = torch.float64,
    device: Device = "cpu",
) -> LoadedModel:
    """Three layers, grouped heads, no tokenizer. Equal seeds give equal weights, but for rounding
    to `dtype`.

    `num_kv_heads` is what workers share: as many of them can be had. Raises: `ConfigError` if there
    is no such device.
    """
    place = _device(device)
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
        name: (torch.randn(shape, generator=random, dtype=torch.float64) * 0.5).to(place, dtype)
        for name, shape in weight_shapes(architecture).items()
    }
    return _model(architecture, weights)


def model_of(subject: Subject) -> LoadedModel:
    """The one for its engines. Raises: `ConfigError`."""
    return tiny_model(
        subject.seed,
        num_kv_heads=max(2, subject.workers),
        dtype=getattr(torch, subject.number_type),
        device=subject.device,
    )


def in_float64(model: LoadedModel) -> LoadedModel:
    """The same weights on a CPU, as float64 holds them exactly."""
    weights = {name: weight.to("cpu", torch.float64) for name, weight in model.weights.items()}
    return _model(model.architecture, weights)


def _model(architecture: Architecture, weights: dict[str, torch.Tensor]) -> LoadedModel:
    return LoadedModel(
        name="tiny",
        decoder=Decoder(architecture, weights, max_model_len=MAX_MODEL_LEN),
        tokenizer=None,
        architecture=architecture,
        eos_token_ids=(),
        max_model_len=MAX_MODEL_LEN,
        weights=weights,
    )


def _device(name: Device) -> torch.device:
    """Tried, since a driver may be there and broken."""
    device = torch.device(name)
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).partition("\n")[0]
        raise ConfigError(
            f"device={name!r} needs an NVIDIA GPU that torch can use ({why}): run"
            " `interlace info`, or use device='cpu'."
        ) from error
    return device
