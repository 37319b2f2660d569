"""The decoder over fused kernels: the same numbers as `Decoder.forward`, up to rounding.

It comes in pieces that are cut at each attention, so that a step can run them one by one, replay
them as graphs with the layer hooks in between, or replay all of it as one graph. Nothing here
waits, and whatever is allocated can come from a graph's own pool.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from interlace.layers.decoder import Decoder, DecoderLayer
from interlace.layers.gpu.inputs import StepInputs, StepSize
from interlace.layers.gpu.long_chunks import LongChunk, LongChunks
from interlace.layers.gpu.tables import BlockTables
from interlace.layers.kernels import (
    attention_plan,
    matvec,
    paged_attention,
    pointwise,
    rope_write,
)
from interlace.layers.kernels.attention_plan import AttentionPlan
from interlace.layers.kv_hooks import LayerHooks
from interlace.layers.kv_pages import KVPages

NO_STATES: Mapping[int, Tensor] = {}


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """What no step that runs the same plan exceeds."""

    max_query_len: int
    max_seq_len: int


class Flow(NamedTuple):
    """What goes into the attention of a layer, of T tokens."""

    x: Tensor
    """The residual stream, [T, hidden]; changed in place by the pieces that follow."""
    qkv: Tensor
    """The layer's projections, [T, (heads + 2 * kv_heads) * head_dim]."""


class Attention(NamedTuple):
    """What the attentions of all layers of one step share."""

    inputs: StepInputs
    plan: AttentionPlan
    block_table: Tensor
    schedule: Tensor
    workspace: Tensor
    long_chunk: LongChunk | None = None
    """The step's only request, where the matrix library attends."""


class FusedDecoder:
    """One decoder over one pool of pages and the block tables of its requests."""

    def __init__(
        self,
        decoder: Decoder,
        pages: KVPages,
        tables: BlockTables,
        long_chunks: LongChunks,
        num_sms: int,
    ) -> None:
        """`num_sms`: multiprocessors of the device."""
        self._decoder = decoder
        self._long_chunks = long_chunks
        self._architecture = decoder.architecture
        self._pages = pages
        self._tables = tables
        self._num_sms = num_sms

    @property
    def num_layers(self) -> int:
        """Attentions in a step."""
        return self._architecture.num_layers

    def forward(
        self,
        inputs: StepInputs,
        bounds: Bounds,
        rows: Tensor,
        hooks: LayerHooks | None = None,
        states: Mapping[int, Tensor] = NO_STATES,
        *,
        may_allocate: bool = False,
    ) -> Tensor:
        """Raw logits [N, vocabulary], in the model's dtype, of `rows` of the batch, int64 [N].

        `hooks` run around each layer's KV write and attention. `states` is filled as by
        `Decoder.forward`. `may_allocate`: the step is not captured, nor padded.
        """
        attention = self.attention(inputs, bounds)
        if may_allocate:
            attention = self.with_long_chunk(attention, bounds)
        flow = self.first(inputs, states)
        for layer in range(self.num_layers):
            if hooks is not None:
                hooks.wait(layer)
            attended = self.attend(attention, layer, flow.qkv)
            if hooks is not None:
                hooks.save(layer)
            if layer < self.num_layers - 1:
                flow = self.between(layer, flow.x, attended, states)
        return self.last(rows, flow.x, attended, states)

    def attention(self, inputs: StepInputs, bounds: Bounds) -> Attention:
        """Fix the attentions of a step: their plan depends on sizes and bounds alone."""
        a = self._architecture
        plan = attention_plan.plan_attention(
            num_tokens=len(inputs.token_ids),
            num_requests=len(inputs.rows),
            max_query_len=bounds.max_query_len,
            max_seq_len=bounds.max_seq_len,
            num_heads=a.num_heads,
            num_kv_heads=a.num_kv_heads,
            head_dim=a.head_dim,
            dtype=self._decoder.dtype,
            num_sms=self._num_sms,
        )
        columns = -(-bounds.max_seq_len // self._pages.block_size)
        block_table = self._tables.tables[:, :columns].index_select(0, inputs.rows)
        device = inputs.rows.device
        schedule = paged_attention.schedule_decode(
            inputs.seq_lens,
            inputs.query_start_loc,
            plan=plan,
            out=torch.empty(plan.schedule_shape, dtype=torch.int32, device=device),
        )
        workspace = torch.empty(plan.workspace_numel, dtype=torch.float32, device=device)
        return Attention(inputs, plan, block_table, schedule, workspace)

    def with_long_chunk(self, attention: Attention, bounds: Bounds) -> Attention:
        """The same, by the matrix library if that is faster; not for graphs, nor with padding."""
        inputs = attention.inputs
        size = StepSize(len(inputs.token_ids), len(inputs.rows))
        chunk = self._long_chunks.of(size, bounds.max_seq_len, attention.block_table)
        return attention._replace(long_chunk=chunk)

    def first(self, inputs: StepInputs, states: Mapping[int, Tensor] = NO_STATES) -> Flow:
        """From tokens to the first attention. A token that only the device knows is looked up."""
        newest = self._tables.newest[inputs.sources.clamp(min=0)]
        token_ids = torch.where(inputs.sources >= 0, newest, inputs.token_ids)
        x = functional.embedding(token_ids, self._decoder.embed)
        return self._into(0, x, None, states)

    def room_for_attended(self, num_tokens: int) -> Tensor:
        """What an attention of so many tokens can put its result into."""
        width = self._architecture.num_heads * self._architecture.head_dim
        return torch.zeros(
            (num_tokens, width), dtype=self._decoder.dtype, device=self._decoder.device
        )

    def attend(
        self, attention: Attention, index: int, qkv: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """Write K and V into the pages of layer `index`, and attend: [T, heads * head_dim], `out`
        if it is given."""
        decoder, inputs = self._decoder, attention.inputs
        pages = self._pages.layers[index]
        q = qkv.new_empty(len(qkv), self._architecture.num_heads, self._architecture.head_dim)
        rope_write.rope_and_write(
            qkv,
            inputs.positions,
            decoder.rotary.cos,
            decoder.rotary.sin,
            inputs.slots,
            pages,
            q_out=q,
            qk_norm=decoder.layers[index].qk_norm,
            eps=self._architecture.rms_eps,
        )
        if attention.long_chunk is not None:
            attended = self._long_chunks.attend(index, q, attention.long_chunk)
            return attended.view(len(attended), -1)
        attended = torch.empty_like(q) if out is None else out.view(q.shape)
        paged_attention.paged_attention(
            q,
            pages,
            attention.block_table,
            inputs.seq_lens,
            inputs.query_start_loc,
            plan=attention.plan,
            schedule=attention.schedule,
            scale=self._architecture.head_dim**-0.5,
            out=attended,
            workspace=attention.workspace,
        )
        return attended.view(len(attended), -1)

    def between(
        self, index: int, x: Tensor, attended: Tensor, states: Mapping[int, Tensor] = NO_STATES
    ) -> Flow:
        """From the attention of layer `index` to that of the next one."""
        delta = self._rest(self._decoder.layers[index], x, attended)
        return self._into(index + 1, x, delta, states)

    def last(
        self, rows: Tensor, x: Tensor, attended: Tensor, states: Mapping[int, Tensor] = NO_STATES
    ) -> Tensor:
        """From the last attention to the logits of `rows`."""
        decoder, all_rows = self._decoder, self.num_layers in states
        if not all_rows and len(rows) == 0:  # KV is written: nothing else is wanted
            return x.new_empty(0, len(decoder.head))
        if not all_rows:
            x, attended = x[rows], attended[rows]
        delta = self._rest(decoder.layers[-1], x, attended)
        normed = self._normed(x, delta, decoder.norm)
        if all_rows:
            states[self.num_layers].copy_(normed)
            normed = normed[rows]
        return _linear(normed, decoder.head)

    def _into(
        self, index: int, x: Tensor, delta: Tensor | None, states: Mapping[int, Tensor]
    ) -> Flow:
        """Norm and projections of layer `index`."""
        layer = self._decoder.layers[index]
        normed = self._normed(x, delta, layer.attn_norm)
        if index in states:
            states[index].copy_(x)
        return Flow(x, _linear(normed, layer.qkv, layer.qkv_bias))

    def _rest(self, layer: DecoderLayer, x: Tensor, attended: Tensor) -> Tensor:
        """Output projection and feed-forward; what they add last is returned and not yet added."""
        delta = _linear(attended, layer.o, layer.o_bias)
        normed = self._normed(x, delta, layer.mlp_norm)
        gate_up = _linear(normed, layer.gate_up, layer.gate_up_bias)
        active = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        pointwise.silu_mul(gate_up, out=active)
        return _linear(active, layer.down, layer.down_bias)

    def _normed(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """Add `delta` to `x` in place, and norm the sum."""
        eps, out = self._architecture.rms_eps, torch.empty_like(x)
        if delta is None:
            return pointwise.rms_norm(x, weight, eps, out=out)
        return pointwise.add_rms_norm(x, delta, weight, eps, out=out)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x` [T, in] times `weight` [out, in] transposed, plus `bias`: by whichever is faster for the
    shape, our own kernel for few rows or the matrix library."""
    num_outputs, num_inputs = weight.shape
    if matvec.prefers_matvec(num_outputs, num_inputs, len(x), x.dtype):
        out = x.new_empty(len(x), num_outputs)
        return matvec.matvec(x, weight, bias, out=out)
    return functional.linear(x, weight, bias)
