"""The KV cache on the device: pages `[block][K,V][token][kv head][head size]`, one tensor a layer.

Block 0 is the null block; its pages are zero and stay so. Slots that hold no token are never
attended to, but a kernel may read them, so a block is zeroed where its filling begins: a masked
slot then holds a number, whatever the block's last owner left there. Device thread.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch

from interlace.engine.kv_connector import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from interlace.engine.scheduler_output import BlockCopy

K, V = 0, 1


def layer_name(index: int) -> str:
    """The name by which KV connectors know layer `index`, counted from 0 (vLLM's)."""
    return f"model.layers.{index}.self_attn.attn"


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A zeroed tensor; on a CPU it takes memory only where it is written to."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    except OSError as error:
        raise MemoryError(f"{math.prod(shape) * dtype.itemsize} bytes: {error}") from error
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class KVPages:
    """Pages of every layer.

    `layers[i]` has shape [num_blocks, 2, block_size, num_kv_heads, head_dim] and is contiguous.
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
    ) -> None:
        """Raises: `MemoryError` if the machine will not promise that much memory."""
        shape = (num_blocks, 2, block_size, num_kv_heads, head_dim)
        self.layers = [_zeros(shape, dtype, device) for _ in range(num_layers)]
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        # One row per (block, K or V, token): a view on the same memory.
        self._rows = [pages.view(num_blocks * 2 * block_size, -1) for pages in self.layers]
        # One row per (block, K or V).
        self._halves = [pages.view(num_blocks * 2, -1) for pages in self.layers]

    def by_name(self) -> dict[str, torch.Tensor]:
        """Layer name -> its pages, in order of depth."""
        return {layer_name(i): pages for i, pages in enumerate(self.layers)}

    def describe(self) -> KVCacheConfig:
        """How the pages lie, for a KV connector."""
        pages = self.layers[0]
        spec = FullAttentionSpec(
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_dim,
            dtype=pages.dtype,
            page_size_bytes=pages[0].nbytes,
        )
        return KVCacheConfig(self.num_blocks, (KVCacheGroupSpec(tuple(self.by_name()), spec),))

    @staticmethod
    def block_bytes(
        *, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, itemsize: int
    ) -> int:
        """Bytes of one block over all layers."""
        return num_layers * 2 * block_size * num_kv_heads * head_dim * itemsize

    def kv_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Row numbers for `write`: of the K rows, then the V rows, of `slots` [T].

        A slot is `block_id * block_size + offset`.
        """
        block, offset = slots // self.block_size, slots % self.block_size
        k_rows = block * 2 * self.block_size + offset
        return torch.cat((k_rows, k_rows + self.block_size))

    def write(self, layer: int, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put `k` and `v`, each [T, num_kv_heads, head_dim], into `rows` from `kv_rows`."""
        kv = torch.cat((k.reshape(len(k), -1), v.reshape(len(v), -1)))
        self._rows[layer].index_copy_(0, rows, kv)

    def gather(self, layer: int, halves: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Copy whole K or V blocks to `out` [len(halves), block_size * num_kv_heads * head_dim].

        `halves` is `block_id * 2 + K` or `block_id * 2 + V`, int64.
        """
        return torch.index_select(self._halves[layer], 0, halves, out=out)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks in every layer; no block is both a source and a target."""
        if not copies:
            return
        ids = torch.tensor(copies, device=self.layers[0].device)
        for pages in self.layers:
            pages.index_copy_(0, ids[:, 1], pages.index_select(0, ids[:, 0]))

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Zero these blocks in every layer."""
        ids = torch.tensor(block_ids, device=self.layers[0].device)
        for pages in self.layers:
            pages.index_fill_(0, ids, 0)
