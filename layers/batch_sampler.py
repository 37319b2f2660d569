"""Samples a whole batch without waiting for the device: greedy rows, and plain random ones.

The tokens are those of `layers/sampler.py`, its plain twin, up to the rounding of sums. Rows that
need more than temperature, min-p, top-k and top-p (`fits` tells) are left to the twin. Device
thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from interlace.engine.sampling_params import SamplingParams
from interlace.layers.device_copies import to_device
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

    row: int
    """Its place in the batch."""
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


class SampledBatch(NamedTuple):
    """Still on the device."""

    token_ids: Tensor
    """int64 [N]."""
    best: Tensor
    """Each row's largest logit, float32 [N]: not finite where nothing could be sampled."""


def sample_batch(logits: Tensor, draws: Sequence[Draw]) -> SampledBatch:
    """One token for each row of raw `logits` [N, vocabulary], greedy where there is no draw.

    Queues work and returns; the result is right where `best` is finite.
    """
    best, token_ids = logits.max(dim=-1)
    if draws:
        rows = to_device([draw.row for draw in draws], torch.int64, logits.device)
        token_ids = token_ids.index_copy(0, rows, _draw(logits[rows].to(torch.float64), draws))
    return SampledBatch(token_ids, best.to(torch.float32))


def _draw(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Token ids [D] of float64 rows [D, vocabulary]: the inverse of the cumulated weights."""

    def column(values: Sequence[float], dtype: torch.dtype = torch.float64) -> Tensor:
        return to_device(values, dtype, logits.device)[:, None]

    shifted = logits - logits.amax(dim=-1, keepdim=True)
    weights = torch.exp(shifted / column([draw.temperature for draw in draws]))
    # 0 / temperature is 0 / 0 where the device flushes tiny numbers to 0.
    weights = torch.where(shifted == 0, 1.0, weights)
    kept = weights >= column([draw.min_p for draw in draws])
    weights = weights.masked_fill(~kept, 0.0)
    if any(draw.top_k or draw.top_p < 1.0 for draw in draws):
        top_k = column([draw.top_k or logits.shape[-1] for draw in draws], torch.int64)
        weights = _top(weights, top_k, column([draw.top_p for draw in draws]))
    reached = weights.cumsum(dim=-1)
    total = reached[:, -1:].contiguous()
    target = total * column([draw.uniform for draw in draws])
    chosen = torch.searchsorted(reached, target, right=True)
    # Rounding may lift the target to the total: then the first token that reaches it is meant.
    return torch.minimum(chosen, torch.searchsorted(reached, total))[:, 0]


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
