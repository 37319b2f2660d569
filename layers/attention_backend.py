"""How KV pages lie in memory: the one truth about it, in the words that KV connectors know.

Everybody sees a layer's pages in the logical shape [block][K,V][token][kv head][head size]; the
stride order says in which order these dimensions lie. NHD: as they stand. HND: heads before tokens.
"""

from __future__ import annotations

from typing import Literal

from interlace.engine.errors import ConfigError

KVCacheLayout = Literal["NHD", "HND"]
"""N a token, H a KV head, D its numbers: the order in memory within a block's K or V."""


class TritonAttentionBackend:
    """Pages in the layout NHD (vLLM's class of that name, and the methods connectors ask)."""

    @staticmethod
    def get_name() -> str:
        """The backend's name among vLLM's."""
        return "TRITON_ATTN"

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """The logical shape of one layer's pages, whatever the layout."""
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """`physical_shape[i] = logical_shape[order[i]]`.

        With `include_num_layers_dimension` the logical shape begins with the number of layers, and
        memory with the blocks: a block's KV of all layers is one contiguous record.
        """
        return (1, 0, 2, 3, 4, 5) if include_num_layers_dimension else (0, 1, 2, 3, 4)


class TritonAttentionBackendHND(TritonAttentionBackend):
    """The same in the layout HND: a head's tokens of one block lie together."""

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """As for NHD, with heads before tokens."""
        return (1, 0, 2, 4, 3, 5) if include_num_layers_dimension else (0, 1, 3, 2, 4)


def attention_backend(layout: str) -> type[TritonAttentionBackend]:
    """The backend of a layout by its name. Raises: `ConfigError` for an unknown one."""
    match layout:
        case "NHD":
            return TritonAttentionBackend
        case "HND":
            return TritonAttentionBackendHND
        case _:
            raise ConfigError(f"KV layout {layout!r} is unknown; use 'NHD' or 'HND'.")
