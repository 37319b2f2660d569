"""The engine's KV pages as bits: what a block holds, what was painted on it, what was written.

Blocks that the pool hands out are painted, with a NaN that has the number of that event: no other
block has it, nor this one at another time. So a slot that nobody wrote shows, and so does one that
was read after its block was handed on. They are painted in the step for which they were handed out,
when its `handle_preemptions` has ended what still reads them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from interlace.connectors.conformance.layer_pages import LayerPages
from interlace.connectors.conformance.number_format import Bits, Floats, format_of
from interlace.engine.block_pool import BlockPool, KVCacheBlock


class Content(enum.Enum):
    """What lies where a token's KV should be."""

    RIGHT = enum.auto()
    UNTOUCHED = enum.auto()
    """The paint of when the block was handed out."""
    PAINTED = enum.auto()
    """The paint of another block, or of another time: it was copied from there."""
    WRONG = enum.auto()


class Pages:
    """Pages of all workers, on a CPU or a GPU. All layers have numbers of one format."""

    def __init__(
        self, by_rank: Sequence[Mapping[str, torch.Tensor]], numbers: Iterator[int]
    ) -> None:
        """`by_rank`: layer name -> pages, blocks first. `numbers`, from 1 on, are used for paint,
        each once."""
        self.layers: list[dict[str, LayerPages]] = [
            {name: LayerPages(pages) for name, pages in layers.items()} for layers in by_rank
        ]
        self.number_format = format_of(next(iter(by_rank[0].values())).dtype)
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
        return [name for name, layer in self.layers[0].items() if len(layer.shape) == 5]

    def follow(self, pool: BlockPool) -> None:
        """From now on note each block that `pool` hands out."""
        get_new_blocks = pool.get_new_blocks

        def noting(num_blocks: int) -> list[KVCacheBlock]:
            blocks = get_new_blocks(num_blocks)
            for block in blocks:
                self.generation[block.block_id] = self.number_format.wrapped(next(self._numbers))
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
                for layer in layers.values():
                    layer.fill(block_id, self._paint_of(block_id))

    def _paint_of(self, block_id: int) -> int:
        return self.number_format.paint(self.generation_of(block_id))

    def _slots(self, rank: int, layer: str, block_id: int, tokens: slice) -> Bits:
        """K and V of these slots: [2, tokens, heads, dim]."""
        return self.layers[rank][layer].block(block_id)[:, tokens]

    def look(self, rank: int, layer: str, block_id: int, tokens: slice, right: Floats) -> Content:
        """What the block's slots `tokens` hold; `right`: float64 [tokens, 2, heads, dim]."""
        found = self._slots(rank, layer, block_id, tokens)
        if self.number_format.are_equal(found.swapaxes(0, 1), right):
            return Content.RIGHT
        if (found == self._paint_of(block_id)).any():
            return Content.UNTOUCHED
        is_painted = self.number_format.is_paint(found).any()
        return Content.PAINTED if is_painted else Content.WRONG

    def painted_generations(self, rank: int, layer: str, block_id: int, tokens: slice) -> set[int]:
        """The numbers of all paint in these slots."""
        return self.number_format.numbers_of(self._slots(rank, layer, block_id, tokens))

    def is_untouched(self, rank: int, layer: str, block_id: int, tokens: slice) -> bool:
        """Whether any number of these slots is as it was when the block was handed out."""
        found = self._slots(rank, layer, block_id, tokens)
        return bool((found == self._paint_of(block_id)).any())

    def nudge(self, block_ids: Iterable[int]) -> None:
        """Change each number but paint by its last bit: who writes the same again is seen to
        write."""
        for layers in self.layers:
            for layer in layers.values():
                for block_id in block_ids:
                    bits = layer.block(block_id)
                    layer.put(block_id, bits ^ ~self.number_format.is_paint(bits))
