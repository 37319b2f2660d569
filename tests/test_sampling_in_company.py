"""Sampling through the whole engine: the same request gives the same tokens in any company."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tiny_model import VOCAB_SIZE, tiny_model

from interlace import AsyncEngine, Completion, EngineConfig, SamplingParams

PROMPT = [5, 9, 2, 44, 9, 31]
ROOM: dict[str, Any] = {"num_gpu_blocks_override": 80}
"""Enough for all, and made at once: the default would be a hundred thousand blocks."""
PARAMS = [
    pytest.param(SamplingParams(temperature=1.3, seed=11, max_tokens=24), id="seed"),
    pytest.param(
        SamplingParams(temperature=0.9, seed=5, top_k=8, top_p=0.8, min_p=0.01, max_tokens=24),
        id="narrowed",
    ),
    pytest.param(
        SamplingParams(
            temperature=0,
            repetition_penalty=1.6,
            presence_penalty=0.8,
            frequency_penalty=0.7,
            max_tokens=24,
        ),
        id="penalties",
    ),
    pytest.param(
        SamplingParams(temperature=0, logit_bias={3: 50.0, 4: 49.0}, logprobs=2, max_tokens=8),
        id="bias",
    ),
    pytest.param(
        SamplingParams(temperature=1.0, seed=1, stop_token_ids=list(range(32)), min_tokens=6),
        id="min_tokens",
    ),
]


async def _answer(params: SamplingParams, config: EngineConfig, company: int) -> Completion:
    async with AsyncEngine.from_loaded(config, tiny_model()) as engine:
        others = [
            engine.complete(
                [(i * 3 + j) % VOCAB_SIZE for j in range(5 + i)],
                SamplingParams(temperature=1.0, max_tokens=10 + i),
            )
            for i in range(company)
        ]
        answers = await asyncio.gather(*others, engine.complete(PROMPT, params))
        return answers[-1]


@pytest.mark.parametrize("params", PARAMS)
async def test_company_depth_chunks_and_preemption_change_nothing(params: SamplingParams) -> None:
    alone = await _answer(params, EngineConfig(max_inflight_steps=1, **ROOM), 0)  # I11
    assert len(alone.token_ids) >= max(1, params.min_tokens)
    configs = [
        EngineConfig(max_inflight_steps=1, **ROOM),
        EngineConfig(max_inflight_steps=2, **ROOM),
        EngineConfig(max_inflight_steps=2, max_num_batched_tokens=3, **ROOM),
        EngineConfig(max_inflight_steps=2, block_size=4, num_gpu_blocks_override=12),
    ]
    for config in configs:
        answer = await _answer(params, config, 4)
        assert answer.token_ids == alone.token_ids
        assert answer.finish_reason == alone.finish_reason
        assert answer.stop_reason == alone.stop_reason
        if params.logprobs is not None:
            assert answer.logprobs is not None
            assert [chosen.token_id for chosen in answer.logprobs] == list(answer.token_ids)


async def test_seeds_of_the_engine_repeat_and_differ() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=16)

    async def two(seed: int) -> list[tuple[int, ...]]:
        async with AsyncEngine.from_loaded(EngineConfig(seed=seed, **ROOM), tiny_model()) as engine:
            return [(await engine.complete(PROMPT, params)).token_ids for _ in range(2)]

    first, again, other = await two(0), await two(0), await two(1)
    assert first == again
    assert first[0] != first[1]
    assert first != other


async def test_the_same_bias_on_every_token_changes_nothing() -> None:
    async with AsyncEngine.from_loaded(EngineConfig(), tiny_model()) as engine:
        everything = dict.fromkeys(range(VOCAB_SIZE), 0.5)
        params = SamplingParams(temperature=0, max_tokens=4, logit_bias=everything)
        plain = SamplingParams(temperature=0, max_tokens=4)
        biased = await engine.complete(PROMPT, params)
        assert biased.token_ids == (await engine.complete(PROMPT, plain)).token_ids
