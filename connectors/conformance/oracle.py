"""What is right: the KV of a sequence and the tokens after it, computed without pages."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from interlace.connectors.conformance.tiny_model import in_float64
from interlace.engine.sampling_params import SamplingParams
from interlace.layers.checkpoint import LoadedModel
from interlace.layers.sampler import SamplingRow, sample

MIN_MARGIN = 1e-3
"""A token counts as wrong only if the right one leads by so much in the logits."""
KV = NDArray[np.float64]
_MAX_KEPT = 500
_HEAD = 4
"""Tokens by which sequences are found; shorter ones have to be equal."""


class Best(NamedTuple):
    """The greedy token at one position."""

    token_id: int
    margin: float
    """How far its logit leads."""


class _Answers(NamedTuple):
    kv: tuple[KV, ...]
    best: tuple[Best, ...]
    """After each token."""
    logits: torch.Tensor
    """[tokens, vocabulary], after each token."""


class Oracle:
    """Right answers for one model, in float64 on a CPU wherever that model computes. Keeps the
    newest ones, which serve for what they begin with too; one thread."""

    def __init__(self, model: LoadedModel) -> None:
        self._decoder = in_float64(model).decoder
        self._kept: collections.OrderedDict[tuple[int, ...], _Answers] = collections.OrderedDict()
        self._by_head: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        """First tokens -> what is kept that begins with them."""

    def kv(self, token_ids: Sequence[int]) -> tuple[KV, ...]:
        """Per layer [tokens, 2, kv heads, head dim]: K and V of these tokens and maybe of more."""
        return self._of(tuple(token_ids)).kv

    def after_each(self, prompt: Sequence[int], answer: Sequence[int]) -> list[Best]:
        """What should have come at each position of `answer`, given all that came before it."""
        if not answer:
            return []
        best = self._of((*prompt, *answer[:-1])).best
        return list(best[len(prompt) - 1 : len(prompt) + len(answer) - 1])

    def drawn(
        self, prompt: Sequence[int], answer: Sequence[int], params: SamplingParams, seed: int
    ) -> list[int]:
        """What sampling should have drawn at each position of `answer`, given all before it: the
        answer's own token where logits that differ by `MIN_MARGIN` give that."""
        if not answer:
            return []
        first = len(prompt)
        logits = self._of((*prompt, *answer[:-1])).logits[first - 1 : first + len(answer) - 1]
        ids = np.array((*prompt, *answer), dtype=np.int64)
        rows = [
            SamplingRow(str(place), params, seed, ids[:first], ids[first : first + place])
            for place in range(len(answer))
        ]
        drawn = sample(logits, rows).token_ids
        if drawn == list(answer):
            return drawn
        near = sample(_towards(logits, drawn, answer), rows).token_ids
        return [n if n == a else d for d, n, a in zip(drawn, near, answer, strict=True)]

    def _of(self, key: tuple[int, ...]) -> _Answers:
        head = key[:_HEAD]
        for kept in self._by_head.get(head, ()):
            if kept[: len(key)] == key:
                return self._kept[kept]
        self._kept[key] = self._compute(key)
        self._by_head.setdefault(head, []).append(key)
        if len(self._kept) > _MAX_KEPT:
            self._forget_oldest()
        return self._kept[key]

    def _forget_oldest(self) -> None:
        key, _ = self._kept.popitem(last=False)
        alike = self._by_head[key[:_HEAD]]
        alike.remove(key)
        if not alike:
            del self._by_head[key[:_HEAD]]

    @torch.inference_mode()
    def _compute(self, key: tuple[int, ...]) -> _Answers:
        layers: list[KV] = []

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            layers.append(torch.stack((k, v), dim=1).numpy().copy())
            return _causal(q, k, v)

        ids = torch.tensor(key)
        hidden = self._decoder.forward(ids, torch.arange(len(key)), attend)
        logits = self._decoder.logits(hidden)
        values, indices = logits.topk(2)
        best = [
            Best(first, margin)
            for (first, _), margin in zip(
                indices.tolist(), (values[:, 0] - values[:, 1]).tolist(), strict=True
            )
        ]
        return _Answers(tuple(layers), tuple(best), logits)


def _towards(logits: torch.Tensor, drawn: Sequence[int], wanted: Sequence[int]) -> torch.Tensor:
    """A little more for all tokens on that side of `drawn` on which `wanted` is: a draw goes
    through them in the order of their ids, and so comes as near as it can."""
    ids = torch.arange(logits.shape[1])
    near = logits.clone()
    for row, (token_id, other) in enumerate(zip(drawn, wanted, strict=True)):
        if other != token_id:
            near[row, ids <= other if other < token_id else ids >= other] += MIN_MARGIN
    return near


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of one whole sequence."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1).flatten(1)
