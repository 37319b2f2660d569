"""One decoder for all supported families, driven by its `Architecture`.

It does not know where KV is kept or how requests are batched: that is behind `Attend`.
Call it under `torch.inference_mode()`, on the device thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import torch
from torch.nn import functional

from interlace.layers.architecture import Architecture
from interlace.layers.linear import linear
from interlace.layers.norm import rms_norm
from interlace.layers.rotary import Rotary, rotate
from interlace.layers.weights import weight_shapes


class Attend(Protocol):
    """Attention of one step: keeps the new K and V, and lets each token see its own past."""

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Attend with `q` [T, heads, head_dim]; `k` and `v` are [T, kv_heads, head_dim].

        QK norm and RoPE are applied already. The three may be views with gaps between tokens.
        Returns [T, heads * head_dim].
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The weights of one layer: see `layers/weights.py`."""

    attn_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    qk_norm: torch.Tensor | None = None  # [heads + kv_heads, head_dim]


class Decoder:
    """Turns token ids into hidden states, and hidden states into logits.

    `weights` has exactly the names and shapes of `weight_shapes(architecture)`, all of one dtype
    on one device; they are used in place. Positions up to `max_model_len` - 1 are possible.
    """

    def __init__(
        self,
        architecture: Architecture,
        weights: Mapping[str, torch.Tensor],
        *,
        max_model_len: int,
    ) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        assert shapes == weight_shapes(architecture)
        self.architecture = architecture
        self.max_model_len = max_model_len
        self.embed = weights["embed"]
        self.dtype = self.embed.dtype
        self.device = self.embed.device
        self.layers = tuple(
            _layer(architecture, weights, index) for index in range(architecture.num_layers)
        )
        self.norm = weights["norm"]
        self.head = weights["embed" if architecture.tied_head else "head"]
        self.rotary = Rotary(
            architecture, max_model_len=max_model_len, dtype=self.dtype, device=self.device
        )

    def __repr__(self) -> str:
        return f"<Decoder {self.architecture.name} {self.dtype} on {self.device}>"

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        rows: torch.Tensor | None = None,
        states: Mapping[int, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Hidden states [T, hidden], before the final norm, of int64 ids and positions [T].

        With `rows`, int64 [N] into T, only those of the result, [N, hidden]: the last layer then
        computes its own K and V for all tokens and the rest for these rows.

        `states[i]` is filled with what `transformers` calls `hidden_states[i]`, of all T tokens,
        [T, hidden]: 0 the embeddings, the number of layers the final, normed states. To get those,
        the last layer computes all rows.
        """
        eps = self.architecture.rms_eps
        kept = states or {}
        last_rows = None if len(self.layers) in kept else rows
        x = functional.embedding(token_ids, self.embed)
        cos, sin = self.rotary.at(positions)
        for index, layer in enumerate(self.layers):
            if index in kept:
                kept[index].copy_(x)
            q, k, v = self._project(layer, rms_norm(x, layer.attn_norm, eps), cos, sin)
            attended = attend(index, q, k, v)
            if last_rows is not None and index == len(self.layers) - 1:
                x, attended = x[last_rows], attended[last_rows]
            x.add_(linear(attended, layer.o, layer.o_bias))
            x.add_(_feed_forward(layer, rms_norm(x, layer.mlp_norm, eps)))
        if len(self.layers) not in kept:
            return x
        kept[len(self.layers)].copy_(rms_norm(x, self.norm, eps))
        return x if rows is None else x[rows]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Raw logits, float32 [N, vocab], of hidden states [N, hidden] from `forward`."""
        normed = rms_norm(hidden, self.norm, self.architecture.rms_eps)
        return linear(normed, self.head).to(torch.float32)

    def _project(
        self, layer: DecoderLayer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Q, K, V of `x` [T, hidden]; Q and K normed and rotated in one go, since they adjoin."""
        a = self.architecture
        qkv = linear(x, layer.qkv, layer.qkv_bias).contiguous()
        heads = qkv.view(x.shape[0], a.num_heads + 2 * a.num_kv_heads, a.head_dim)
        qk, v = heads[:, : -a.num_kv_heads], heads[:, -a.num_kv_heads :]
        if layer.qk_norm is not None:
            qk = rms_norm(qk, layer.qk_norm, a.rms_eps)
        qk = rotate(qk, cos, sin)
        return qk[:, : a.num_heads], qk[:, a.num_heads :], v


def _feed_forward(layer: DecoderLayer, x: torch.Tensor) -> torch.Tensor:
    gate, up = linear(x, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
    return linear(functional.silu(gate).mul_(up), layer.down, layer.down_bias)


def _layer(a: Architecture, weights: Mapping[str, torch.Tensor], index: int) -> DecoderLayer:
    prefix = f"layers.{index}."
    own = {name.removeprefix(prefix): weights[name] for name in weights if name.startswith(prefix)}
    if a.qk_norm:
        q_norm, k_norm = own.pop("q_norm"), own.pop("k_norm")
        own["qk_norm"] = torch.cat(
            (q_norm.expand(a.num_heads, -1), k_norm.expand(a.num_kv_heads, -1))
        )
    return DecoderLayer(**own)
