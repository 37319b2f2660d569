"""Compares the blocks of a load with what is right, as they are at one moment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from interlace.connectors.conformance.load_ledger import Load
from interlace.connectors.conformance.oracle import KV, Oracle
from interlace.connectors.conformance.pages import Content, Pages
from interlace.connectors.conformance.watch import Watch


class Suspect(NamedTuple):
    """A block that was not right when it had to be."""

    layer: str
    content: Content
    painted: frozenset[int]
    """Numbers of the paint in it."""


class LoadExaminer:
    """Remembers nothing. `synthetic`: what is loaded is invented, and only has to be there."""

    def __init__(self, watch: Watch, pages: Pages, oracle: Oracle, *, synthetic: bool) -> None:
        self._watch = watch
        self._pages = pages
        self._oracle = oracle
        self._synthetic = synthetic

    def suspects(self, load: Load, rank: int, layer: str) -> Iterator[tuple[int, Suspect]]:
        """(block id, what it is like) of those whose layer is not right."""
        for block_id, slots, right in self._parts(load, rank, layer):
            if self._synthetic:
                is_bad = self._pages.is_untouched(rank, layer, block_id, slots)
                content = Content.UNTOUCHED if is_bad else Content.RIGHT
            else:
                content = self._pages.look(rank, layer, block_id, slots, right)
            self._watch.evidence["compared blocks"] += 1
            if content is not Content.RIGHT:
                painted = self._pages.painted_generations(rank, layer, block_id, slots)
                yield block_id, Suspect(layer, content, frozenset(painted))

    def is_of_another_rank(self, load: Load, block_id: int, layer: str, rank: int) -> bool:
        """Whether the block holds what belongs to another worker."""
        others = [other for other in range(len(self._pages.layers)) if other != rank]
        return any(
            self._pages.look(rank, layer, found, slots, right) is Content.RIGHT
            for other in others
            for found, slots, right in self._parts(load, other, layer)
            if found == block_id
        )

    def _parts(self, load: Load, rank: int, layer: str) -> Iterator[tuple[int, slice, KV]]:
        """(block id, its slots, what belongs there) of a load."""
        heads = self._pages.layers[rank][layer].shape[3]
        index = self._pages.attention_layers.index(layer)
        kv = self._oracle.kv(load.token_ids)[index][:, :, rank * heads : (rank + 1) * heads]
        size = self._pages.layers[rank][layer].shape[2]
        for block_id, begin, end in load.parts(size):
            slots = slice(begin % size, begin % size + end - begin)
            yield block_id, slots, kv[begin:end]
