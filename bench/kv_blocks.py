"""Blocks of the engines that benchmarks of connectors open, and the KV that a model puts into them.

Imports no torch before it is asked for a shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from interlace.layers.checkpoint import LoadedModel
    from interlace.layers.kv_memory import PageShape

BLOCK_SIZE: Final = 16
"""Tokens."""


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // BLOCK_SIZE)


def page_shape(loaded: LoadedModel) -> PageShape:
    """What one block holds over all layers of the model."""
    from interlace.layers.kv_memory import PageShape

    a = loaded.architecture
    return PageShape(a.num_layers, BLOCK_SIZE, a.num_kv_heads, a.head_dim, loaded.decoder.dtype)


def token_bytes(loaded: LoadedModel) -> int:
    """KV of one token."""
    return page_shape(loaded).block_bytes // BLOCK_SIZE
