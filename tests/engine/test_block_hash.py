"""B76, B77, B78: hashes are tagged, cover everything, and are equal in every process."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.engine.block_hash import (
    SEGMENT_BLOCKS,
    BlockHash,
    HashMemo,
    extend_hashes,
    root_hash,
)

SRC = Path(__file__).resolve().parents[2] / "src"
KEYS = [None, "", "x", "y", "salt", "adapter", "x" * 300, "\ud800"]


def hashes_of(
    token_ids: list[int], *, salt: str | None = None, adapter: str | None = None, size: int = 4
) -> list[BlockHash]:
    hashes: list[BlockHash] = []
    extend_hashes(hashes, root_hash(cache_salt=salt, adapter=adapter), token_ids, size)
    return hashes


def test_b76_salt_and_adapter_never_stand_for_each_other() -> None:
    pairs = list(itertools.product(KEYS, KEYS))
    roots = {root_hash(cache_salt=salt, adapter=adapter) for salt, adapter in pairs}
    assert len(roots) == len(pairs)


def test_b76_no_key_can_be_written_to_look_like_two() -> None:
    forged = "x" + "adapter" + "\x01\0\0\0\0\0\0\0" + "y"
    assert root_hash(cache_salt=forged) != root_hash(cache_salt="x", adapter="y")


def test_b77_many_extra_keys_do_not_collide() -> None:
    roots = {root_hash(cache_salt=str(i)) for i in range(50_000)}
    roots |= {root_hash(adapter=str(i)) for i in range(50_000)}
    assert len(roots) == 100_000
    assert {len(root) for root in roots} == {32}


def test_b77_extra_keys_change_every_block() -> None:
    chains = [hashes_of([1] * 12, salt=s, adapter=a) for s in (None, "x") for a in (None, "x")]
    assert len(set(itertools.chain(*chains))) == 4 * 3


@given(st.lists(st.integers(0, 2**40), max_size=40), st.integers(1, 9), st.data())
def test_hashing_bit_by_bit_is_hashing_at_once(
    token_ids: list[int], size: int, data: st.DataObject
) -> None:
    grown: list[BlockHash] = []
    end = 0
    while end < len(token_ids):
        end += data.draw(st.integers(1, len(token_ids) - end))
        extend_hashes(grown, root_hash(), token_ids[:end], size)
    assert grown == hashes_of(token_ids, size=size)
    assert len(grown) == len(token_ids) // size


@given(st.lists(st.integers(0, 3), min_size=12, max_size=12), st.integers(0, 11))
def test_a_changed_token_changes_its_block_and_all_after_it(ids: list[int], at: int) -> None:
    changed = [*ids]
    changed[at] += 1
    before, after = hashes_of(ids), hashes_of(changed)
    for block in range(3):
        assert (before[block] == after[block]) == (block < at // 4)


def test_equal_blocks_at_different_places_differ() -> None:
    assert len(set(hashes_of([1, 2, 3, 4] * 5))) == 5


def test_wide_ids_are_not_cut() -> None:
    assert hashes_of([1, 2, 3, 4]) != hashes_of([1 + 2**32, 2, 3, 4])


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_b78_every_process_hashes_alike(seed: str) -> None:
    code = (
        "from interlace.engine.block_hash import extend_hashes, root_hash; h = []\n"
        "extend_hashes(h, root_hash(cache_salt='s', adapter='a'), range(40), 16)\n"
        "print(h[-1].hex())"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.strip()
    here = hashes_of(list(range(40)), salt="s", adapter="a", size=16)
    assert found == here[-1].hex()


def test_b78_the_hash_is_what_it_was_in_the_last_release() -> None:
    """Stored KV is found again by it: whoever changes this changes `_DOMAIN` with it."""
    assert hashes_of([1, 2, 3, 4])[0].hex() == PINNED


PINNED = "f9ab500d60931cc9854f3e6a2bcc404a94401349fd43281ed5c3b7eb79da7650"


@given(
    st.lists(
        st.tuples(
            st.sampled_from([None, "salt"]),
            st.integers(0, 5 * SEGMENT_BLOCKS),
            st.lists(st.integers(0, 3), max_size=3),
            st.integers(1, 4),
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 3),
)
def test_what_a_memo_knows_is_what_would_be_computed(
    prompts: list[tuple[str | None, int, list[int], int]], max_segments: int
) -> None:
    """Prompts that share beginnings, under other roots and block sizes, in a memo that forgets."""
    memo = HashMemo(max_segments)
    for salt, length, tail, size in prompts:
        token_ids = [i % 7 for i in range(length)] + tail
        root = root_hash(cache_salt=salt)
        found: list[BlockHash] = []
        extend_hashes(found, root, token_ids, size, memo)
        assert found == hashes_of(token_ids, salt=salt, size=size)
        extend_hashes(found, root, [*token_ids, *range(9)], size)
        assert found == hashes_of([*token_ids, *range(9)], salt=salt, size=size)
