"""The decoder over fused kernels: the same numbers as `Decoder.forward`, up to rounding.

Allocates nothing that a captured graph could not: what it needs comes from the graph's own pool.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional

from interlace.layers.decoder import Decoder, DecoderLayer
from interlace.layers.gpu.inputs import StepInputs
from interlace.layers.gpu.tables import BlockTables
from interlace.layers.kernels import attention_plan, paged_attention, pointwise, rope_write
from interlace.layers.kv_hooks import LayerHooks
from interlace.layers.kv_pages import KVPages


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """What no step that runs the same plan exceeds."""

    max_query_len: int
    max_seq_len: int


class FusedDecoder:
    """One decoder over one pool of pages and the block tables of its requests."""

    def __init__(self, decoder: Decoder, pages: KVPages, tables: BlockTables, num_sms: int) -> None:
        """`num_sms`: multiprocessors of the device."""
        self._decoder = decoder
        self._pages = pages
        self._tables = tables
        self._num_sms = num_sms

    def forward(
        self, inputs: StepInputs, bounds: Bounds, hooks: LayerHooks | None = None
    ) -> Tensor:
        """Hidden states [B, hidden], before the final norm, of each request's last token.

        `hooks` run around each layer's KV write and attention.
        """
        decoder = self._decoder
        step = _Step(self, inputs, bounds)
        x = functional.embedding(step.token_ids(), decoder.embed)
        delta: Tensor | None = None
        for index, layer in enumerate(decoder.layers):
            normed = _normed(x, delta, layer.attn_norm, decoder.architecture.rms_eps)
            qkv = functional.linear(normed, layer.qkv, layer.qkv_bias)
            if hooks is not None:
                hooks.wait(index)
            attended = step.attend(index, layer, qkv)
            if hooks is not None:
                hooks.save(index)
            if index == len(decoder.layers) - 1:
                x, attended = x[inputs.last_tokens], attended[inputs.last_tokens]
            delta = functional.linear(attended, layer.o, layer.o_bias)
            normed = _normed(x, delta, layer.mlp_norm, decoder.architecture.rms_eps)
            delta = self._feed_forward(layer, normed)
        assert delta is not None, "there is a layer"
        return x.add_(delta)

    def logits(self, hidden: Tensor) -> Tensor:
        """Raw logits [N, vocabulary] in the model's dtype, of hidden states [N, hidden]."""
        decoder = self._decoder
        normed = _normed(hidden, None, decoder.norm, decoder.architecture.rms_eps)
        return functional.linear(normed, decoder.head)

    def _feed_forward(self, layer: DecoderLayer, normed: Tensor) -> Tensor:
        gate_up = functional.linear(normed, layer.gate_up, layer.gate_up_bias)
        active = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
        pointwise.silu_mul(gate_up, out=active)
        return functional.linear(active, layer.down, layer.down_bias)


def _normed(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add `delta` to `x` in place, and norm the sum."""
    out = torch.empty_like(x)
    if delta is None:
        return pointwise.rms_norm(x, weight, eps, out=out)
    return pointwise.add_rms_norm(x, delta, weight, eps, out=out)


class _Step:
    """What all layers of one step share."""

    def __init__(self, owner: FusedDecoder, inputs: StepInputs, bounds: Bounds) -> None:
        self._owner = owner
        self._inputs = inputs
        architecture = owner._decoder.architecture
        num_tokens, num_requests = len(inputs.token_ids), len(inputs.rows)
        self._scale = architecture.head_dim**-0.5
        self._heads = (num_tokens, architecture.num_heads, architecture.head_dim)
        self._plan = attention_plan.plan_attention(
            num_tokens=num_tokens,
            num_requests=num_requests,
            max_query_len=bounds.max_query_len,
            max_seq_len=bounds.max_seq_len,
            num_heads=architecture.num_heads,
            num_kv_heads=architecture.num_kv_heads,
            head_dim=architecture.head_dim,
            dtype=owner._decoder.dtype,
            num_sms=owner._num_sms,
        )
        tables = owner._tables
        columns = -(-bounds.max_seq_len // owner._pages.block_size)
        self._block_table = tables.tables[:, :columns].index_select(0, inputs.rows)
        self._workspace = torch.empty(
            self._plan.workspace_numel, dtype=torch.float32, device=inputs.rows.device
        )

    def token_ids(self) -> Tensor:
        """Of the batch: the host's, or the newest of a request where only the device knows it."""
        newest = self._owner._tables.newest
        sources = self._inputs.sources
        sampled = newest[sources.clamp(min=0)]
        return torch.where(sources >= 0, sampled, self._inputs.token_ids)

    def attend(self, index: int, layer: DecoderLayer, qkv: Tensor) -> Tensor:
        """Write K and V, and attend: [T, heads * head_dim]."""
        owner, inputs = self._owner, self._inputs
        rotary = owner._decoder.rotary
        pages = owner._pages.layers[index]
        q = qkv.new_empty(self._heads)
        rope_write.rope_and_write(
            qkv,
            inputs.positions,
            rotary.cos,
            rotary.sin,
            inputs.slots,
            pages,
            q_out=q,
            qk_norm=layer.qk_norm,
            eps=owner._decoder.architecture.rms_eps,
        )
        out = torch.empty_like(q)
        paged_attention.paged_attention(
            q,
            pages,
            self._block_table,
            inputs.seq_lens,
            inputs.query_start_loc,
            plan=self._plan,
            scale=self._scale,
            out=out,
            workspace=self._workspace,
        )
        return out.view(len(out), -1)
