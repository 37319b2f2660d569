"""Which blocks a request holds: prefix look-up, allocation, hashing, and delayed frees.

Knows requests and the pool, not the step budget. Loop thread only, never awaits.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from interlace.engine.block_pool import BlockPool, BlockTokens, FilledBlock, KVCacheBlock
from interlace.engine.config import CacheConfig
from interlace.engine.events import EventBus
from interlace.engine.ports import Clock
from interlace.engine.request import Request


class PrefixHit(NamedTuple):
    """The longest cached prefix of a request."""

    blocks: list[KVCacheBlock]
    """Full blocks, to be shared."""
    num_tokens: int
    """In `blocks`, and those to copy from `tail`."""
    tail: KVCacheBlock | None = None
    """A block whose first tokens are the next ones; they are copied into a block of our own."""

    def aligned(self, block_size: int) -> PrefixHit:
        """The whole blocks of it."""
        return PrefixHit(self.blocks, len(self.blocks) * block_size)


class _Fenced(NamedTuple):
    """Blocks that return to the pool when step `step_id` is applied."""

    step_id: int
    blocks: list[KVCacheBlock]
    tail: tuple[KVCacheBlock, BlockTokens] | None = None
    """The one of them that is partly filled."""


class KVCacheManager:
    """Hands blocks to requests and takes them back when no step can touch them any more."""

    def __init__(self, config: CacheConfig, clock: Clock, events: EventBus) -> None:
        self.block_size = config.block_size
        self.pool = BlockPool(config.num_gpu_blocks, config.enable_prefix_caching, clock, events)
        self._pending: dict[int, list[KVCacheBlock]] = {}  # step id -> blocks that it fills
        self._fenced: deque[_Fenced] = deque()  # in order of step id

    def find_longest_hit(self, request: Request, num_reserved: int = 0) -> PrefixHit:
        """Blocks that hold the request's prefix, published or pending; holds nothing yet.

        At least one token is left to compute, since something must be sampled from. Tokens are
        copied from a last block only if the pool has room for both, the source and the copy,
        beside `num_reserved` blocks.
        """
        most = (request.num_tokens - 1) // self.block_size
        blocks = self.pool.get_cached_prefix(request.block_hashes[:most])
        num_tokens = len(blocks) * self.block_size
        end = min(num_tokens + self.block_size, request.num_tokens - 1)
        wanted = request.all_token_ids[num_tokens:end]
        start = self.pool.find_start(request.hash_before(len(blocks)), wanted)
        if start is not None:
            tail, num_equal = start
            hit = PrefixHit(blocks, num_tokens + num_equal, tail)
            if self.can_admit(request, hit, num_reserved):
                return hit
        return PrefixHit(blocks, num_tokens)

    def can_admit(self, request: Request, hit: PrefixHit, num_reserved: int = 0) -> bool:
        """Whether all known tokens of the request fit beside what others hold now.

        `num_reserved` blocks are left to others.
        """
        num_new = -(-request.num_tokens // self.block_size) - len(hit.blocks)
        held = hit.blocks if hit.tail is None else [*hit.blocks, hit.tail]
        num_taken = num_new + self.pool.num_free_among(held)
        return num_taken + num_reserved <= self.pool.num_free_blocks

    def num_missing_blocks(self, request: Request) -> int:
        """Blocks that the request needs for all its known tokens and does not hold yet."""
        return max(0, -(-request.num_tokens // self.block_size) - len(request.blocks))

    def take_hit(self, request: Request, hit: PrefixHit, step_id: int) -> None:
        """Give the request, which holds nothing, the blocks of its cached prefix.

        Touch them before anything is allocated: an allocation could evict them (B49). Step
        `step_id`, which is being planned, copies from the tail: it stays held until then.
        """
        assert not request.blocks
        self.pool.touch(hit.blocks)
        request.blocks.extend(hit.blocks)
        request.num_hashed_blocks = len(hit.blocks)
        if hit.tail is not None:
            self.pool.touch([hit.tail])
            self._fence(_Fenced(step_id, [hit.tail]))

    def allocate(self, request: Request, num_tokens: int) -> list[KVCacheBlock] | None:
        """Let the request hold blocks for its first `num_tokens` tokens.

        Returns the blocks added, or None, with nothing changed, if the pool has too few.
        """
        num_new = -(-num_tokens // self.block_size) - len(request.blocks)
        if num_new <= 0:
            return []
        if num_new > self.pool.num_free_blocks:
            return None
        blocks = self.pool.get_new_blocks(num_new)
        request.blocks.extend(blocks)
        return blocks

    def hash_blocks(self, request: Request, num_tokens: int, step_id: int) -> None:
        """Offer the request's full blocks within [0, num_tokens) to the pool as pending.

        `step_id` is the step that computes up to `num_tokens`. Only known tokens have hashes.
        """
        if num_tokens // self.block_size <= request.num_hashed_blocks:
            return  # as in most steps
        new = self.pool.mark_pending(step_id, self._take_unhashed(request, num_tokens))
        if new:
            self._pending.setdefault(step_id, []).extend(new)

    def publish_loaded(self, request: Request, num_tokens: int) -> None:
        """The request's first `num_tokens` tokens lie in its blocks: publish the full ones."""
        # No step fills them: they are published on the spot.
        self.pool.publish(*self.pool.mark_pending(0, self._take_unhashed(request, num_tokens)))

    def _take_unhashed(self, request: Request, num_tokens: int) -> Iterator[FilledBlock]:
        """The request's full blocks within [0, num_tokens) that were not offered to the pool yet;
        they count as offered from now on.

        A long prompt has hundreds: its tokens are cut up without a look at each.
        """
        size, start = self.block_size, request.num_hashed_blocks
        stop = min(num_tokens // size, len(request.block_hashes))
        if start >= stop:
            return iter(())
        request.num_hashed_blocks = stop
        hashes = request.block_hashes[start:stop]
        flat = iter(request.all_token_ids[start * size : stop * size])
        parents = itertools.chain([request.hash_before(start)], hashes)
        cut = zip(*[flat] * size, strict=True)
        tokens = itertools.starmap(BlockTokens, zip(parents, cut, strict=False))
        return zip(request.blocks[start:stop], hashes, tokens, strict=False)

    def withdraw(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Nothing that these blocks hold, or will hold after a step in flight, may be found."""
        gone = {block.block_id for block in blocks}
        for block in blocks:
            self.pool.withdraw(block)
        for i, fenced in enumerate(self._fenced):
            if fenced.tail is not None and fenced.tail[0].block_id in gone:
                self._fenced[i] = fenced._replace(tail=None)

    def apply_step(self, step_id: int) -> None:
        """Step `step_id` was applied: publish what it filled, free what only it still touched."""
        pending = self._pending.pop(step_id, ())
        self.pool.publish(*(block for block in pending if block.pending_step == step_id))
        while self._fenced and self._fenced[0].step_id <= step_id:
            self._release(self._fenced.popleft())

    def free(self, request: Request, last_applied_step: int) -> None:
        """Take all blocks from the request.

        They return to the pool at once, or when the newest step that touches them is applied.
        """
        leaving = _Fenced(request.last_step_id, request.blocks, self._tail_of(request))
        request.blocks = []
        request.num_hashed_blocks = 0
        if not leaving.blocks:
            return
        if request.last_step_id <= last_applied_step:
            self._release(leaving)
        else:
            self._fence(leaving)

    def _tokens_of(self, request: Request, index: int, end: int) -> BlockTokens:
        """What the request's block number `index` holds, up to position `end`."""
        start = index * self.block_size
        return BlockTokens(request.hash_before(index), tuple(request.all_token_ids[start:end]))

    def _tail_of(self, request: Request) -> tuple[KVCacheBlock, BlockTokens] | None:
        """The request's partly filled block, if it has one."""
        # A step in flight may have computed a token that nobody knows: min().
        end = min(request.num_computed_tokens, request.num_tokens)
        if end % self.block_size == 0 or not request.blocks:
            return None
        index = end // self.block_size
        return request.blocks[index], self._tokens_of(request, index, end)

    def _fence(self, fenced: _Fenced) -> None:
        """Keep in order of step id, since `apply_step` reads from the front."""
        later = (i for i, other in enumerate(self._fenced) if other.step_id > fenced.step_id)
        self._fenced.insert(next(later, len(self._fenced)), fenced)

    def _release(self, fenced: _Fenced) -> None:
        if fenced.tail is not None:
            self.pool.keep_tail(*fenced.tail)
        self.pool.free_blocks(fenced.blocks)

    @property
    def num_fenced_blocks(self) -> int:
        """Blocks that only a step in flight may still touch: of ended requests, and copied ones."""
        return sum(len(fenced.blocks) for fenced in self._fenced)
