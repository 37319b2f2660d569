"""Random weights in the engine's own layout: a function of seed, weight name and place alone.

Whole numbers are hashed and scaled by one rounded multiplication, so a CPU and any GPU make the
same numbers, in chunks of any size. They are no good for statistics, only to compute with.
"""

from __future__ import annotations

import hashlib
import math
from typing import Final

import torch

from interlace.engine.ports import Progress
from interlace.layers.architecture import Architecture
from interlace.layers.checkpoint.assemble import total_bytes
from interlace.layers.checkpoint.memory import refuse_too_large
from interlace.layers.weights import weight_shapes

RECIPE_VERSION: Final = 1
"""Changes when the same seed makes other numbers."""
_STD: Final = 0.02
_RESIDUAL_WRITERS: Final = ("o", "down")
_MASK: Final = 2**32 - 1
_MULTIPLIER: Final = 0x7FEB352D  # odd and below 2**31, so that int64 products do not overflow
_CPU_CHUNK: Final = 1 << 14
"""Numbers made at once: they stay in the cache, and are too few for torch to wake helper threads,
whose waiting for one another would take longer than the work."""
_CHUNK: Final = 1 << 22
"""On other devices: few launches, and about 100 MiB beside the weights."""


def make_weights(
    architecture: Architecture,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> dict[str, torch.Tensor]:
    """All weights of `weight_shapes`, made on `device`; norms are 1, the rest spreads around 0.

    The same numbers on every device; in another `dtype` the same ones rounded. The spread is 0.02,
    and less for what writes into the residual stream, so that activations stay near 1 through any
    number of layers. Progress in bytes. Raises: `ModelError` if the memory does not suffice.
    """
    refuse_too_large(architecture, dtype, device)
    weights: dict[str, torch.Tensor] = {}
    with progress.task("Making random weights", total_bytes(architecture, dtype)) as advance:
        for name, shape in weight_shapes(architecture).items():
            weights[name] = torch.empty(shape, dtype=dtype, device=device)
            if name.endswith("norm"):
                weights[name].fill_(1.0)
            else:
                _fill(weights[name], _keys(seed, name), _std(name, architecture.num_layers))
            if device.type == "cuda":  # else all is queued at once and nothing is shown
                torch.cuda.synchronize(device)
            advance(weights[name].nbytes)
    return weights


def _std(name: str, num_layers: int) -> float:
    kind = name.rpartition(".")[2]
    return _STD / math.sqrt(2 * num_layers) if kind in _RESIDUAL_WRITERS else _STD


def _keys(seed: int, name: str) -> tuple[int, ...]:
    """Three keys below 2**32; those of two names or seeds have nothing to do with one another."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return tuple(int.from_bytes(digest[start : start + 4], "big") for start in (0, 4, 8))


def _fill(weight: torch.Tensor, keys: tuple[int, ...], std: float) -> None:
    flat = weight.view(-1)
    size = _CPU_CHUNK if weight.device.type == "cpu" else _CHUNK
    for start in range(0, flat.numel(), size):
        part = flat[start : start + size]
        part.copy_(_uniform(start, part.numel(), keys, std, weight.device))


def _uniform(
    start: int, count: int, keys: tuple[int, ...], std: float, device: torch.device
) -> torch.Tensor:
    """Float32 [count] for the places from `start`, even over the range that has deviation `std`.

    2**24 different values, so that the conversion to float32 is exact.
    """
    x = torch.arange(start % 2**32, start % 2**32 + count, dtype=torch.int64, device=device)
    for key in keys:
        x.bitwise_xor_(key).bitwise_xor_(x >> 16).mul_(_MULTIPLIER).bitwise_and_(_MASK)
    x.bitwise_xor_(x >> 15)
    centred = (x >> 8).to(torch.float32).sub_(2**23 - 0.5)
    return centred.mul_(std * math.sqrt(3) / 2**23)
