"""The KV cache on the device: pages of every layer, in one of several layouts.

In each layout a layer's pages have the shape `[block][K,V][token][kv head][head size]`; their strides
say how they lie (`layers/attention_backend.py`). One tensor a layer, or one over all layers.

Block 0 is the null block; its pages are zero and stay so. Slots that hold no token are never
attended to, but a kernel may read them, so a block is zeroed where its filling begins: a masked
slot then holds a number, whatever the block's last owner left there. Device thread.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
from collections.abc import Sequence

import torch

from interlace.engine.kv_connector import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from interlace.engine.scheduler_output import BlockCopy
from interlace.layers.attention_backend import KVCacheLayout, attention_backend

K, V = 0, 1

CACHE_ONLY_LAYER = "cache_only_layers.0"
"""The name by which KV connectors know the layer that keeps vectors and attends to nothing."""


def layer_name(index: int) -> str:
    """The name by which KV connectors know layer `index`, counted from 0 (vLLM's)."""
    return f"model.layers.{index}.self_attn.attn"


def zeroed(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """A zeroed, contiguous tensor; on a CPU (None too) it takes memory only where it is written to.

    Raises: `MemoryError` if the machine will not promise that much.
    """
    if device is not None and device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
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


class KVPages:
    """Pages of every layer, and what moves KV in and out of them in whatever layout they have.

    `layers[i]` has shape [num_blocks, 2, block_size, num_kv_heads, head_dim]. It is contiguous with
    the layout NHD and a tensor per layer, and else a view. With `cross_layers` all of them are views
    on `cross_layers_tensor`, which is contiguous in the order [num_blocks, num_layers, 2, ...].

    `cache_only`, if asked for, has shape [num_blocks, block_size, vectors, vector size], contiguous
    and by itself: vectors per token that no attention reads.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        layout: KVCacheLayout = "NHD",
        cross_layers: bool = False,
        cache_only: tuple[int, int] | None = None,
    ) -> None:
        """Raises: `MemoryError` if the machine will not promise that much memory.

        `ConfigError` for an unknown layout.
        """
        self.shape = PageShape(num_layers, block_size, num_kv_heads, head_dim, dtype, cache_only)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.attention_backend = attention_backend(layout)
        logical = self.attention_backend.get_kv_cache_shape(
            num_blocks, block_size, num_kv_heads, head_dim
        )
        self.cross_layers_tensor: torch.Tensor | None = None
        self.cache_only: torch.Tensor | None = None
        # Contiguous, with the block dimension first: what copying and zeroing go through.
        self._memories: list[torch.Tensor]
        if cross_layers:
            order = self.attention_backend.get_kv_cache_stride_order(
                include_num_layers_dimension=True
            )
            memory = zeroed(_picked((num_layers, *logical), order), dtype, device)
            self.cross_layers_tensor = memory
            self._memories = [memory]
            self.layers = list(memory.permute(_inverse(order)))
        else:
            order = self.attention_backend.get_kv_cache_stride_order()
            shape = _picked(logical, order)
            self._memories = [zeroed(shape, dtype, device) for _ in range(num_layers)]
            self.layers = [memory.permute(_inverse(order)) for memory in self._memories]
        self._index_layers()
        if cache_only is not None:
            self.cache_only = zeroed((num_blocks, block_size, *cache_only), dtype, device)
            self._memories.append(self.cache_only)
