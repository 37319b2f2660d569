"""What is right: the KV of a sequence and the tokens after it, computed without pages."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from interlace.layers.checkpoint import LoadedModel

MIN_MARGIN = 1e-3
"""A token counts as wrong only if the right one leads by so much in the logits."""
TOLERANCE = 1e-9
"""Of float64 KV that was computed in batches of another shape."""

KV = NDArray[np.float64]
_MAX_KEPT = 4000


class Next(NamedTuple):
    """What comes after a sequence."""

    token_id: int
    margin: float
    """How far its logit leads."""


class Oracle:
    """Right answers for one model. Keeps the newest ones; one thread."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._kv: collections.OrderedDict[tuple[int, ...], tuple[KV, ...]]
        self._kv = collections.OrderedDict()
        self._next: collections.OrderedDict[tuple[int, ...], Next] = collections.OrderedDict()

    def kv(self, token_ids: Sequence[int]) -> tuple[KV, ...]:
        """Per layer [tokens, 2, kv heads, head dim]: K and V of each token."""
        key = tuple(token_ids)
        if key not in self._kv:
            self._compute(key)
        return self._kv[key]

    def next(self, token_ids: Sequence[int]) -> Next:
        """The greedy token after these."""
        key = tuple(token_ids)
        if key not in self._next:
            self._compute(key)
        return self._next[key]

    @torch.inference_mode()
    def _compute(self, key: tuple[int, ...]) -> None:
        layers: list[KV] = []

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            layers.append(torch.stack((k, v), dim=1).numpy().copy())
            return _causal(q, k, v)

        ids = torch.tensor(key)
        hidden = self._model.decoder.forward(ids, torch.arange(len(key)), attend)
        best = self._model.decoder.logits(hidden[-1:])[0].topk(2)
        self._kv[key] = tuple(layers)
        self._next[key] = Next(int(best.indices[0]), float(best.values[0] - best.values[1]))
        for kept in (self._kv, self._next):
            if len(kept) > _MAX_KEPT:
                kept.popitem(last=False)


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of one whole sequence."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1).flatten(1)
