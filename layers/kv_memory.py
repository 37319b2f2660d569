"""What KV pages are made of: the layers' names, the shape of a block, and the memory.

Memory is laid out as the attention backend says: one tensor a layer, or one over all layers.
"""

from __future__ import annotations

import dataclasses
import math
import mmap

import torch

from interlace.engine.kv_connector import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from interlace.layers.attention_backend import TritonAttentionBackend

CACHE_ONLY_LAYER = "cache_only_layers.0"
"""The name by which KV connectors know the layer that keeps vectors and attends to nothing."""


def layer_name(index: int) -> str:
    """The name by which KV connectors know layer `index`, counted from 0 (vLLM's)."""
    return f"model.layers.{index}.self_attn.attn"


def zeroed(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """A zeroed, contiguous tensor; on a CPU (None too) it takes memory only where it is written to.

    Raises: `MemoryError` if the machine will not promise that much, or the device lacks it.
    """
    if device is not None and device.type != "cpu":
        try:
            return torch.zeros(shape, dtype=dtype, device=device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error
    try:
        memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    except OSError as error:
        raise MemoryError(f"{math.prod(shape) * dtype.itemsize} bytes: {error}") from error
    return torch.frombuffer(memory, dtype=dtype).view(shape)


@dataclasses.dataclass(frozen=True, slots=True)
class PageShape:
    """What one block holds over all layers: known before any memory exists. Any thread."""

    num_layers: int
    block_size: int
    """Tokens per block."""
    num_kv_heads: int
    """Those of one worker."""
    head_dim: int
    dtype: torch.dtype
    cache_only: tuple[int, int] | None = None
    """Vectors per token and numbers per vector of the cache-only layer, if there is one."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of one attention layer, K and V together."""
        return 2 * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, the cache-only one included."""
        kept = self.block_size * math.prod(self.cache_only or (0,)) * self.dtype.itemsize
        return self.num_layers * self.page_bytes + kept

    def describe(self, num_blocks: int) -> KVCacheConfig:
        """How `num_blocks` blocks, the null block included, lie; for a KV connector.

        The cache-only layer is in no group: groups are about attention.
        """
        spec = FullAttentionSpec(
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_dim,
            dtype=self.dtype,
            page_size_bytes=self.page_bytes,
        )
        names = tuple(layer_name(i) for i in range(self.num_layers))
        return KVCacheConfig(num_blocks, (KVCacheGroupSpec(names, spec),))


Backend = type[TritonAttentionBackend]

Allocated = tuple[list[torch.Tensor], list[torch.Tensor]]
"""The tensors that own the memory, contiguous with blocks first; each layer's logical view."""


def per_layer_memory(
    shape: PageShape, num_blocks: int, backend: Backend, device: torch.device
) -> Allocated:
    """A tensor for each layer. Raises: `MemoryError`."""
    logical = _logical_shape(shape, num_blocks, backend)
    order = backend.get_kv_cache_stride_order()
    memories = [
        zeroed(_reordered(logical, order), shape.dtype, device) for _ in range(shape.num_layers)
    ]
    return memories, [memory.permute(_inverse(order)) for memory in memories]


def cross_layers_memory(
    shape: PageShape, num_blocks: int, backend: Backend, device: torch.device
) -> Allocated:
    """One tensor over all layers. Raises: `MemoryError`."""
    logical = (shape.num_layers, *_logical_shape(shape, num_blocks, backend))
    order = backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
    memory = zeroed(_reordered(logical, order), shape.dtype, device)
    return [memory], list(memory.permute(_inverse(order)))


def _logical_shape(shape: PageShape, num_blocks: int, backend: Backend) -> tuple[int, ...]:
    return backend.get_kv_cache_shape(
        num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim
    )


def _reordered(logical: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """The physical shape of a logical one."""
    return tuple(logical[i] for i in order)


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    """The permutation that makes a physical tensor logical again."""
    return tuple(order.index(i) for i in range(len(order)))
