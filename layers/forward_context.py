"""What a KV connector sees of one forward: every layer's pages, and the step's attention metadata.

Names and fields are vLLM's, so that connectors written for it find what they look for. Device
thread; an instance belongs to one step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from interlace.layers.attention import SequenceChunk
from interlace.layers.graph_mode import GraphMode


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One attention layer as connectors know it."""

    layer_name: str
    """`model.layers.{i}.self_attn.attn`."""
    kv_cache: torch.Tensor
    """Its pages: [num_blocks, 2, block_size, num_kv_heads, head_dim]."""


@dataclasses.dataclass(frozen=True, slots=True)
class CacheOnlyAttentionLayer:
    """The layer that keeps vectors and attends to nothing, as connectors know it."""

    layer_name: str
    """`cache_only_layers.0`."""
    kv_cache: torch.Tensor
    """Its pages: [num_blocks, block_size, vectors per token, vector size]."""


@dataclasses.dataclass(frozen=True, slots=True)
class TritonAttentionMetadata:
    """Where the step's tokens lie (vLLM's fields of that name). T tokens of B requests.

    On a GPU some are views on memory that the next step overwrites, behind this one on the compute
    stream: who reads them on another stream makes that one wait, or copies them first.
    """

    num_actual_tokens: int
    """T."""
    max_query_len: int
    query_start_loc: torch.Tensor
    """int32 [B + 1]: where each request's tokens begin in the batch."""
    max_seq_len: int
    seq_lens: torch.Tensor
    """int32 [B]: tokens of each request when the step ends."""
    block_table: torch.Tensor
    """int32 [B, most blocks of any]: padded with the null block, 0."""
    slot_mapping: torch.Tensor
    """int64 [T]: `block_id * block_size + offset` of each token."""

    @classmethod
    def of(
        cls, chunks: Sequence[SequenceChunk], slots: torch.Tensor, block_size: int
    ) -> TritonAttentionMetadata:
        """Of a step's chunks, in batch order, whose tokens go to `slots`."""
        counts = [chunk.end - chunk.start for chunk in chunks]
        ends = [chunk.end for chunk in chunks]
        table = np.zeros((len(chunks), -(-max(ends) // block_size)), dtype=np.int32)
        for row, chunk in zip(table, chunks, strict=True):
            used = chunk.block_ids[: -(-chunk.end // block_size)]
            row[: len(used)] = used
        return cls(
            num_actual_tokens=sum(counts),
            max_query_len=max(counts),
            query_start_loc=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
            max_seq_len=max(ends),
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            block_table=torch.from_numpy(table),
            slot_mapping=slots,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class CacheOnlyAttentionMetadata:
    """The same of the cache-only layer; its own type tells that its pages hold no K and V."""

    num_actual_tokens: int
    """T."""
    query_start_loc: torch.Tensor
    """As in `TritonAttentionMetadata`, and so are the others."""
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor

    @classmethod
    def of(cls, step: TritonAttentionMetadata) -> CacheOnlyAttentionMetadata:
        """Of the same step; tensors are shared."""
        return cls(
            num_actual_tokens=step.num_actual_tokens,
            query_start_loc=step.query_start_loc,
            seq_lens=step.seq_lens,
            block_table=step.block_table,
            slot_mapping=step.slot_mapping,
        )


class ForwardContext:
    """The first argument of `start_load_kv`."""

    def __init__(
        self,
        layers: Mapping[str, AttentionLayer | CacheOnlyAttentionLayer],
        make_metadata: Callable[[], TritonAttentionMetadata] | None,
        cudagraph_runtime_mode: GraphMode = GraphMode.NONE,
    ) -> None:
        """`make_metadata` is None in a step without tokens."""
        self.cudagraph_runtime_mode = cudagraph_runtime_mode
        """How this step runs: NONE, PIECEWISE, or FULL, in which no layer hook is called."""
        self.no_compile_layers = layers
        """Layer name -> layer, in order of depth; the cache-only layer, if there is one, last."""
        self._make_metadata = make_metadata

    @functools.cached_property
    def attn_metadata(
        self,
    ) -> Mapping[str, TritonAttentionMetadata | CacheOnlyAttentionMetadata] | None:
        """Layer name -> the step's metadata; None in a step without tokens.

        Made when somebody asks: most connectors do not in most steps.
        """
        if self._make_metadata is None:
            return None
        attention = self._make_metadata()
        return {
            name: attention
            if isinstance(layer, AttentionLayer)
            else CacheOnlyAttentionMetadata.of(attention)
            for name, layer in self.no_compile_layers.items()
        }
