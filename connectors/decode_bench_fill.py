"""Fills KV pages with invented numbers, on a GPU without waiting for it. Device thread."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from interlace.layers.device_copies import to_device


class BlockFiller:
    """Fills whole blocks in all layers, with a constant or with normally distributed numbers.

    A block's numbers follow from the seed, the layer and the block's id. They are drawn for the KV
    heads of all workers, of which each takes its own.
    """

    def __init__(
        self,
        layers: Sequence[torch.Tensor],
        *,
        mean: float,
        std: float,
        seed: int,
        rank: int,
        num_ranks: int,
    ) -> None:
        """`layers`: pages [num_blocks, 2, block_size, num_kv_heads, head_dim] of this worker, in
        order of depth, with any strides. `std` 0 means the constant `mean`."""
        self._layers = list(layers)
        self._mean, self._std, self._seed = mean, std, seed
        self._rank, self._num_ranks = rank, num_ranks

    def fill(self, block_ids: Sequence[int]) -> None:
        """Fill these blocks."""
        for index, pages in enumerate(self._layers):
            ids = to_device(block_ids, torch.int64, pages.device)
            if self._std == 0:
                pages.index_fill_(0, ids, self._mean)
            else:
                blocks = np.stack([self._draw(index, i, pages) for i in block_ids])
                drawn = to_device(blocks, torch.float32, pages.device)
                pages.index_copy_(0, ids, drawn.to(pages.dtype))

    def _draw(self, layer: int, block_id: int, pages: torch.Tensor) -> np.ndarray:
        """This worker's part of one block of one layer, float32."""
        key = np.array([self._seed, (layer << 32) | block_id], dtype=np.uint64)
        source = np.random.Generator(np.random.Philox(key=key))
        kv, block_size, num_heads, head_dim = pages.shape[1:]
        shape = (kv, block_size, num_heads * self._num_ranks, head_dim)
        numbers = source.standard_normal(shape, dtype=np.float32)
        first = self._rank * num_heads
        own = numbers[:, :, first : first + num_heads]
        return own * np.float32(self._std) + np.float32(self._mean)
