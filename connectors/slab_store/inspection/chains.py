"""`ls`: chains of blocks, from those without a parent on. Pure.

Blocks are rows of arrays, some 0.2 kB each for a moment: a store may hold millions.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from interlace.connectors.slab_store.inspection.reports import Listing, Prefix
from interlace.connectors.slab_store.inspection.survey import (
    SlabContents,
    Survey,
    by_folder,
    model_names,
)
from interlace.connectors.slab_store.layout import HASH_BYTES, NO_PARENT

_TEXT = f"S{HASH_BYTES}"
"""Hashes that numpy sorts and finds quickly. It takes zeros at their end for none: these are equal
all the same, but what leaves an array as bytes has to be as long as it was."""

Indices = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]
Times = npt.NDArray[np.uint64]


def list_prefixes(found: Survey, most: int | None = None) -> Listing:
    """Follow chains from blocks without a parent; `most`: how many are listed. Pure."""
    prefixes: list[Prefix] = []
    num_prefixes = num_lost = 0
    for folder, slabs in by_folder(found.slabs).items():
        chains = Chains(slabs)
        num_prefixes += len(chains.first)
        num_lost += chains.num_lost
        prefixes += _prefixes(slabs, chains, found.hits.get(folder, {}), most)
        prefixes.sort(key=lambda prefix: (-prefix.used_ns, prefix.first_hash))
        prefixes = prefixes[:most]
    return Listing(prefixes=tuple(prefixes), num_prefixes=num_prefixes, num_lost_blocks=num_lost)


class Chains:
    """The blocks of one space, in the order of their hashes. Pure."""

    def __init__(self, slabs: Sequence[SlabContents]) -> None:
        """`slabs` are of one space. A block that is there twice counts once."""
        hashes, rows = np.unique(
            np.concatenate([slab.blocks["block_hash"] for slab in slabs]).view(_TEXT),
            return_inverse=True,
        )
        self._hashes = hashes
        self._rows: list[Indices] = np.split(rows, np.cumsum([len(one.blocks) for one in slabs]))
        """Of each slab's records, in turn: which block it holds."""
        self.num_blocks = len(hashes)
        """That are stored, found or not."""
        parents, is_first = self._find_parents(slabs)
        self.first: Indices = np.flatnonzero(is_first)
        """Blocks without a parent."""
        self.roots, self.places = _follow(parents, is_first)
        """Of each block: the one that its chain begins with, `num_blocks` if that is gone; and its
        place in the chain, from 1 on."""
        self.has_next = np.zeros(self.num_blocks + 1, np.bool_)
        self.has_next[parents[~is_first]] = True

    def _find_parents(self, slabs: Sequence[SlabContents]) -> tuple[Indices, Flags]:
        """(of each block its parent, itself if it is a first one, `num_blocks` if the parent is
        gone; whether it is a first one)."""
        parents = np.full(self.num_blocks, self.num_blocks, np.intp)
        is_first = np.zeros(self.num_blocks, np.bool_)
        for slab, rows in self._with_rows(slabs):
            wanted = slab.blocks["parent_hash"].view(_TEXT)
            at = np.searchsorted(self._hashes, wanted)
            at[at == self.num_blocks] = 0
            parents[rows] = np.where(self._hashes[at] == wanted, at, self.num_blocks)
            is_first[rows] = wanted == NO_PARENT
        parents[is_first] = np.flatnonzero(is_first)
        return parents, is_first

    def _with_rows(self, slabs: Sequence[SlabContents]) -> Iterator[tuple[SlabContents, Indices]]:
        """Slabs that hold something, and the blocks of their records."""
        return ((one, rows) for one, rows in zip(slabs, self._rows, strict=False) if len(rows))

    @property
    def num_lost(self) -> int:
        """Blocks whose chain's beginning is gone."""
        return int(np.count_nonzero(self.roots == self.num_blocks))

    def hash_of(self, block: int) -> bytes:
        """Of that block."""
        return bytes(self._hashes[block]).ljust(HASH_BYTES, b"\0")

    def times(self, slabs: Sequence[SlabContents]) -> tuple[Times, Times]:
        """Of each block: when it was saved first, and when a slab that holds it was used last;
        since the epoch, in nanoseconds. `slabs` are those of the beginning."""
        saved_ns = np.full(self.num_blocks, np.iinfo(np.uint64).max, np.uint64)
        used_ns = np.zeros(self.num_blocks, np.uint64)
        for slab, rows in self._with_rows(slabs):
            np.minimum.at(saved_ns, rows, slab.blocks["saved_ns"])
            np.maximum.at(used_ns, rows, np.uint64(max(0, slab.file.used_ns)))
        return saved_ns, used_ns

    def num_held(self, first: Iterable[int]) -> list[int]:
        """Of each slab in turn: how many of its records are of chains that begin with these."""
        is_meant = np.zeros(self.num_blocks + 1, np.bool_)
        is_meant[list(first)] = True
        is_in = is_meant[self.roots]
        return [int(np.count_nonzero(is_in[rows])) for rows in self._rows[:-1]]


def _follow(parents: Indices, is_first: Flags) -> tuple[Indices, Indices]:
    """(where each block's chain begins, its place in it), as `Chains` has them.

    Steps double: a block knows its 2^n-th ancestor. Those that go round in circles never arrive.
    """
    num_blocks = len(parents)
    up = np.append(parents, num_blocks)
    steps = np.append(np.where(is_first, 0, 1), 0)
    for _ in range(num_blocks.bit_length() + 1):
        further = up[up]
        if np.array_equal(further, up):
            break
        steps += steps[up]
        up = further
    arrives = np.append(is_first, np.False_)[up]
    roots = np.where(arrives, up, num_blocks)[:-1]
    return roots, steps[:-1] + 1


def _prefixes(
    slabs: Sequence[SlabContents], chains: Chains, hits: Mapping[bytes, int], most: int | None
) -> Iterator[Prefix]:
    """The most recently used ones of a space, in any order."""
    first_tokens: dict[bytes, tuple[int, ...]] = {}
    for slab in slabs:
        first_tokens.update(slab.first_tokens)
    size, roots = chains.num_blocks + 1, chains.roots
    space, names = slabs[0].space, model_names(slabs)
    identity = space.identity
    saved_ns, used_ns = chains.times(slabs)
    first_saved_ns = np.full(size, np.iinfo(np.uint64).max, np.uint64)
    np.minimum.at(first_saved_ns, roots, saved_ns)
    last_used_ns = np.zeros(size, np.uint64)
    np.maximum.at(last_used_ns, roots, used_ns)
    longest = np.zeros(size, np.intp)
    np.maximum.at(longest, roots, chains.places)
    num_blocks = np.bincount(roots, minlength=size)
    num_leaves = np.bincount(roots[~chains.has_next[:-1]], minlength=size)
    # Blocks are in the order of their hashes: so are those that were used at the same time.
    listed = heapq.nsmallest(
        len(chains.first) if most is None else most,
        chains.first.tolist(),
        key=lambda first: (-int(last_used_ns[first]), first),
    )
    for first in listed:
        first_hash = chains.hash_of(first)
        yield Prefix(
            first_hash=first_hash.hex(),
            model_names=names,
            model=identity.model,
            dtype=identity.dtype,
            block_size=identity.block_size,
            group=identity.group,
            rank=identity.rank,
            world_size=identity.world_size,
            num_tokens=int(longest[first]) * identity.block_size,
            num_leaves=int(num_leaves[first]),
            num_blocks=int(num_blocks[first]),
            num_bytes=int(num_blocks[first]) * space.record_bytes,
            saved_ns=int(first_saved_ns[first]),
            used_ns=int(last_used_ns[first]),
            num_hits=hits.get(first_hash, 0),
            first_tokens=first_tokens.get(first_hash, ()),
        )
