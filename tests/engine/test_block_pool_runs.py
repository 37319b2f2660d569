"""Long allocations: in few runs after thousands of lives, and hits nearly as with pure LRU."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, count, islice

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduling import ManualClock

from interlace.engine.block_hash import BlockHash
from interlace.engine.block_pool import BlockPool, BlockTokens, KVCacheBlock
from interlace.engine.block_runs import runs_of
from interlace.engine.events import EventBus

FEWEST_IN_RUNS = 32


class PureLRU(BlockPool):
    """What hits are measured against."""

    def _next_to_go(self, num_blocks: int) -> list[int]:
        return sorted(islice(self._free, num_blocks))


def make(pool_class: type[BlockPool], num_usable: int) -> BlockPool:
    return pool_class(num_usable + 1, enable_caching=True, clock=ManualClock(), events=EventBus())


def key(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "little"))


def fill(pool: BlockPool, blocks: Sequence[KVCacheBlock], hashes: Iterator[BlockHash]) -> None:
    filled = [
        (block, block_hash, BlockTokens(block_hash, (1,)))
        for block, block_hash in zip(blocks, hashes, strict=False)
    ]
    pool.publish(*pool.mark_pending(1, filled))


def num_runs(blocks: Sequence[KVCacheBlock]) -> int:
    return len(runs_of(block.block_id for block in blocks))


def let_go(pool: BlockPool, live: list[list[KVCacheBlock]], rng: random.Random) -> None:
    pool.free_blocks(live.pop(rng.randrange(len(live))))


def runs_after_many_lives(pool: BlockPool, rng: random.Random) -> list[int]:
    """In how many runs 512 blocks come, while up to 12 requests live and grow block by block."""
    new = map(key, count())
    live: list[list[KVCacheBlock]] = []
    found: list[int] = []
    for life in range(1500):
        length = rng.choice([8, 32, 64, 128, 256, 512])
        while pool.num_free_blocks < length or len(live) > 12:
            let_go(pool, live, rng)
        blocks = pool.get_new_blocks(length)
        fill(pool, blocks, new)
        for other in live:
            if rng.random() < 0.3 and pool.num_free_blocks:
                other += pool.get_new_blocks(1)
                fill(pool, other[-1:], new)
        live.append(blocks)
        if life >= 750 and length == 512:
            found.append(num_runs(blocks))
    return sorted(found)


def test_a_long_prefix_comes_in_few_runs_however_long_the_pool_has_lived() -> None:
    found = runs_after_many_lives(make(BlockPool, 8_000), random.Random(3))
    assert found[len(found) // 2] <= 24
    assert found[-1] <= 64
    pure = runs_after_many_lives(make(PureLRU, 8_000), random.Random(3))
    assert pure[len(pure) // 2] > 150, "there was nothing to mend"


def num_hits(pool: BlockPool, seed: int) -> int:
    """Blocks hit by prompts that share 1,000 prefixes by Zipf's law, each with an end of its own.

    Up to 12 requests live at a time, and grow block by block.
    """
    rng = random.Random(seed)
    lengths = [rng.randint(8, 128) for _ in range(1000)]
    shares = list(accumulate(1 / (i + 1) ** 0.9 for i in range(len(lengths))))
    new = map(key, count(1_000_000))
    live: list[list[KVCacheBlock]] = []
    hits = 0
    for _ in range(2500):
        (prefix,) = rng.choices(range(len(lengths)), cum_weights=shares)
        hashes = [key(prefix * 1000 + i) for i in range(lengths[prefix])]
        hashes += islice(new, rng.randint(1, 16))
        while len(live) >= 12:
            let_go(pool, live, rng)
        hit = pool.get_cached_prefix(hashes)
        hits += len(hit)
        pool.touch(hit)
        rest = pool.get_new_blocks(len(hashes) - len(hit))
        fill(pool, rest, iter(hashes[len(hit) :]))
        live.append(hit + rest)
        for blocks in rng.choices(live, k=8):
            blocks += pool.get_new_blocks(1)
            fill(pool, blocks[-1:], new)
    return hits


def test_prefixes_are_hit_as_often_as_with_pure_lru() -> None:
    ours = sum(num_hits(make(BlockPool, 4_000), seed) for seed in range(2))
    pure = sum(num_hits(make(PureLRU, 4_000), seed) for seed in range(2))
    assert ours >= 0.99 * pure


def test_content_stays_while_there_are_blocks_without_however_they_lie() -> None:
    pool = make(BlockPool, 400)
    blocks = pool.get_new_blocks(400)
    fill(pool, [block for i, block in enumerate(blocks) if i % 4], map(key, count()))
    pool.free_blocks(blocks)
    assert pool.num_cached_blocks == 300
    pool.free_blocks(pool.get_new_blocks(100))
    assert pool.num_cached_blocks == 300
    pool.free_blocks(pool.get_new_blocks(140))
    assert pool.num_cached_blocks == 260


def test_of_what_was_freed_the_tail_goes_before_the_head() -> None:
    pool = make(BlockPool, 256)
    blocks = pool.get_new_blocks(256)
    fill(pool, blocks, map(key, count()))
    pool.free_blocks(blocks)
    assert pool.get_new_blocks(64) == blocks[-64:]


class PoolMachine(RuleBasedStateMachine):
    """The pool beside a list: the order in which free blocks should go."""

    @initialize(num_usable=st.integers(1, 260))
    def begin(self, num_usable: int) -> None:
        self.pool = make(BlockPool, num_usable)
        self.order = [block.block_id for block in self.pool.blocks[1:]]
        self.held: list[list[KVCacheBlock]] = []
        self.new = map(key, count())

    @rule(share=st.floats(0, 1), filled=st.booleans())
    def take(self, share: float, filled: bool) -> None:
        num_blocks = int(share * self.pool.num_free_blocks)
        empty = {i for i in self.order if self.pool.blocks[i].tokens is None}
        slack = len(self.order) // 48 if num_blocks >= FEWEST_IN_RUNS else 0
        blocks = self.pool.get_new_blocks(num_blocks)
        taken = [block.block_id for block in blocks]
        assert taken == sorted(set(taken))
        assert len(taken) == num_blocks
        assert set(taken) <= set(self.order[: num_blocks + slack])
        assert len(empty.intersection(taken)) == min(len(empty), num_blocks)
        assert all(b.ref_cnt == 1 and b.block_hash is None and b.tokens is None for b in blocks)
        self.order = [i for i in self.order if i not in set(taken)]
        if filled:
            fill(self.pool, blocks, self.new)
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.free_blocks(blocks)
        for block in reversed(blocks):
            if block.ref_cnt == 0:
                place = len(self.order) if block.tokens else 0
                self.order.insert(place, block.block_id)

    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        cached = [block for block in self.pool.blocks if block.block_hash is not None]
        if not cached:
            return
        begin = data.draw(st.integers(0, len(cached) - 1))
        blocks = cached[begin : begin + data.draw(st.integers(1, 40))]
        assert self.pool.get_cached_prefix([b.block_hash for b in blocks if b.block_hash]) == blocks
        self.pool.touch(blocks)
        touched = {block.block_id for block in blocks}
        self.order = [i for i in self.order if i not in touched]
        self.held.append(blocks)

    @invariant()
    def free_blocks_are_those_that_nobody_holds(self) -> None:
        assert list(self.pool._free) == self.order
        for block in self.pool.blocks[1:]:
            assert block.ref_cnt == sum(block in blocks for blocks in self.held)
        hashed = [block for block in self.pool.blocks if block.block_hash is not None]
        assert self.pool.num_cached_blocks == len(hashed)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
