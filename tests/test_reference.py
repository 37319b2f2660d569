"""The default model gives exactly the reference's ids and texts, in whatever company."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from reference import CASES, GREEDY, all_together, check

from interlace import AsyncEngine, EngineConfig

if TYPE_CHECKING:
    from interlace.layers.checkpoint import LoadedModel

pytestmark = pytest.mark.timeout(600)  # half a minute each on a quiet machine with two cores

POOL_FOR_ONE = 67
"""Blocks: the longest case, which comes first, needs 64 of 66, so others must be preempted."""


@pytest.mark.parametrize("depth", [1, 2])
async def test_one_by_one_cold_then_together_with_prefixes_cached(
    default_model: LoadedModel, depth: int
) -> None:
    config = EngineConfig(max_inflight_steps=depth)
    async with AsyncEngine.from_loaded(config, default_model) as engine:
        for case in CASES if depth == 1 else CASES[-1:]:  # alone, depth changes least
            answer = await engine.complete(case["prompt"], GREEDY)
            check(case, answer)
            assert answer.usage.num_local_cached_tokens == 0
            assert engine.reset_prefix_cache()
        await all_together(engine)
        if depth == 2:
            await all_together(engine)  # with all prefixes cached
        cached = await engine.complete(CASES[0]["prompt"], GREEDY)
        check(CASES[0], cached)
        assert cached.usage.num_local_cached_tokens == CASES[0]["n_prompt"] - 1


@pytest.mark.parametrize(("limit", "depth"), [("chunks_of_16", 2), ("preemption", 2)])
async def test_together_within_tight_limits(
    default_model: LoadedModel, depth: int, limit: str
) -> None:
    if limit == "preemption":
        config = EngineConfig(max_inflight_steps=depth, num_gpu_blocks_override=POOL_FOR_ONE)
    else:
        config = EngineConfig(max_inflight_steps=depth, max_num_batched_tokens=16)
    async with AsyncEngine.from_loaded(config, default_model) as engine:
        await all_together(engine, CASES if limit == "preemption" else CASES[:4])
        stats = engine.snapshot().stats
        assert (stats.num_preemptions > 0) == (limit == "preemption")


async def test_two_engines_in_one_process(default_model: LoadedModel) -> None:
    config = EngineConfig()
    async with (
        AsyncEngine.from_loaded(config, default_model) as first,
        AsyncEngine.from_loaded(config, default_model) as second,
    ):
        await asyncio.gather(all_together(first, CASES[1:5]), all_together(second, CASES[2:6]))
