"""Blocks and requests together: hits, admission, allocation, and when freed blocks come back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import ManualClock

from interlace.engine.config import CacheConfig
from interlace.engine.events import EventBus
from interlace.engine.kv_cache_manager import KVCacheManager
from interlace.engine.request import Request
from interlace.engine.sampling_params import SamplingParams

SIZE = 4


def make_manager(num_usable: int) -> KVCacheManager:
    return KVCacheManager(CacheConfig(SIZE, num_usable + 1), ManualClock(), EventBus())


def make_request(prompt: Sequence[int], name: str = "r") -> Request:
    return Request(name, prompt, SamplingParams(), seed=0, arrival=0, block_size=SIZE)


def fill(manager: KVCacheManager, prompt: Sequence[int], step_id: int = 1) -> Request:
    """A request whose whole prompt was computed by `step_id`, which was applied."""
    request = make_request(prompt)
    manager.take_hit(request, manager.find_longest_hit(request), step_id)
    assert manager.allocate(request, len(prompt)) is not None
    manager.hash_blocks(request, len(prompt), step_id)
    manager.apply_step(step_id)
    request.last_step_id = step_id
    request.num_computed_tokens = len(prompt)
    return request


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 9, 16, 32, 48])
def test_b45_b46_a_hit_leaves_one_token_to_compute_and_is_else_as_long_as_can_be(
    num_tokens: int,
) -> None:
    manager = make_manager(40)
    prompt = list(range(num_tokens))
    manager.free(fill(manager, prompt), 1)
    hit = manager.find_longest_hit(make_request(prompt))
    assert len(hit.blocks) == (num_tokens - 1) // SIZE
    assert hit.num_tokens == num_tokens - 1
    longer = manager.find_longest_hit(make_request([*prompt, 99]))
    assert len(longer.blocks) == num_tokens // SIZE
    assert longer.num_tokens == num_tokens


def test_a_hit_ends_where_the_chain_breaks() -> None:
    manager = make_manager(10)
    request = fill(manager, range(16))
    manager.pool.withdraw(request.blocks[1])
    assert manager.find_longest_hit(make_request(range(17))).num_tokens == 4
    assert manager.find_longest_hit(make_request([9, *range(16)])).num_tokens == 0


def test_looking_up_changes_nothing() -> None:
    """B18"""
    manager = make_manager(4)
    manager.free(fill(manager, range(12)), 1)
    request = make_request(range(13))
    found = [manager.find_longest_hit(request) for _ in range(3)]
    assert found[0] == found[1] == found[2]
    assert manager.pool.num_free_blocks == 4
    assert request.blocks == []


def test_b49_matched_blocks_are_held_before_anything_is_allocated() -> None:
    """The pool is just big enough: an allocation first would evict what was found."""
    manager = make_manager(4)
    manager.free(fill(manager, range(12)), 1)
    again = make_request(range(14))
    hit = manager.find_longest_hit(again)
    assert manager.can_admit(again, hit)
    manager.take_hit(again, hit, step_id=2)
    assert manager.allocate(again, 14) is not None
    assert again.blocks[:3] == hit.blocks
    assert len({block.block_id for block in again.blocks}) == 4
    assert manager.find_longest_hit(make_request(range(13))).blocks == hit.blocks


@pytest.mark.parametrize("num_tokens", [12, 13, 15, 16, 17, 20])
def test_b43_a_pool_of_exactly_that_many_blocks(num_tokens: int) -> None:
    manager = make_manager(4)
    request = make_request(range(num_tokens))
    hit = manager.find_longest_hit(request)
    fits = num_tokens <= 16
    assert manager.can_admit(request, hit) == fits
    blocks = manager.allocate(request, num_tokens)
    if fits:
        assert blocks is not None
        assert len(blocks) == -(-num_tokens // SIZE)
    else:
        assert blocks is None
        assert request.blocks == []
        assert manager.pool.num_free_blocks == 4


prompts = st.integers(1, 40).flatmap(
    lambda n: st.sampled_from([[i % 3 for i in range(n)], [1] * n, list(range(n))])
)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(3, 14), st.lists(st.tuples(prompts, st.booleans()), max_size=8), prompts, st.data()
)
def test_b83e_who_may_be_admitted_can_be_allocated(
    num_usable: int,
    history: list[tuple[list[int], bool]],
    prompt: list[int],
    data: st.DataObject,
) -> None:
    manager = make_manager(num_usable)
    for step, (old, stays) in enumerate(history, start=1):
        if manager.can_admit(make_request(old), manager.find_longest_hit(make_request(old))):
            request = fill(manager, old, step)
            if not stays:
                manager.free(request, step)
    request = make_request(prompt)
    hit = manager.find_longest_hit(request)
    if not manager.can_admit(request, hit):
        new = -(-len(prompt) // SIZE) - len(hit.blocks)
        freed = manager.pool.num_free_blocks - manager.pool.num_free_among(hit.blocks)
        assert new > freed, "it was refused for good reason"
        return
    manager.take_hit(request, hit, step_id=len(history) + 1)
    done = hit.num_tokens
    while done < len(prompt):  # in chunks, as the budget has it
        done += data.draw(st.integers(1, len(prompt) - done))
        assert manager.allocate(request, done) is not None
    assert len(request.blocks) == -(-len(prompt) // SIZE)
    assert len({block.block_id for block in request.blocks}) == len(request.blocks)


def test_a_block_is_pending_until_its_step_is_applied() -> None:
    manager = make_manager(8)
    one, two = make_request(range(8)), make_request(range(9))
    manager.allocate(one, 6)
    manager.hash_blocks(one, 6, 1)
    manager.allocate(one, 8)
    manager.hash_blocks(one, 8, 2)
    assert [block.pending_step for block in one.blocks] == [1, 2]
    assert manager.find_longest_hit(two).blocks == one.blocks, "whoever comes later may share"
    manager.apply_step(1)
    assert [block.pending_step for block in one.blocks] == [None, 2]
    manager.apply_step(2)
    assert [block.pending_step for block in one.blocks] == [None, None]


def test_content_that_was_withdrawn_is_not_published_by_its_old_step() -> None:
    manager = make_manager(8)
    one, two = make_request(range(4)), make_request(range(4))
    manager.allocate(one, 4)
    manager.hash_blocks(one, 4, 1)
    manager.pool.withdraw(one.blocks[0])
    manager.allocate(two, 4)
    manager.hash_blocks(two, 4, 2)
    manager.apply_step(1)
    assert one.blocks[0].block_hash is None
    assert two.blocks[0].pending_step == 2
    manager.apply_step(2)
    assert two.blocks[0].pending_step is None


def test_only_known_tokens_are_hashed() -> None:
    manager = make_manager(8)
    request = make_request(range(7))
    manager.allocate(request, 8)
    manager.hash_blocks(request, 8, 1)  # the eighth token is being sampled
    assert [block.block_hash is None for block in request.blocks] == [False, True]
    request.append_output(3)
    manager.hash_blocks(request, 8, 2)
    assert request.blocks[1].pending_step == 2


def test_b02_freed_blocks_come_back_with_the_newest_step_that_touches_them() -> None:
    manager = make_manager(8)
    requests = [make_request([i] * 8, f"r{i}") for i in range(3)]
    for request, last_step in zip(requests, (3, 1, 2), strict=True):
        manager.allocate(request, 8)
        request.last_step_id = last_step
    for request in requests:
        manager.free(request, last_applied_step=0)
        manager.free(request, last_applied_step=0)
    assert (manager.pool.num_free_blocks, manager.num_fenced_blocks) == (2, 6)
    for step, free in ((1, 4), (2, 6), (3, 8)):
        manager.apply_step(step)
        assert manager.pool.num_free_blocks == free
    assert manager.num_fenced_blocks == 0


def test_a_request_that_no_step_touches_frees_at_once() -> None:
    manager = make_manager(8)
    request = fill(manager, range(8), step_id=1)
    manager.free(request, last_applied_step=1)
    assert manager.pool.num_free_blocks == 8


# --- the first tokens of a block, copied ---------------------------------------------------------


def test_the_first_tokens_of_a_published_block_are_copied() -> None:
    """I14"""
    manager = make_manager(8)
    first = fill(manager, [0, 1, 2, 3, 4, 5, 6, 7])
    hit = manager.find_longest_hit(make_request([0, 1, 2, 3, 4, 5, 99, 98, 97]))
    assert hit.blocks == first.blocks[:1]
    assert hit.tail is first.blocks[1]
    assert hit.num_tokens == 6
    assert manager.find_longest_hit(make_request([0, 1, 2, 9])).num_tokens == 3
    assert manager.find_longest_hit(make_request([1, 2, 3])) == ([], 0, None)


def test_a_pending_block_is_not_copied() -> None:
    """I14: the step that fills it may be the one that would copy it."""
    manager = make_manager(8)
    one = make_request(range(4))
    manager.allocate(one, 4)
    manager.hash_blocks(one, 4, 1)
    assert manager.find_longest_hit(make_request([0, 1, 9])).num_tokens == 0
    manager.apply_step(1)
    assert manager.find_longest_hit(make_request([0, 1, 9])).num_tokens == 2


def test_the_partly_filled_block_of_a_request_is_copied_once_nothing_writes_to_it() -> None:
    manager = make_manager(8)
    request = make_request(range(6))
    manager.allocate(request, 6)
    request.num_computed_tokens, request.last_step_id = 6, 2
    manager.hash_blocks(request, 6, 2)
    manager.apply_step(1)
    tail = request.blocks[1]
    manager.free(request, last_applied_step=1)
    assert manager.find_longest_hit(make_request(range(20))).num_tokens == 4
    manager.apply_step(2)
    hit = manager.find_longest_hit(make_request(range(20)))
    assert (hit.num_tokens, hit.tail) == (6, tail)
    manager.pool.get_new_blocks(8)
    assert manager.find_longest_hit(make_request(range(20))).num_tokens == 0, "evicted"


def test_a_token_that_nobody_knows_yet_is_not_part_of_a_tail() -> None:
    manager = make_manager(8)
    request = make_request(range(5))
    manager.allocate(request, 7)
    request.num_computed_tokens = 7  # two steps in flight sampled and computed what is dropped
    manager.hash_blocks(request, 7, step_id=1)
    manager.free(request, last_applied_step=0)
    hit = manager.find_longest_hit(make_request([*range(5), 5, 6, 7]))
    assert hit.num_tokens == 5
    assert hit.tail is not None


def test_the_source_of_a_copy_is_held_until_the_copy_was_made() -> None:
    """I14"""
    manager = make_manager(3)
    manager.free(fill(manager, range(6)), 1)
    request = make_request([0, 1, 2, 3, 4, 99])
    hit = manager.find_longest_hit(request)
    assert hit.tail is not None
    manager.take_hit(request, hit, step_id=2)
    assert (hit.tail.ref_cnt, manager.num_fenced_blocks) == (1, 1)
    assert manager.allocate(request, 6) is not None
    assert request.blocks[1] is not hit.tail
    assert manager.allocate(make_request([7] * 4), 4) is None
    manager.apply_step(2)
    assert (hit.tail.ref_cnt, manager.num_fenced_blocks) == (0, 0)
    manager.free(request, 2)
    assert manager.find_longest_hit(make_request(range(6))).num_tokens == 5


def test_no_copy_where_only_one_of_the_two_blocks_has_room() -> None:
    manager = make_manager(2)
    manager.free(fill(manager, range(6)), 1)
    request = make_request([0, 1, 2, 3, 4, 99])
    hit = manager.find_longest_hit(request)
    assert (hit.num_tokens, hit.tail) == (4, None)
    assert manager.can_admit(request, hit)


def test_a_copy_stays_within_its_salt() -> None:
    manager = make_manager(8)
    salted = Request(
        "s", range(3), SamplingParams(), seed=0, arrival=0, block_size=SIZE, cache_salt="x"
    )
    manager.allocate(salted, 3)
    salted.num_computed_tokens = 3
    manager.free(salted, 0)
    assert manager.find_longest_hit(make_request(range(4))).num_tokens == 0


def test_among_blocks_that_begin_alike_the_newest_stands_unless_an_older_one_holds_more() -> None:
    manager = make_manager(12)
    for step, prompt in enumerate(([1, 2, 3], [1, 2], [1, 5, 6]), start=1):
        request = make_request(prompt)
        manager.allocate(request, len(prompt))
        request.num_computed_tokens = len(prompt)
        manager.free(request, step)
        asked = manager.find_longest_hit(make_request([1, 2, 3, 9]))
        assert asked.num_tokens == [3, 3, 1][step - 1]


def test_without_caching_nothing_is_copied() -> None:
    manager = KVCacheManager(
        CacheConfig(SIZE, 9, enable_prefix_caching=False), ManualClock(), EventBus()
    )
    manager.free(fill(manager, range(6)), 1)
    assert manager.find_longest_hit(make_request(range(6))) == ([], 0, None)
