"""KV blocks: who holds them, which are free, and which content they hold.

A block is *free* (ref_cnt 0; it may still hold published content until it is handed out again),
*pending* (its hash is known, step S fills it) or *published* (step S was applied). Only full
blocks have a hash and are shared; but the first tokens of a published block, or of the last,
partly filled block of a request that has ended, may be copied into a fresh block. Block 0 is the
null block: it is never handed out and its pages stay zero.
Knows nothing of requests or of the device.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple, TypeAlias

from interlace.engine.block_hash import BlockHash
from interlace.engine.block_runs import in_few_runs
from interlace.engine.events import BlockCleared, BlockRemoved, BlockStored, EventBus
from interlace.engine.ports import Clock

_FEWEST_IN_RUNS = 32
"""Blocks of an allocation that looks for neighbours; how a smaller one lies costs little."""
_SLACK = 48
"""One of so many free blocks may outlive its turn. What stays too long takes room from what would
be hit: it costs less than this share of the hits, and 16 to 24 runs in 512 blocks need as much."""


class BlockTokens(NamedTuple):
    """What a block holds: these tokens after the blocks that `parent` stands for."""

    parent: BlockHash
    """The hash of the block before, or the root of the chain."""
    token_ids: tuple[int, ...]
    """At least one, at most `block_size`."""


FilledBlock: TypeAlias = "tuple[KVCacheBlock, BlockHash, BlockTokens]"
"""A full block, the hash of what it will hold, and that."""


@dataclasses.dataclass(slots=True, eq=False)
class KVCacheBlock:
    """One block of `block_size` tokens in every layer's pages."""

    block_id: int
    ref_cnt: int = 0
    block_hash: BlockHash | None = None
    pending_step: int | None = None
    """The step that fills the block, while it is pending."""
    tokens: BlockTokens | None = None
    """What it holds, if that has a hash or may be copied."""

    @property
    def is_null(self) -> bool:
        """Whether this is the null block."""
        return self.block_id == 0


class BlockPool:
    """All blocks of one KV-cache group. Loop thread only, never awaits.

    Free blocks are handed out in this order: those that hold nothing, then the least recently
    freed. A free block keeps its content, and can be hit, until it is handed out. Who asks for many
    at once gets neighbours: of the next ones in that order, and a few more, those in long runs.
    """

    def __init__(
        self, num_blocks: int, enable_caching: bool, clock: Clock, events: EventBus
    ) -> None:
        self.blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        self.null_block = self.blocks[0]
        self._free = self._all_free()
        self._by_hash: dict[BlockHash, KVCacheBlock] = {}
        # (parent, first token) -> a block that may be copied. Siblings that begin alike share one
        # place: a look-up costs the same however many prompts there were.
        self._by_start: dict[tuple[BlockHash, int], KVCacheBlock] = {}
        self._enable_caching = enable_caching
        self._clock = clock
        self._events = events

    def _all_free(self) -> OrderedDict[int, KVCacheBlock]:
        return OrderedDict((block.block_id, block) for block in self.blocks[1:])

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

    def get_num_free_blocks(self) -> int:
        """`num_free_blocks`, by the name that connectors know."""
        return self.num_free_blocks

    def get_cached_block(self, block_hash: BlockHash) -> KVCacheBlock | None:
        """The block that holds, or is being filled with, this content."""
        return self._by_hash.get(block_hash)

    def get_cached_prefix(self, block_hashes: Iterable[BlockHash]) -> list[KVCacheBlock]:
        """The blocks that hold, or are being filled with, this content, up to the first gap."""
        cached, found = self._by_hash.get, []
        for block_hash in block_hashes:
            block = cached(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def find_start(
        self, parent: BlockHash, token_ids: Sequence[int]
    ) -> tuple[KVCacheBlock, int] | None:
        """A block to copy from, and how many of its first tokens are the first of `token_ids`."""
        block = self._by_start.get((parent, token_ids[0])) if token_ids else None
        if block is None:
            return None
        assert block.tokens is not None
        return block, _num_equal(block.tokens.token_ids, token_ids)

    def num_free_among(self, blocks: Iterable[KVCacheBlock]) -> int:
        """How many of `blocks` are free now, so that touching them shrinks the free list."""
        return sum(block.ref_cnt == 0 for block in blocks)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks off the free list; each loses its old content. They come in ascending order.

        The caller has checked `num_free_blocks`: asking for more is our own bug.
        """
        assert num_blocks <= len(self._free), "allocation beyond the free list"
        taken = [self._free.pop(block_id) for block_id in self._next_to_go(num_blocks)]
        for block in taken:
            if block.tokens is not None or block.block_hash is not None:
                self.withdraw(block)
            block.ref_cnt = 1
        return taken

    def _next_to_go(self, num_blocks: int) -> list[int]:
        """Which ids of the free list to take, ascending.

        Time in proportion to `num_blocks`, however long the free list is.
        """
        if num_blocks < _FEWEST_IN_RUNS:
            return sorted(islice(self._free, num_blocks))
        slack = min(num_blocks, len(self._free) // _SLACK)
        oldest = list(islice(self._free, num_blocks + slack))
        blocks = self.blocks
        with_content = (i for i, block_id in enumerate(oldest) if blocks[block_id].tokens)
        num_empty = next(with_content, len(oldest))
        if num_empty >= num_blocks:
            return in_few_runs(oldest[:num_empty], num_blocks)
        # Content goes only where nothing else is left, however the empty ones lie.
        others = in_few_runs(oldest[num_empty:], num_blocks - num_empty)
        return sorted(oldest[:num_empty] + others)

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Hold blocks that a prefix look-up found; the null block is never among them."""
        for block in blocks:
            assert block.block_id, "the null block cannot be held: leave it out"
            if block.ref_cnt == 0:
                del self._free[block.block_id]
            block.ref_cnt += 1

    def free_blocks(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Let go of a request's blocks, given in order of position.

        The tail goes to the free list first, so it is evicted before the head that more prompts
        share. Blocks without content go to the front.
        """
        for block in reversed(blocks):
            assert block.ref_cnt > 0, f"block {block.block_id} freed twice"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self._free[block.block_id] = block
                if block.tokens is None:
                    self._free.move_to_end(block.block_id, last=False)

    def mark_pending(self, step_id: int, filled: Iterable[FilledBlock]) -> list[KVCacheBlock]:
        """Say that step `step_id` fills these blocks: which ones now have a hash.

        A block whose content another block has already is left unhashed.
        """
        if not self._enable_caching:
            return []
        by_hash, marked = self._by_hash, []
        for block, block_hash, tokens in filled:
            if by_hash.setdefault(block_hash, block) is block:
                assert block.block_hash is None, f"block {block.block_id} has a hash already"
                block.block_hash = block_hash
                block.pending_step = step_id
                block.tokens = tokens
                marked.append(block)
        return marked

    def publish(self, *blocks: KVCacheBlock) -> None:
        """Say that pending blocks' content is right; the step that filled them was applied.

        A long prompt has hundreds, and nothing else goes on meanwhile: no calls where not needed.
        """
        by_start = self._by_start
        for block in blocks:
            assert block.tokens is not None
            block.pending_step = None
            parent, token_ids = block.tokens
            if by_start.setdefault((parent, token_ids[0]), block) is not block:
                self._index_start(block)
        for block in blocks if self._events.active else ():
            assert block.tokens is not None
            assert block.block_hash is not None
            self._events.emit(
                BlockStored(
                    self._clock.monotonic(),
                    block.block_id,
                    block.block_hash,
                    block.tokens.parent,
                    block.tokens.token_ids,
                )
            )

    def keep_tail(self, block: KVCacheBlock, tokens: BlockTokens) -> None:
        """Say that `block`, which will not be filled any further, begins with these tokens."""
        if self._enable_caching and block.block_hash is None:
            self._forget_start(block)
            block.tokens = tokens
            self._index_start(block)

    def _index_start(self, block: KVCacheBlock) -> None:
        """Let the newest block stand for its start, unless the one there holds all of it."""
        assert block.tokens is not None
        key = (block.tokens.parent, block.tokens.token_ids[0])
        old = self._by_start.get(key)
        if old is not None and old.tokens is not None:
            length = len(block.tokens.token_ids)
            if old.tokens.token_ids[:length] == block.tokens.token_ids:
                return
        self._by_start[key] = block

    def _forget_start(self, block: KVCacheBlock) -> None:
        if block.tokens is None:
            return
        key = (block.tokens.parent, block.tokens.token_ids[0])
        if self._by_start.get(key) is block:
            del self._by_start[key]
        block.tokens = None

    def withdraw(self, block: KVCacheBlock) -> None:
        """Make the block's content unfindable, whoever holds it. Idempotent."""
        self._forget_start(block)
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
        """Forget all content. Returns False, and does nothing, while any block is held.

        Blocks that hold nothing are all the same, so they lie in order again, as at first.
        """
        if self.num_free_blocks != self.num_usable_blocks:
            return False
        self._free = self._all_free()
        for block in self.blocks:
            block.block_hash = block.pending_step = block.tokens = None
        self._by_hash.clear()
        self._by_start.clear()
        if self._events.active:
            self._events.emit(BlockCleared(self._clock.monotonic()))
        return True


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
