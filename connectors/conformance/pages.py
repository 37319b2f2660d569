"""The engine's KV pages as bits: what a block holds, what was painted on it, what was written.

Blocks that the pool hands out are painted, with a NaN that tells when and where that was. So a slot
that nobody wrote shows, and so does one that was read after its block was handed on. That is in the
step for which they were handed out, when its `handle_preemptions` has ended what still reads them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from interlace.connectors.conformance.oracle import TOLERANCE
from interlace.engine.block_pool import BlockPool, KVCacheBlock

Bits = NDArray[np.int64]
_PAINTED = 0x7FF8_1000_0000_0000
_BLOCK_BITS = 12
_LOW_BITS = np.int64((1 << 44) - 1)


class Content(enum.Enum):
    """What lies where a token's KV should be."""

    RIGHT = enum.auto()
    UNTOUCHED = enum.auto()
    """The paint of when the block was handed out."""
    PAINTED = enum.auto()
    """The paint of another block, or of another time: it was copied from there."""
    WRONG = enum.auto()


class Pages:
    """Pages of all workers, seen as int64. All layers are float64."""

    def __init__(
        self, by_rank: Sequence[Mapping[str, torch.Tensor]], numbers: Iterator[int]
    ) -> None:
        """`by_rank`: layer name -> pages, blocks first. `numbers` are used for paint, each once."""
        self.layers: list[dict[str, Bits]] = [
            {name: pages.numpy().view(np.int64) for name, pages in layers.items()}
            for layers in by_rank
        ]
        self.generation: dict[int, int] = {}
        """Block id -> the number of its paint since it was handed out."""
        self._numbers = numbers
        self._handed_out: list[int] = []
        self._of_step: dict[int, list[int]] = {}

    def generation_of(self, block_id: int) -> int:
        """The number of the block's paint; 0 if it was never handed out."""
        return self.generation.get(block_id, 0)

    @property
    def attention_layers(self) -> list[str]:
        """Names of the layers that keep K and V, in order of depth."""
        return [name for name, bits in self.layers[0].items() if bits.ndim == 5]

    def follow(self, pool: BlockPool) -> None:
        """From now on note each block that `pool` hands out."""
        get_new_blocks = pool.get_new_blocks

        def noting(num_blocks: int) -> list[KVCacheBlock]:
            blocks = get_new_blocks(num_blocks)
            for block in blocks:
                self.generation[block.block_id] = next(self._numbers)
                self._handed_out.append(block.block_id)
            return blocks

        pool.get_new_blocks = noting  # type: ignore[method-assign]

    def planned(self, step_id: int) -> None:
        """A step was planned: what was handed out since the one before is for it."""
        self._of_step[step_id], self._handed_out = self._handed_out, []

    def paint(self, step_id: int) -> None:
        """Paint the blocks that were handed out for this step."""
        for block_id in self._of_step.pop(step_id, ()):
            for layers in self.layers:
                for bits in layers.values():
                    bits[block_id] = self._paint_of(block_id)

    def _paint_of(self, block_id: int) -> int:
        return _PAINTED | self.generation.get(block_id, 0) << _BLOCK_BITS | block_id

    def look(self, rank: int, layer: str, block_id: int, tokens: slice, right: Bits) -> Content:
        """What the block's slots `tokens` hold; `right`: float64 bits [tokens, 2, heads, dim]."""
        found = self.layers[rank][layer][block_id][:, tokens].swapaxes(0, 1)
        numbers = found.view(np.float64) if found.flags.c_contiguous else _as_floats(found)
        if np.allclose(numbers, _as_floats(right), rtol=TOLERANCE, atol=TOLERANCE):
            return Content.RIGHT
        if (found == self._paint_of(block_id)).any():
            return Content.UNTOUCHED
        return Content.PAINTED if _is_paint(found).any() else Content.WRONG

    def painted_generations(self, rank: int, layer: str, block_id: int, tokens: slice) -> set[int]:
        """The numbers of all paint in these slots."""
        found = self.layers[rank][layer][block_id][:, tokens]
        painted = found[_is_paint(found)]
        return set(((painted & _LOW_BITS) >> _BLOCK_BITS).tolist())

    def is_untouched(self, rank: int, layer: str, block_id: int, tokens: slice) -> bool:
        """Whether any number of these slots is as it was when the block was handed out."""
        found = self.layers[rank][layer][block_id][:, tokens]
        return bool((found == self._paint_of(block_id)).any())

    def nudge(self, block_ids: Iterable[int]) -> None:
        """Change each number by its last bit: who writes the same again is seen to write."""
        for layers in self.layers:
            for bits in layers.values():
                for block_id in block_ids:
                    bits[block_id] ^= 1


def _as_floats(bits: Bits) -> NDArray[np.float64]:
    return np.ascontiguousarray(bits).view(np.float64)


def _is_paint(bits: Bits) -> NDArray[np.bool_]:
    kind: NDArray[np.bool_] = (bits & ~_LOW_BITS) == _PAINTED
    return kind
