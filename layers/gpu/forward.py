"""The decoder over fused kernels: the same numbers as `Decoder.forward`, up to rounding.

It comes in pieces that are cut at each attention, so that a step can run them one by one, replay
them as graphs with the layer hooks in between, or replay all of it as one graph. Nothing here
waits, and whatever is allocated can come from a graph's own pool.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from interlace.layers.attention import SequenceChunk
from interlace.layers.decoder import Decoder, DecoderLayer
from interlace.layers.gpu.inputs import StepInputs, StepSize
from interlace.layers.gpu.room import StepRoom
from interlace.layers.gpu.tables import BlockTables
from interlace.layers.kernels import (
    attention_plan,
    gathered_attention,
    greedy,
    matvec,
    paged_attention,
    pointwise,
    rope_write,
)
from interlace.layers.kernels.attention_plan import AttentionPlan
from interlace.layers.kernels.gathered_attention import GatheredKeys, KeyRoom
from interlace.layers.kv_hooks import LayerHooks
from interlace.layers.kv_pages import KVPages

NO_STATES: Mapping[int, Tensor] = {}


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """What no step that runs the same plan exceeds."""

    max_query_len: int
    max_seq_len: int


class Wanted(NamedTuple):
    """The requests of a step whose next token is wanted, N of them."""

    last_tokens: Tensor
    """int64 [N]: where in the batch each one's last token is."""
    rows: Tensor
    """int64 [N]: of the block tables."""


class Answer(NamedTuple):
    """What a step comes to, for the requests whose next token is wanted."""

    logits: Tensor
    """Raw, [N, vocabulary], in the model's dtype."""
    sampled: Tensor
    """int32 [2, N], from `greedy`. The tokens are noted as the newest ones of their rows."""


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
    gathered: GatheredKeys | None
    """Where keys are gathered, if the plan does."""


class FusedDecoder:
    """One decoder over one pool of pages and the block tables of its requests."""

    def __init__(
        self,
        decoder: Decoder,
        pages: KVPages,
        tables: BlockTables,
        key_room: KeyRoom | None,
        num_sms: int,
    ) -> None:
        """`key_room`: where the keys of long chunks are gathered, if they are. `num_sms`:
        multiprocessors of the device."""
        self._decoder = decoder
        self._key_room = key_room
        self._architecture = decoder.architecture
        self._pages = pages
        self._tables = tables
        self._num_sms = num_sms

    @property
    def num_layers(self) -> int:
        """Attentions in a step."""
        return self._architecture.num_layers

    @property
    def qkv_width(self) -> int:
        """Projections of one token that go into an attention."""
        a = self._architecture
        return (a.num_heads + 2 * a.num_kv_heads) * a.head_dim

    def forward(
        self,
        inputs: StepInputs,
        attention: Attention,
        wanted: Wanted,
        hooks: LayerHooks | None = None,
        states: Mapping[int, Tensor] = NO_STATES,
        room: StepRoom | None = None,
    ) -> Answer | None:
        """Compute the step; None if no token is wanted of it.

        `hooks` run around each layer's KV write and attention. `states` is filled as by
        `Decoder.forward`. With `room` the answer is put there.
        """
        flow = self.first(inputs, states)
        for layer in range(self.num_layers):
            if hooks is not None:
                hooks.wait(layer)
            attended = self.attend(attention, layer, flow.qkv)
            if hooks is not None:
                hooks.save(layer)
            if layer < self.num_layers - 1:
                flow = self.between(layer, flow.x, attended, states)
        end = None if hooks is None else hooks.end
        return self.last(wanted, flow.x, attended, states, room, end)

    def attention(
        self, inputs: StepInputs, bounds: Bounds, chunks: Sequence[SequenceChunk] = ()
    ) -> Attention:
        """Fix the attentions of a step: their plan depends on sizes and bounds alone.

        For a step that is not captured `chunks` says what its requests compute: then a pass with
        nothing to do is left out, and keys are gathered only if they fit. Of a captured one that
        `gathers` it is promised that they do, see `can_gather`.
        """
        columns = -(-bounds.max_seq_len // self._pages.block_size)
        block_table = self._tables.tables[:, :columns].index_select(0, inputs.rows)
        counts = [chunk.end - chunk.start for chunk in chunks]
        plan = self.plan(
            StepSize(len(inputs.token_ids), len(inputs.rows)),
            bounds,
            has_decodes=not chunks or 1 in counts,
            may_gather=self.can_gather(c.end for c in chunks if c.end - c.start > 1),
        )
        device = inputs.rows.device
        schedule = torch.empty(plan.schedule_shape, dtype=torch.int32, device=device)
        if plan.decode_items:
            paged_attention.schedule_decode(
                inputs.seq_lens, inputs.query_start_loc, plan=plan, out=schedule
            )
        workspace = torch.empty(plan.workspace_numel, dtype=torch.float32, device=device)
        gathered = None
        if plan.is_gathered and self._key_room is not None:
            starts = torch.empty_like(inputs.query_start_loc)
            gathered_attention.place_keys(inputs.seq_lens, inputs.query_start_loc, out=starts)
            gathered = GatheredKeys(self._key_room, starts)
        return Attention(inputs, plan, block_table, schedule, workspace, gathered)

    def plan(
        self, size: StepSize, bounds: Bounds, *, has_decodes: bool = True, may_gather: bool = True
    ) -> AttentionPlan:
        """What the attentions of a step of this size run. See `plan_attention`."""
        a = self._architecture
        return attention_plan.plan_attention(
            num_tokens=size.num_tokens,
            num_requests=size.num_requests,
            max_query_len=bounds.max_query_len,
            max_seq_len=bounds.max_seq_len,
            num_heads=a.num_heads,
            num_kv_heads=a.num_kv_heads,
            head_dim=a.head_dim,
            dtype=self._decoder.dtype,
            num_sms=self._num_sms,
            has_decodes=has_decodes,
            may_gather=may_gather and self._key_room is not None,
        )

    def can_gather(self, lengths: Iterable[int]) -> bool:
        """Whether there is room for the keys of requests of these lengths."""
        return self._key_room is not None and self._key_room.holds(lengths)

    def first(
        self,
        inputs: StepInputs,
        states: Mapping[int, Tensor] = NO_STATES,
        room: StepRoom | None = None,
    ) -> Flow:
        """From tokens to the first attention. A token that only the device knows is looked up."""
        newest = self._tables.newest[inputs.sources.clamp(min=0)]
        token_ids = torch.where(inputs.sources >= 0, newest, inputs.token_ids)
        out = None if room is None else room.x
        x = torch.index_select(self._decoder.embed, 0, token_ids, out=out)
        return self._into(0, x, None, states, room)

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
        attended = torch.empty_like(q) if out is None else out.view(q.shape)
        if attention.plan.num_passes:
            paged_attention.paged_attention(
                q,
                pages,
                attention.block_table,
                inputs.seq_lens,
                inputs.query_start_loc,
                plan=attention.plan,
                schedule=attention.schedule,
                gathered=attention.gathered,
                scale=self._architecture.head_dim**-0.5,
                out=attended,
                workspace=attention.workspace,
            )
        return attended.view(len(attended), -1)

    def between(
        self,
        index: int,
        x: Tensor,
        attended: Tensor,
        states: Mapping[int, Tensor] = NO_STATES,
        room: StepRoom | None = None,
    ) -> Flow:
        """From the attention of layer `index` to that of the next one."""
        delta = self._rest(self._decoder.layers[index], x, attended)
        return self._into(index + 1, x, delta, states, room)

    def last(
        self,
        wanted: Wanted,
        x: Tensor,
        attended: Tensor,
        states: Mapping[int, Tensor] = NO_STATES,
        room: StepRoom | None = None,
        end_layers: Callable[[], None] | None = None,
    ) -> Answer | None:
        """From the last attention to what comes out; None if nothing is wanted. `end_layers` is
        called behind the last layer, unless that ends with its attention."""
        decoder, all_rows = self._decoder, self.num_layers in states
        if not all_rows and len(wanted.rows) == 0:  # KV is written: nothing else is wanted
            return None
        if not all_rows:
            x, attended = x[wanted.last_tokens], attended[wanted.last_tokens]
        delta = self._rest(decoder.layers[-1], x, attended)
        if end_layers is not None:
            end_layers()
        normed = self._normed(x, delta, decoder.norm)
        if all_rows:
            states[self.num_layers].copy_(normed)
            normed = normed[wanted.last_tokens]
        if len(wanted.rows) == 0:
            return None
        logits = _linear(normed, decoder.head, out=None if room is None else room.logits)
        sampled = (
            torch.empty(2 * len(logits), dtype=torch.int32, device=x.device)
            if room is None
            else room.sampled
        ).view(2, len(logits))
        greedy.greedy(logits, wanted.rows, self._tables.newest, out=sampled)
        return Answer(logits, sampled)

    def _into(
        self,
        index: int,
        x: Tensor,
        delta: Tensor | None,
        states: Mapping[int, Tensor],
        room: StepRoom | None,
    ) -> Flow:
        """Norm and projections of layer `index`."""
        layer = self._decoder.layers[index]
        normed = self._normed(x, delta, layer.attn_norm)
        if index in states:
            states[index].copy_(x)
        out = None if room is None else room.qkv
        return Flow(x, _linear(normed, layer.qkv, layer.qkv_bias, out=out))

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


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """`x` [T, in] times `weight` [out, in] transposed, plus `bias`: by whichever is faster for the
    shape, our own kernel for few rows or the matrix library."""
    num_outputs, num_inputs = weight.shape
    if matvec.prefers_matvec(num_outputs, num_inputs, len(x), x.dtype):
        out = x.new_empty(len(x), num_outputs) if out is None else out
        return matvec.matvec(x, weight, bias, out=out)
    if out is None:
        return functional.linear(x, weight, bias)
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)
