"""Prefixes that come, are saved, and go: where blocks and records lie in a pool used for long.

The engine's own block manager hands out blocks, and PipelineConnector's own planner and index hand
out records. There is no device: a step is applied, and a save has ended, as soon as it is ordered.
Pure and seeded; any one thread.
"""

from __future__ import annotations

import itertools
import random

from interlace.bench.kv_blocks import BLOCK_SIZE
from interlace.connectors.pipeline.host_index import HostIndex
from interlace.connectors.pipeline.messages import RecordRun
from interlace.connectors.pipeline.planner import SavePlanner, Tracked
from interlace.connectors.pipeline.sched_runs import record_runs
from interlace.connectors.pipeline.sched_stats import Counter
from interlace.connectors.pipeline.sched_tier import MemoryTier
from interlace.engine.clock import MonotonicClock
from interlace.engine.config import CacheConfig
from interlace.engine.events import EventBus
from interlace.engine.kv_cache_manager import KVCacheManager
from interlace.engine.request import Request
from interlace.engine.sampling_params import SamplingParams

GROWING = 0.3
"""Of the running requests, that generate another block's tokens in the time of one life."""
ANSWER_BLOCKS = 1
SHARING = 0.25
"""Of all prompts, that begin as an earlier one does."""
REMEMBERED = 64
"""Prompts that a later one may begin with."""
VOCABULARY = 1 << 16


class PoolLives:
    """A pool of `num_blocks` usable blocks."""

    def __init__(self, num_blocks: int, longest: int, full: float, seed: int) -> None:
        """As many records. `longest`: blocks of the longest prompt, a quarter of the pool at most.

        `full`: share of all blocks that running requests hold at most, and nearly do when a load
        is due. What ended requests have left in the others may still be hit.
        """
        assert 4 * longest <= num_blocks
        self._random = random.Random(seed)
        self._most = int(full * num_blocks)
        self._longest = longest
        config = CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=1 + num_blocks)
        self._blocks = KVCacheManager(config, MonotonicClock(), EventBus())
        self._index = HostIndex(num_blocks)
        self._planner = SavePlanner(self._index, Counter(), MemoryTier(self._index))
        self._running: list[Request] = []
        self._prompts: list[list[int]] = []
        self._serial = itertools.count(1)

    @property
    def full_share(self) -> float:
        """Of the blocks, that running requests hold now."""
        pool = self._blocks.pool
        return 1 - pool.num_free_blocks / pool.num_usable_blocks

    def live(self, count: int) -> None:
        """So many prompts come and run on; others end for them."""
        for _ in range(count):
            self._one_life(self._prompt(self._random.randint(1, self._longest)))

    def next_load(self) -> tuple[RecordRun, ...]:
        """A longest prompt that is stored, and has left the device, is loaded by a new request:
        from which records into which blocks. Others live in between, and fill the pool."""
        prompt = self._new_tokens(self._longest)
        stored = self._one_life(prompt)
        hashes = list(stored.block_hashes)
        self.live(4)
        if stored in self._running:
            self._end(stored)
        pool = self._blocks.pool
        for block in pool.get_cached_prefix(hashes):
            pool.withdraw(block)
        self._make_room(self._longest)
        self._fill(self._longest)
        request = self._request(prompt)
        records = self._index.pin(hashes)
        allocated = self._blocks.allocate(request, len(prompt))
        assert allocated is not None, "there was room"
        runs = record_runs(records, [block.block_id for block in allocated])
        self._index.unpin(records)
        self._publish(request)
        self._running.append(request)
        return runs

    def _one_life(self, prompt: list[int], *, may_grow: bool = True) -> Request:
        request = self._request(prompt)
        self._make_room(len(prompt) // BLOCK_SIZE + ANSWER_BLOCKS)
        hit = self._blocks.find_longest_hit(request).aligned(BLOCK_SIZE)
        self._blocks.take_hit(request, hit, next(self._serial))
        allocated = self._blocks.allocate(request, len(prompt))
        assert allocated is not None, "there was room"
        self._publish(request)
        self._save(request)
        self._running.append(request)
        if may_grow:
            self._grow()
        return request

    def _publish(self, request: Request) -> None:
        """The step that computes it was applied."""
        request.num_computed_tokens = request.num_tokens
        step_id = next(self._serial)
        request.last_step_id = step_id
        self._blocks.hash_blocks(request, request.num_tokens, step_id)
        self._blocks.apply_step(step_id)

    def _save(self, request: Request) -> None:
        self._index.touch(request.block_hashes)
        tracked = Tracked(request, [block.block_id for block in request.blocks])
        self._planner.plan(tracked, len(request.blocks))
        self._planner.allow(save.save_id for save in self._planner.take_orders().saves)

    def _grow(self) -> None:
        """Some of those that run get a block for their answers."""
        for request in self._running:
            if self._random.random() < GROWING and self._blocks.pool.num_free_blocks:
                num_tokens = (len(request.blocks) + ANSWER_BLOCKS) * BLOCK_SIZE
                self._blocks.allocate(request, num_tokens)

    def _make_room(self, num_blocks: int) -> None:
        """Running requests end, whichever, until the pool is not too full with so many more."""
        pool = self._blocks.pool
        while pool.num_usable_blocks - pool.num_free_blocks + num_blocks > self._most:
            self._end(self._random.choice(self._running))

    def _fill(self, num_blocks: int) -> None:
        """New requests come, until the pool is as full as it may be with so many blocks more."""
        pool = self._blocks.pool
        while True:
            held = pool.num_usable_blocks - pool.num_free_blocks
            room = min(self._most - held - num_blocks - ANSWER_BLOCKS, self._longest)
            if room < 1:
                return
            self._one_life(self._new_tokens(room), may_grow=False)

    def _end(self, request: Request) -> None:
        self._running.remove(request)
        self._blocks.free(request, request.last_step_id)

    def _request(self, prompt: list[int]) -> Request:
        number = next(self._serial)
        return Request(
            f"life {number}",
            prompt,
            SamplingParams(max_tokens=1),
            seed=0,
            arrival=number,
            block_size=BLOCK_SIZE,
        )

    def _prompt(self, num_blocks: int) -> list[int]:
        """New tokens, or the beginning of an earlier prompt and new ones."""
        prompt = self._new_tokens(num_blocks)
        if self._prompts and self._random.random() < SHARING:
            earlier = self._random.choice(self._prompts)
            shared = self._random.randint(1, num_blocks) * BLOCK_SIZE
            prompt[:shared] = earlier[:shared]
        self._prompts.append(prompt)
        del self._prompts[:-REMEMBERED]
        return prompt

    def _new_tokens(self, num_blocks: int) -> list[int]:
        return self._random.choices(range(VOCABULARY), k=num_blocks * BLOCK_SIZE)
