"""`ls`: chains of blocks, from those without a parent on. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from interlace.connectors.slab_store.inspection.reports import Listing, Prefix
from interlace.connectors.slab_store.inspection.survey import (
    SlabContents,
    Survey,
    by_folder,
    model_names,
)
from interlace.connectors.slab_store.layout import NO_PARENT, Entry
from interlace.connectors.slab_store.space import Space


def list_prefixes(found: Survey) -> Listing:
    """Follow chains from blocks without a parent. Pure."""
    prefixes: list[Prefix] = []
    num_lost = 0
    for slabs in by_folder(found.slabs).values():
        chains = Chains(slabs)
        listed = [_prefix(slabs[0].space, model_names(slabs), chains, one) for one in chains.first]
        num_lost += chains.num_blocks - sum(prefix.num_blocks for prefix in listed)
        prefixes += listed
    prefixes.sort(key=lambda prefix: (-prefix.used_ns, prefix.first_hash))
    return Listing(prefixes=tuple(prefixes), num_lost_blocks=num_lost)


class _Block:
    """A block of one space, and what follows it."""

    def __init__(self) -> None:
        self.next: list[bytes] = []
        self.saved_ns = 0
        self.used_ns = 0


class Chains:
    """The blocks of one space. Pure."""

    def __init__(self, slabs: Iterable[SlabContents]) -> None:
        """`slabs` are of one space. A block that is there twice counts once."""
        self._blocks: dict[bytes, _Block] = {}
        self.first: list[bytes] = []
        """Hashes of blocks without a parent, as they come."""
        parents: dict[bytes, bytes] = {}
        for slab in slabs:
            for entry in slab.entries:
                self._note(entry, slab.file.used_ns)
                parents[entry.block_hash] = entry.parent_hash
        for block_hash, parent_hash in parents.items():
            if parent_hash == NO_PARENT:
                self.first.append(block_hash)
            elif parent_hash in self._blocks:
                self._blocks[parent_hash].next.append(block_hash)

    def _note(self, entry: Entry, used_ns: int) -> None:
        block = self._blocks.setdefault(entry.block_hash, _Block())
        block.saved_ns = min(block.saved_ns or entry.saved_ns, entry.saved_ns)
        block.used_ns = max(block.used_ns, used_ns)

    @property
    def num_blocks(self) -> int:
        """That are stored, found or not."""
        return len(self._blocks)

    def walk(self, first: bytes) -> Iterator[tuple[bytes, _Block, int]]:
        """(hash, block, its place in its chain from 1 on) of all that begins with this one."""
        # A block has one parent, so nothing is met twice, and no circle has a first block.
        todo = [(first, 1)]
        while todo:
            block_hash, place = todo.pop()
            block = self._blocks[block_hash]
            yield block_hash, block, place
            todo += [(one, place + 1) for one in block.next]


def _prefix(space: Space, names: tuple[str, ...], chains: Chains, first: bytes) -> Prefix:
    found = [(block, place) for _, block, place in chains.walk(first)]
    identity = space.identity
    return Prefix(
        first_hash=first.hex(),
        model_names=names,
        model=identity.model,
        dtype=identity.dtype,
        block_size=identity.block_size,
        group=identity.group,
        rank=identity.rank,
        world_size=identity.world_size,
        num_tokens=max(place for _, place in found) * identity.block_size,
        num_leaves=sum(not block.next for block, _ in found),
        num_blocks=len(found),
        num_bytes=len(found) * space.record_bytes,
        saved_ns=min(block.saved_ns for block, _ in found),
        used_ns=max(block.used_ns for block, _ in found),
    )
