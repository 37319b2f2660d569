"""A pool and records that were used for long."""

from __future__ import annotations

import pytest

from interlace.bench.overlap.lives import PoolLives
from interlace.bench.overlap.names import DEFAULT_PARTS, Part
from interlace.bench.overlap.sizes import Sizes
from interlace.bench.part_names import chosen


@pytest.mark.parametrize("full", [0.5, 0.95])
def test_loads_fit_and_the_pool_is_as_full_as_said(full: float) -> None:
    lives = PoolLives(256, 32, full, 7)
    lives.live(200)
    for _ in range(5):
        runs = lives.next_load()
        assert sum(run.num_blocks for run in runs) == 32
        blocks = [run.block_id + i for run in runs for i in range(run.num_blocks)]
        records = [run.record + i for run in runs for i in range(run.num_blocks)]
        assert len(set(blocks)) == len(set(records)) == 32
        assert all(0 < block <= 256 for block in blocks)
        assert all(0 <= record < 256 for record in records)
        assert full - 0.02 <= lives.full_share <= full


def test_equal_seeds_give_equal_lives() -> None:
    loads = []
    for seed in (1, 1, 2):
        lives = PoolLives(128, 16, 0.9, seed)
        lives.live(50)
        loads.append(lives.next_load())
    assert loads[0] == loads[1] != loads[2]


def test_parts_by_name() -> None:
    assert chosen(Part, [], DEFAULT_PARTS) == DEFAULT_PARTS
    assert chosen(Part, ["all"], DEFAULT_PARTS) == tuple(Part)
    assert chosen(Part, ["idle", "link", "idle"], ()) == (Part.LINK, Part.IDLE)
    with pytest.raises(ValueError, match="speed"):
        chosen(Part, ["speed"], ())


@pytest.mark.parametrize("prompt_tokens", [512, 8192, 32768])
def test_prompts_in_a_cycle_have_left_the_pool_when_they_come_again(prompt_tokens: int) -> None:
    sizes = Sizes(prompt_tokens, (16, 1984), 5)
    pool = sizes.pool_tokens(has_crowd=True)
    others = (sizes.num_cycled - 1) * prompt_tokens
    assert others + sizes.num_decoders * sizes.decoder_prompt > pool
    assert pool > sizes.crowd_tokens + sizes.longest
    assert sizes.record_tokens(has_crowd=True) >= sizes.num_cycled * prompt_tokens
