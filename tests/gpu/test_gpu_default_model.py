"""The default model on a GPU gives the reference's ids, in every graph mode, alone and together.

A difference counts only where the reference's best two logits lie more than `LEAST_MARGIN` apart;
behind one that does not count the answers go different ways, and are not compared any further.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from reference import CASES, GREEDY

from interlace import AsyncEngine, EngineConfig
from interlace.engine.errors import ModelError
from interlace.engine.outputs import Completion
from interlace.layers.checkpoint import LoadedModel, load_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
MODES = ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]
LEAST_MARGIN = 1e-3
PATIENCE_S = 300.0


def load(dtype: str) -> LoadedModel:
    try:
        return load_checkpoint("smollm2-135m", device="cuda", dtype=dtype)
    except ModelError as error:
        pytest.skip(f"the default model is neither in the cache nor can it be fetched: {error}")


@pytest.fixture(scope="module")
def float32_model() -> LoadedModel:
    return load("float32")


@pytest.fixture(scope="module")
def bfloat16_model() -> LoadedModel:
    return load("bfloat16")


def config_of(mode: str, depth: int) -> EngineConfig:
    """The long prompt comes in two chunks; a few sizes are captured."""
    return EngineConfig(
        cudagraph_mode=mode,
        max_inflight_steps=depth,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        num_gpu_blocks_override=200,
    )


def num_right(found: Completion, case: dict[str, Any]) -> int:
    """How many tokens are the reference's before the first difference that counts."""
    right = case["output_ids"]
    for i, (token, expected) in enumerate(zip(found.token_ids, right, strict=True)):
        if token != expected:
            return i if case["top1_top2_margins"][i] > LEAST_MARGIN else len(right)
    return len(right)


async def ask(engine: AsyncEngine, case: dict[str, Any]) -> Completion:
    async with asyncio.timeout(PATIENCE_S):
        return await engine.complete(case["prompt"], GREEDY)


async def forget(engine: AsyncEngine) -> None:
    """Begin anew, with nothing cached."""
    async with asyncio.timeout(PATIENCE_S):
        while not engine.snapshot().idle:  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.001)
    assert engine.reset_prefix_cache()


async def ask_all(engine: AsyncEngine) -> list[Completion]:
    return await asyncio.gather(*(ask(engine, case) for case in CASES))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("depth", [1, 2])
async def test_float32_gives_the_references_ids(
    mode: str, depth: int, float32_model: LoadedModel
) -> None:
    async with AsyncEngine.from_loaded(config_of(mode, depth), float32_model) as engine:
        alone = []
        for case in CASES:
            alone.append(await ask(engine, case))
            await forget(engine)
        together = await ask_all(engine)
        cached = await ask_all(engine)
    assert any(one.usage.num_local_cached_tokens for one in cached)
    for kind, answers in (("alone", alone), ("together", together), ("cached", cached)):
        for case, answer in zip(CASES, answers, strict=True):
            where = f"{case['name']}, {kind}: {answer.token_ids}"
            assert answer.usage.num_prompt_tokens == case["n_prompt"], where
            assert num_right(answer, case) == len(case["output_ids"]), where


@pytest.mark.parametrize("mode", ["NONE", "FULL_AND_PIECEWISE"])
async def test_bfloat16_agrees_for_five_tokens_on_six_of_seven(
    mode: str, bfloat16_model: LoadedModel
) -> None:
    async with AsyncEngine.from_loaded(config_of(mode, 2), bfloat16_model) as engine:
        alone = [await ask(engine, case) for case in CASES]
        await forget(engine)
        together = await ask_all(engine)
    for kind, answers in (("alone", alone), ("together", together)):
        right = {c["name"]: num_right(a, c) for c, a in zip(CASES, answers, strict=True)}
        assert sum(number >= 5 for number in right.values()) >= 6, (kind, right)
