"""The KV cache on the device: pages of every layer, in one of several layouts.

In each layout a layer's pages have the shape `[block][K,V][token][kv head][head size]`; their
strides say how they lie (`layers/attention_backend.py`).

Block 0 is the null block; its pages are zero and stay so. Slots that hold no token are never
attended to, but a kernel of the CPU may read them: so a block that a load fills only in part is
zeroed before, and a masked slot holds a number. Device thread. On a GPU all is
queued, and nothing waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch

from interlace.engine.kv_connector import KVCacheConfig
from interlace.engine.scheduler_output import BlockCopy
from interlace.layers.attention_backend import KVCacheLayout, attention_backend
from interlace.layers.device_copies import to_device
from interlace.layers.kv_memory import (
    CACHE_ONLY_LAYER,
    PageShape,
    cross_layers_memory,
    layer_name,
    per_layer_memory,
    zeroed,
)

K, V = 0, 1


class KVPages:
    """Pages of every layer, and what moves KV in and out of them, whatever their layout.

    `layers[i]` has shape [num_blocks, 2, block_size, num_kv_heads, head_dim]. It is contiguous with
    the layout NHD and one tensor a layer, and else a view. With `cross_layers` all are views on
    `cross_layers_tensor`, contiguous: [num_blocks, num_layers, 2, block_size, num_kv_heads,
    head_dim] or, with HND, the last three as num_kv_heads, block_size, head_dim.

    `cache_only`, if asked for, keeps vectors that no attention reads: [num_blocks, block_size,
    vectors per token, vector size], contiguous, in memory of its own.
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
        shape = PageShape(num_layers, block_size, num_kv_heads, head_dim, dtype, cache_only)
        self.page_shape = shape
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.attention_backend = attention_backend(layout)
        allocate = cross_layers_memory if cross_layers else per_layer_memory
        # Whole blocks are copied and zeroed in `_memories`: contiguous, blocks first.
        self._memories, self.layers = allocate(shape, num_blocks, self.attention_backend, device)
        self.cross_layers_tensor = self._memories[0] if cross_layers else None
        self._index_layers()
        self.cache_only: torch.Tensor | None = None
        if cache_only is not None:
            self.cache_only = zeroed((num_blocks, block_size, *cache_only), dtype, device)
            self._memories.append(self.cache_only)

    @classmethod
    def of(
        cls,
        shape: PageShape,
        *,
        num_blocks: int,
        device: torch.device,
        layout: KVCacheLayout = "NHD",
        cross_layers: bool = False,
    ) -> Self:
        """Pages of that shape. Raises as the constructor does."""
        return cls(
            num_layers=shape.num_layers,
            num_blocks=num_blocks,
            block_size=shape.block_size,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
            device=device,
            layout=layout,
            cross_layers=cross_layers,
            cache_only=shape.cache_only,
        )

    def _index_layers(self) -> None:
        """Views and numbers by which `write` and `gather` address the layers.

        For writing, a layer's memory counts as rows. A row is a token's K or V of all heads where
        these lie together, else of one head; either way a block's next token is the next row. Row 0
        is where the layer's pages begin, so a row has the same number in every layer.
        """
        heads = self.num_kv_heads
        block, half, token, head, _ = self.layers[0].stride()
        together = token == heads * self.head_dim
        width = token if together else self.head_dim
        self._rows = [_memory_from(pages).view(-1, width) for pages in self.layers]
        self._row_width = width
        self._rows_per_block, self._rows_per_half = block // width, half // width
        device = self.layers[0].device
        head_rows = torch.arange(heads, device=device) * (head // width)
        self._head_rows = None if together else head_rows
        self._halves = [pages.unbind(1) for pages in self.layers]

    def release(self) -> None:
        """Let go of all memory; nothing else may be called afterwards. What others hold stays."""
        self.layers.clear()
        self._memories.clear()
        self._rows.clear()
        self._halves.clear()
        self.cross_layers_tensor = self.cache_only = None

    def by_name(self) -> dict[str, torch.Tensor]:
        """Layer name -> its pages, in order of depth; the cache-only layer comes last."""
        named = {layer_name(i): pages for i, pages in enumerate(self.layers)}
        if self.cache_only is not None:
            named[CACHE_ONLY_LAYER] = self.cache_only
        return named

    def describe(self) -> KVCacheConfig:
        """See `PageShape.describe`."""
        return self.page_shape.describe(self.num_blocks)

    def kv_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Row numbers for `write`: of the K of `slots` [T], then of their V.

        A slot is `block_id * block_size + offset`. One row a token, or one for each of its heads.
        """
        block, offset = slots // self.block_size, slots % self.block_size
        k_rows = block * self._rows_per_block + offset
        if self._head_rows is not None:
            k_rows = (k_rows[:, None] + self._head_rows).flatten()
        return torch.cat((k_rows, k_rows + self._rows_per_half))

    def write(self, layer: int, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put `k` and `v`, each [T, num_kv_heads, head_dim], into `rows` from `kv_rows`."""
        width = self._row_width
        kv = torch.cat((k.reshape(-1, width), v.reshape(-1, width)))
        self._rows[layer].index_copy_(0, rows, kv)

    def write_cache_only(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        """Put `values` [T, vectors, vector size] into `slots` [T] of the cache-only layer."""
        assert self.cache_only is not None, "asked for when the pages were made"
        self.cache_only.flatten(0, 1).index_copy_(0, slots, values)

    def gather(
        self, layer: int, half: int, block_ids: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Copy whole blocks' K (or V: `half`) to `out`, in token order whatever the layout.

        `block_ids` is int64 [N]; `out` is contiguous [N, block_size, num_kv_heads, head_dim].
        """
        return torch.index_select(self._halves[layer][half], 0, block_ids, out=out)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks in every layer; no block is both a source and a target."""
        if not copies:
            return
        ids = to_device(np.array(copies), torch.int64, self._memories[0].device)
        for memory in self._memories:
            memory.index_copy_(0, ids[:, 1], memory.index_select(0, ids[:, 0]))

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Zero these blocks in every layer."""
        ids = to_device(block_ids, torch.int64, self._memories[0].device)
        for memory in self._memories:
            memory.index_fill_(0, ids, 0)


def _memory_from(pages: torch.Tensor) -> torch.Tensor:
    """The numbers from where `pages` begin to the end of the memory that they lie in, [N]."""
    begin = pages.storage_offset()
    total = pages.untyped_storage().nbytes() // pages.itemsize
    return pages.as_strided((total - begin,), (1,))
