"""Which blocks a request holds: prefix look-up, allocation, hashing, and delayed frees.

Knows requests and the pool, not the step budget. Loop thread only, never awaits.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from interlace.engine.block_pool import BlockPool, KVCacheBlock
from interlace.engine.config import CacheConfig
from interlace.engine.events import EventBus
from interlace.engine.ports import Clock
from interlace.engine.request import Request


class PrefixHit(NamedTuple):
    """The longest cached prefix of a request."""

    blocks: list[KVCacheBlock]
    num_tokens: int


class KVCacheManager:
    """Hands blocks to requests and takes them back when no step can touch them any more."""

    def __init__(self, config: CacheConfig, clock: Clock, events: EventBus) -> None:
        self.block_size = config.block_size
        self.pool = BlockPool(config.num_gpu_blocks, config.enable_prefix_caching, clock, events)
        self._pending: dict[int, list[KVCacheBlock]] = {}  # step id -> blocks that it fills
        self._fenced: deque[tuple[int, list[KVCacheBlock]]] = deque()  # (step id, blocks to free)

    def find_longest_hit(self, request: Request) -> PrefixHit:
        """Blocks that hold the request's prefix, published or pending; holds nothing yet.

        At least one token is left to compute, since something must be sampled from.
        """
        most = (request.num_tokens - 1) // self.block_size
        blocks = []
        for block_hash in request.block_hashes[:most]:
            block = self.pool.get_cached_block(block_hash)
            if block is None:
                break
            blocks.append(block)
        return PrefixHit(blocks, len(blocks) * self.block_size)

    def can_admit(self, request: Request, hit: PrefixHit) -> bool:
        """Whether all known tokens of the request fit beside what others hold now."""
        num_new = -(-request.num_tokens // self.block_size) - len(hit.blocks)
        return num_new + self.pool.num_free_among(hit.blocks) <= self.pool.num_free_blocks

    def take_hit(self, request: Request, hit: PrefixHit) -> None:
        """Give the request, which holds nothing, the blocks of its cached prefix.

        Touch them before anything is allocated: an allocation could evict them (B49).
        """
        assert not request.blocks
        self.pool.touch(hit.blocks)
        request.blocks.extend(hit.blocks)
        request.num_hashed_blocks = len(hit.blocks)

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
        num_full = min(num_tokens // self.block_size, len(request.block_hashes))
        for i in range(request.num_hashed_blocks, num_full):
            if self.pool.mark_pending(request.blocks[i], request.block_hashes[i], step_id):
                self._pending.setdefault(step_id, []).append(request.blocks[i])
        request.num_hashed_blocks = max(request.num_hashed_blocks, num_full)

    def apply_step(self, step_id: int) -> None:
        """Step `step_id` was applied: publish what it filled, free what only it still touched."""
        for block in self._pending.pop(step_id, ()):
            if block.pending_step == step_id:
                self.pool.publish(block)
        while self._fenced and self._fenced[0][0] <= step_id:
            self.pool.free_blocks(self._fenced.popleft()[1])

    def free(self, request: Request, last_applied_step: int) -> None:
        """Take all blocks from the request.

        They return to the pool at once, or when the newest step that touches them is applied.
        """
        blocks, request.blocks = request.blocks, []
        request.num_hashed_blocks = 0
        if not blocks:
            return
        if request.last_step_id <= last_applied_step:
            self.pool.free_blocks(blocks)
            return
        # Kept in order of step id, since apply_step reads from the front.
        at = next(
            (i for i, (step, _) in enumerate(self._fenced) if step > request.last_step_id),
            len(self._fenced),
        )
        self._fenced.insert(at, (request.last_step_id, blocks))

    @property
    def num_fenced_blocks(self) -> int:
        """Blocks of ended requests that a step in flight may still touch."""
        return sum(len(blocks) for _, blocks in self._fenced)
