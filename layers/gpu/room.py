"""Where captured steps put what outlives a graph: memory that all graphs of a runner share.

No two steps compute at once, so one set of buffers, as large as the largest captured step, will do.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from interlace.layers.decoder import Decoder
from interlace.layers.gpu.inputs import StepSize


@dataclasses.dataclass(frozen=True, slots=True)
class StepRoom:
    """Of one step: T tokens, N requests whose next token is wanted."""

    x: Tensor
    """The residual stream, [T, hidden]."""
    qkv: Tensor
    """What goes into an attention, [T, (heads + 2 * kv_heads) * head_dim]."""
    attended: Tensor
    """What comes out of it, [T, heads * head_dim]. Always finite where nothing was computed yet."""
    logits: Tensor
    """[N, vocabulary]."""
    sampled: Tensor
    """int32 [2 * N]: what `greedy` gives."""

    @classmethod
    def allocate(cls, decoder: Decoder, num_tokens: int, num_requests: int) -> StepRoom:
        """For up to so many tokens and requests."""
        a = decoder.architecture

        def zeros(rows: int, width: int) -> Tensor:
            return torch.zeros((rows, width), dtype=decoder.dtype, device=decoder.device)

        return cls(
            x=zeros(num_tokens, a.hidden_size),
            qkv=zeros(num_tokens, (a.num_heads + 2 * a.num_kv_heads) * a.head_dim),
            attended=zeros(num_tokens, a.num_heads * a.head_dim),
            logits=zeros(num_requests, len(decoder.head)),
            sampled=torch.zeros(2 * num_requests, dtype=torch.int32, device=decoder.device),
        )

    def part(self, size: StepSize) -> StepRoom:
        """What a step of this size uses of it."""
        tokens, requests = size
        return StepRoom(
            self.x[:tokens],
            self.qkv[:tokens],
            self.attended[:tokens],
            self.logits[:requests],
            self.sampled[: 2 * requests],
        )
