"""KV blocks: who holds them, which are free, and which content they hold.

A block is *free* (ref_count 0; it may still hold published content until it is handed out again),
*pending* (its hash is known, step S fills it) or *published* (step S was applied). Only full
blocks have a hash. Block 0 is the null block: it is never handed out and its pages stay zero.
Knows nothing of requests or of the device.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from interlace.engine.block_hash import BlockHash
from interlace.engine.events import BlockCleared, BlockRemoved, BlockStored, EventBus
from interlace.engine.ports import Clock


@dataclasses.dataclass(slots=True, eq=False)
class KVCacheBlock:
    """One block of `block_size` tokens in every layer's pages."""

    block_id: int
    ref_count: int = 0
    block_hash: BlockHash | None = None
    pending_step: int | None = None
    """The step that fills the block, while it is pending."""

    @property
    def is_null(self) -> bool:
        """Whether this is the null block."""
        return self.block_id == 0


class BlockPool:
    """All blocks of one KV-cache group. Loop thread only, never awaits.

    Free blocks are handed out in this order: those that hold nothing, then the least recently
    freed. A free block keeps its content, and can be hit, until it is handed out.
    """

    def __init__(
        self, num_blocks: int, enable_caching: bool, clock: Clock, events: EventBus
    ) -> None:
        self.blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        self.null_block = self.blocks[0]
        self._free = OrderedDict((block.block_id, block) for block in self.blocks[1:])
        self._by_hash: dict[BlockHash, KVCacheBlock] = {}
        self._enable_caching = enable_caching
        self._clock = clock
        self._events = events

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that can be handed out at all: all but the null block."""
        return len(self.blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, those with published content included."""
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks with a hash, pending or published, held or free."""
        return len(self._by_hash)

    def get_cached_block(self, block_hash: BlockHash) -> KVCacheBlock | None:
        """The block that holds, or is being filled with, this content."""
        return self._by_hash.get(block_hash)

    def num_free_among(self, blocks: Iterable[KVCacheBlock]) -> int:
        """How many of `blocks` are free now, so that touching them shrinks the free list."""
        return sum(block.ref_count == 0 for block in blocks)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks off the free list; each loses its old content.

        The caller has checked `num_free_blocks`: asking for more is our own bug.
        """
        assert num_blocks <= len(self._free), "allocation beyond the free list"
        taken = []
        for _ in range(num_blocks):
            _, block = self._free.popitem(last=False)
            self.withdraw(block)
            block.ref_count = 1
            taken.append(block)
        return taken

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Hold blocks that a prefix look-up found."""
        for block in blocks:
            if block.ref_count == 0:
                del self._free[block.block_id]
            block.ref_count += 1

    def free_blocks(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Let go of a request's blocks, given in order of position.

        The tail goes to the free list first, so it is evicted before the head that more prompts
        share. Blocks without content go to the front.
        """
        for block in reversed(blocks):
            assert block.ref_count > 0, f"block {block.block_id} freed twice"
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free[block.block_id] = block
                if block.block_hash is None:
                    self._free.move_to_end(block.block_id, last=False)

    def mark_pending(self, block: KVCacheBlock, block_hash: BlockHash, step_id: int) -> bool:
        """Say that step `step_id` fills `block` with this content.

        Returns False, and leaves the block unhashed, if another block has that content already.
        """
        if not self._enable_caching or block_hash in self._by_hash:
            return False
        assert block.block_hash is None, f"block {block.block_id} has a hash already"
        block.block_hash = block_hash
        block.pending_step = step_id
        self._by_hash[block_hash] = block
        return True

    def publish(self, block: KVCacheBlock) -> None:
        """Say that a pending block's content is right; the step that filled it was applied."""
        assert block.block_hash is not None
        block.pending_step = None
        if self._events.active:
            self._events.emit(
                BlockStored(self._clock.monotonic(), block.block_id, block.block_hash)
            )

    def withdraw(self, block: KVCacheBlock) -> None:
        """Make the block's content unfindable, whoever holds it. Idempotent."""
        if block.block_hash is None:
            return
        del self._by_hash[block.block_hash]
        if block.pending_step is None and self._events.active:
            self._events.emit(
                BlockRemoved(self._clock.monotonic(), block.block_id, block.block_hash)
            )
        block.block_hash = None
        block.pending_step = None

    def reset_prefix_cache(self) -> bool:
        """Forget all content. Returns False, and does nothing, while any block is held."""
        if self.num_free_blocks != self.num_usable_blocks:
            return False
        for block in self._by_hash.values():
            block.block_hash = None
            block.pending_step = None
        self._by_hash.clear()
        if self._events.active:
            self._events.emit(BlockCleared(self._clock.monotonic()))
        return True
