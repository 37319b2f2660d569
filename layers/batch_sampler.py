"""Random rows of a batch, drawn without waiting for the device; `kernels/greedy.py` has the others.

The tokens are those of `layers/sampler.py`, its plain twin, up to the rounding of sums. Rows that
need more than temperature, min-p, top-k and top-p (`fits` tells) are left to the twin. Device
thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from interlace.engine.sampling_params import SamplingParams
from interlace.layers.device_copies import Upload, to_device
from interlace.layers.random_draws import uniform


def fits(params: SamplingParams, position: int) -> bool:
    """Whether the token at output `position` depends on nothing but the logits, the seed, the
    position and these four rules."""
    p = params
    needs_more = p.logit_bias or p.needs_history or p.logprobs is not None
    return not needs_more and position >= p.min_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Draw:
    """One random row. Its numbers go to the device with the step's other inputs."""

    place: int
    """Of its logits in the batch."""
    temperature: float
    min_p: float
    top_k: int
    """0 keeps all."""
    top_p: float
    uniform: float
    """In [0, 1): decides the draw."""

    @classmethod
    def of(cls, place: int, params: SamplingParams, seed: int, position: int) -> Draw | None:
        """At output `position`; None for a greedy row."""
        p = params
        if p.greedy:
            return None
        return cls(place, p.temperature, p.min_p, max(p.top_k, 0), p.top_p, uniform(seed, position))


def draw_tokens(logits: Tensor, draws: Sequence[Draw], upload: Upload = to_device) -> Tensor:
    """A token for each row of raw `logits` [D, vocabulary]: int64 [D], on the same device.

    `upload` is the way in which the draws' numbers go there. Queues work and returns; the result is
    right where a row's logits are finite. Inverts the cumulated weights, in float64.
    """
    temperature, min_p, top_k, top_p, target = _columns(draws, logits, upload)
    wide = logits.to(torch.float64)
    shifted = wide - wide.amax(dim=-1, keepdim=True)
    weights = torch.exp(shifted / temperature)
    # 0 / temperature is 0 / 0 where the device flushes tiny numbers to 0.
    weights = torch.where(shifted == 0, 1.0, weights)
    kept = weights >= min_p
    weights = weights.masked_fill(~kept, 0.0)
    if any(draw.top_k or draw.top_p < 1.0 for draw in draws):
        weights = _top(weights, top_k, top_p)
    reached = weights.cumsum(dim=-1)
    total = reached[:, -1:].contiguous()
    chosen = torch.searchsorted(reached, total * target, right=True)
    # Rounding may lift the target to the total: then the first token that reaches it is meant.
    return torch.minimum(chosen, torch.searchsorted(reached, total))[:, 0]


def _columns(draws: Sequence[Draw], logits: Tensor, upload: Upload) -> Tensor:
    """The draws' numbers, float64 [5, D, 1], in one upload."""
    size = logits.shape[-1]
    rows = [(d.temperature, d.min_p, d.top_k or size, d.top_p, d.uniform) for d in draws]
    packed = np.ascontiguousarray(np.array(rows, dtype=np.float64).T)
    return upload(packed, torch.float64, logits.device)[:, :, None]


def _top(weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """`weights` [D, vocabulary] with 0 where top-k, and then top-p, leave a token out.

    Of equals the first ones stay; a top-p of 1 or more leaves all.
    """
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    place = torch.arange(weights.shape[-1], device=weights.device)
    ordered = ordered.masked_fill(place >= top_k, 0.0)
    reached = ordered.cumsum(dim=-1)
    before = torch.nn.functional.pad(reached[:, :-1], (1, 0))
    beyond = (before >= top_p * reached[:, -1:]) & (top_p < 1.0)
    beyond[:, 0] = False
    return torch.zeros_like(weights).scatter_(-1, order, ordered.masked_fill_(beyond, 0.0))
