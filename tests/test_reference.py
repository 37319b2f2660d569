"""The default model gives exactly the reference's ids and texts, in whatever company."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from interlace import AsyncEngine, Completion, EngineConfig, SamplingParams

if TYPE_CHECKING:
    from interlace.layers.checkpoint import LoadedModel

REFERENCE = json.loads((Path(__file__).parent / "data" / "smollm2_reference.json").read_text())

pytestmark = pytest.mark.timeout(600)  # half a minute each on a quiet machine with two cores


def _longest_then_shortest(case: dict[str, Any]) -> int:
    """An order in which the small pool of the preemption test is full at once."""
    return -1 if case["name"] == "long_1000" else int(case["n_prompt"])


CASES: list[dict[str, Any]] = sorted(REFERENCE["cases"], key=_longest_then_shortest)
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, skip_special_tokens=False)
POOL_FOR_ONE = 67
"""Blocks: the longest case, which comes first, needs 64 of 66, so others must be preempted."""


def _check(case: dict[str, Any], answer: Completion) -> None:
    assert list(answer.token_ids) == case["output_ids"], case["name"]
    assert answer.text == case["output_text"], case["name"]
    assert answer.usage.num_prompt_tokens == case["n_prompt"]
    assert answer.finish_reason == "length"


async def _all_together(engine: AsyncEngine) -> None:
    answers = await asyncio.gather(*(engine.complete(case["prompt"], GREEDY) for case in CASES))
    for case, answer in zip(CASES, answers, strict=True):
        _check(case, answer)


@pytest.mark.parametrize("depth", [1, 2])
async def test_one_by_one_cold_then_together_with_prefixes_cached(
    default_model: LoadedModel, depth: int
) -> None:
    config = EngineConfig(max_inflight_steps=depth)
    async with AsyncEngine.from_loaded(config, default_model) as engine:
        for case in CASES:
            answer = await engine.complete(case["prompt"], GREEDY)
            _check(case, answer)
            assert answer.usage.num_local_cached_tokens == 0
            assert engine.reset_prefix_cache()
        await _all_together(engine)
        await _all_together(engine)
        cached = await engine.complete(CASES[0]["prompt"], GREEDY)
        _check(CASES[0], cached)
        assert cached.usage.num_local_cached_tokens == CASES[0]["n_prompt"] - 1


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("limit", ["chunks_of_16", "preemption"])
async def test_together_within_tight_limits(
    default_model: LoadedModel, depth: int, limit: str
) -> None:
    if limit == "preemption":
        config = EngineConfig(max_inflight_steps=depth, num_gpu_blocks_override=POOL_FOR_ONE)
    else:
        config = EngineConfig(max_inflight_steps=depth, max_num_batched_tokens=16)
    async with AsyncEngine.from_loaded(config, default_model) as engine:
        await _all_together(engine)
        stats = engine.snapshot().stats
        assert (stats.num_preemptions > 0) == (limit == "preemption")


async def test_two_engines_in_one_process(default_model: LoadedModel) -> None:
    config = EngineConfig()
    async with (
        AsyncEngine.from_loaded(config, default_model) as first,
        AsyncEngine.from_loaded(config, default_model) as second,
    ):
        await asyncio.gather(_all_together(first), _all_together(second))
