"""The pool alone: who holds a block, which is handed out next, what can be found."""

from __future__ import annotations

import pytest
from scheduling import ManualClock

from interlace.engine.block_hash import BlockHash
from interlace.engine.block_pool import BlockPool, BlockTokens, KVCacheBlock
from interlace.engine.block_runs import runs_of
from interlace.engine.events import (
    BlockCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBus,
    EventStream,
)


def key(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "little"))


def tokens(number: int) -> BlockTokens:
    return BlockTokens(key(0), (number, number + 1))


def make_pool(
    num_usable: int = 4, *, caching: bool = True, bus: EventBus | None = None
) -> BlockPool:
    return BlockPool(num_usable + 1, caching, ManualClock(), bus or EventBus())


def mark(pool: BlockPool, block: KVCacheBlock, number: int, step_id: int = 1) -> bool:
    """Whether the block is said to become that content."""
    return pool.mark_pending(step_id, [(block, key(number), tokens(number))]) == [block]


def take_and_publish(pool: BlockPool, *numbers: int) -> list[KVCacheBlock]:
    blocks = pool.get_new_blocks(len(numbers))
    for block, number in zip(blocks, numbers, strict=True):
        assert mark(pool, block, number)
        pool.publish(block)
    return blocks


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


async def drained(stream: EventStream) -> list[Event]:
    stream.close()
    return [event async for event in stream]


def test_the_null_block_is_never_handed_out() -> None:
    pool = make_pool(3)
    assert pool.num_usable_blocks == pool.num_free_blocks == 3
    assert sorted(ids(pool.get_new_blocks(3))) == [1, 2, 3]
    assert pool.null_block.is_null
    assert pool.null_block.ref_cnt == 0


def test_the_null_block_is_not_held_by_mistake() -> None:
    pool = make_pool(3)
    with pytest.raises(AssertionError, match="the null block cannot be held: leave it out"):
        pool.touch([pool.null_block])
    assert pool.null_block.ref_cnt == 0


@pytest.mark.parametrize("asked", [3, 4, 5])
def test_b43_exactly_as_many_as_there_are(asked: int) -> None:
    pool = make_pool(4)
    if asked > 4:
        with pytest.raises(AssertionError, match="beyond the free list"):
            pool.get_new_blocks(asked)
        assert pool.num_free_blocks == 4, "nothing was taken"
        return
    blocks = pool.get_new_blocks(asked)
    assert pool.num_free_blocks == 4 - asked
    pool.free_blocks(blocks)
    assert pool.num_free_blocks == 4


def test_freeing_twice_is_our_own_bug() -> None:
    """B59: a count below zero is never passed over."""
    pool = make_pool()
    blocks = pool.get_new_blocks(1)
    pool.free_blocks(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free_blocks(blocks)


def test_b83d_a_freed_block_can_be_hit_again_and_again() -> None:
    pool = make_pool()
    (block,) = take_and_publish(pool, 1)
    for _ in range(3):
        pool.free_blocks([block])
        assert pool.get_cached_block(key(1)) is block
        assert pool.num_free_among([block]) == 1
        pool.touch([block])
        assert (block.ref_cnt, pool.num_free_blocks) == (1, 3)
        assert pool.num_free_among([block]) == 0


def test_a_shared_block_is_free_when_its_last_holder_leaves() -> None:
    pool = make_pool()
    (block,) = take_and_publish(pool, 1)
    pool.touch([block])
    pool.free_blocks([block])
    assert pool.num_free_blocks == 3
    pool.free_blocks([block])
    assert pool.num_free_blocks == 4


def test_blocks_without_content_go_first_then_the_longest_unused_tail() -> None:
    pool = make_pool(6)
    first = take_and_publish(pool, 1, 2)
    second = take_and_publish(pool, 3, 4)
    empty = pool.get_new_blocks(2)
    pool.free_blocks(first)
    pool.free_blocks(second)
    pool.free_blocks(empty)
    order = [ids(pool.get_new_blocks(1))[0] for _ in range(6)]
    assert sorted(order[:2]) == sorted(ids(empty))
    assert order[2:] == ids([first[1], first[0], second[1], second[0]])


def test_a_hit_makes_a_block_the_most_recently_used() -> None:
    pool = make_pool(2)
    old, new = take_and_publish(pool, 1), take_and_publish(pool, 2)
    pool.free_blocks(old)
    pool.free_blocks(new)
    pool.touch(old)
    pool.free_blocks(old)
    assert ids(pool.get_new_blocks(1) + pool.get_new_blocks(1)) == ids(new + old)


def test_b61_the_map_forgets_what_the_pool_forgets() -> None:
    pool = make_pool(4)
    for number in range(100_000):
        pool.free_blocks(take_and_publish(pool, number))
        assert pool.num_cached_blocks <= 4
    assert pool.get_cached_block(key(0)) is None
    assert pool.get_cached_block(key(99_999)) is not None


def test_content_is_offered_once() -> None:
    pool = make_pool()
    one, two = pool.get_new_blocks(2)
    assert mark(pool, one, 1)
    assert not mark(pool, two, 1)
    assert two.block_hash is None
    with pytest.raises(AssertionError, match="has a hash already"):
        mark(pool, one, 2)


def test_without_caching_nothing_can_be_found() -> None:
    pool = make_pool(caching=False)
    (block,) = pool.get_new_blocks(1)
    assert not mark(pool, block, 1)
    assert pool.get_cached_block(key(1)) is None
    assert pool.num_cached_blocks == 0


async def test_events_tell_of_published_content_only() -> None:
    bus = EventBus()
    stream = bus.subscribe()
    pool = make_pool(1, bus=bus)
    (block,) = pool.get_new_blocks(1)
    mark(pool, block, 1)
    pool.withdraw(block)  # never published: nothing to tell
    pool.withdraw(block)
    mark(pool, block, 2, step_id=2)
    pool.publish(block)
    pool.free_blocks([block])
    pool.get_new_blocks(1)
    pool.free_blocks([block])
    assert pool.reset_prefix_cache()
    assert await drained(stream) == [
        BlockStored(0.0, 1, key(2), *tokens(2)),
        BlockRemoved(0.0, 1, key(2)),
        BlockCleared(0.0),
    ]


def test_resetting_needs_a_pool_that_nobody_uses() -> None:
    pool = make_pool()
    blocks = take_and_publish(pool, 1, 2)
    pool.free_blocks(blocks[1:])
    assert not pool.reset_prefix_cache()
    assert pool.num_cached_blocks == 2
    pool.free_blocks(blocks[:1])
    assert pool.reset_prefix_cache()
    assert pool.num_cached_blocks == 0
    assert all(block.block_hash is None for block in pool.blocks)


def test_resetting_puts_what_is_free_in_order_again() -> None:
    """Or else a prefix that is loaded after a reset would lie in as many runs as before it."""
    pool = make_pool(200)
    held = [pool.get_new_blocks(3) for _ in range(66)]
    for blocks in held[::2] + held[1::2]:
        pool.free_blocks(blocks)
    assert len(runs_of(block.block_id for block in pool.get_new_blocks(99))) > 1
    pool = make_pool(200)
    held = [pool.get_new_blocks(3) for _ in range(66)]
    for blocks in held[::2] + held[1::2]:
        pool.free_blocks(blocks)
    assert pool.reset_prefix_cache()
    assert ids(pool.get_new_blocks(99)) == list(range(1, 100))


@pytest.mark.parametrize("has_content", [True, False])
def test_what_was_freed_together_is_a_run_again(has_content: bool) -> None:
    """Tails are freed before heads, and still a later request gets neighbours in order."""
    pool = make_pool(64)
    other = pool.get_new_blocks(10)
    for turn in range(3):
        if has_content:
            blocks = take_and_publish(pool, *range(100 * turn, 100 * turn + 40))
        else:
            blocks = pool.get_new_blocks(40)
        first = blocks[0].block_id
        assert ids(blocks) == list(range(first, first + 40))
        pool.free_blocks(blocks)
        pool.get_new_blocks(pool.num_free_blocks - 40)
        assert pool.num_free_blocks == 40
    assert all(block.ref_cnt == 1 for block in other)
