"""PipelineConnector on a GPU: whole engines in every mode of loading, eager and with full graphs,
right answers after eviction on both sides, in `interlace check` too. Each test has a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import connected_gpu
import pytest
import torch
from connected_gpu import BLOCK_SIZE, NUM_TOKENS, PROMPTS, ask, ask_all, settle
from tiny_model import plain_answer, tiny_model

from interlace import AsyncEngine
from interlace.connectors.conformance import PROPERTIES, check_connector
from interlace.connectors.conformance.deadline import call_within
from interlace.connectors.pipeline_connector import PipelineConnector
from interlace.layers.checkpoint import LoadedModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CHECK_S = 110.0
RECORD_BYTES = 2 * 2 * BLOCK_SIZE * 2 * 64 * 4
"""Layers, K and V, tokens, heads, head size, float32."""

graphs = pytest.mark.parametrize("graphs", ["NONE", "PIECEWISE", "FULL_AND_PIECEWISE"])
both_depths = pytest.mark.parametrize("depth", [1, 2])
ways = pytest.mark.parametrize("load_mode", ["layerwise", "bulk", "hybrid"])


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_model(dtype=torch.float32, head_dim=64, device="cuda")


@pytest.fixture(scope="module")
def answers() -> list[list[int]]:
    plain = tiny_model(head_dim=64)
    return [plain_answer(plain, prompt, NUM_TOKENS) for prompt in PROMPTS]


@asynccontextmanager
async def an_engine(
    model: LoadedModel,
    load_mode: str,
    *,
    graphs: str = "NONE",
    depth: int = 1,
    num_records: int = 1000,
    group_size: int = 1,
    **options: Any,
) -> AsyncIterator[AsyncEngine]:
    """Over host memory of so many records."""
    extra = {
        "load_mode": load_mode,
        "group_size": group_size,
        "host_bytes": num_records * RECORD_BYTES,
    }
    async with connected_gpu.an_engine(
        model, "PipelineConnector", extra, mode=graphs, depth=depth, **options
    ) as engine:
        yield engine


async def forget_on_device(engine: AsyncEngine) -> None:
    """Once every save has ended."""
    await settle(engine)
    assert engine.reset_prefix_cache()


@graphs
@both_depths
@ways
async def test_right_answers_from_host_memory(
    load_mode: str, depth: int, graphs: str, model: LoadedModel, answers: list[list[int]]
) -> None:
    async with an_engine(model, load_mode, graphs=graphs, depth=depth) as engine:
        assert engine.config.cudagraph_mode == graphs, "its gates work in full graphs"
        await ask_all(engine, answers)
        for _ in range(4):
            await forget_on_device(engine)
            done = await ask_all(engine, answers)
            for prompt, one in zip(PROMPTS, done, strict=True):
                usage = one.usage
                found = usage.num_external_cached_tokens + usage.num_local_cached_tokens
                if load_mode != "hybrid":
                    assert found >= (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
            assert sum(one.usage.num_external_cached_tokens for one in done) > 20
        assert engine.snapshot().stats.num_invalid_blocks == 0


@both_depths
@ways
async def test_a_load_beside_decodes(
    load_mode: str, depth: int, model: LoadedModel, answers: list[list[int]]
) -> None:
    """A request with a hit joins a graphed batch of decodes, again and again."""
    async with an_engine(model, load_mode, graphs="FULL_AND_PIECEWISE", depth=depth) as engine:
        await ask(engine, PROMPTS[-1])
        for _ in range(10):
            await forget_on_device(engine)
            async with asyncio.TaskGroup() as group:
                others = [group.create_task(ask(engine, prompt)) for prompt in PROMPTS[:4]]
                await asyncio.sleep(0.003)
                one = await ask(engine, PROMPTS[-1])
            assert list(one.token_ids) == answers[-1]
            assert [list(other.result().token_ids) for other in others] == answers[:4]
            found = one.usage.num_external_cached_tokens
            assert 0 < found < 48 if load_mode == "hybrid" else found == 48


@graphs
@ways
async def test_little_memory_on_both_sides(
    load_mode: str, graphs: str, model: LoadedModel, answers: list[list[int]]
) -> None:
    """Records and blocks are reused at once, requests are preempted while they are saved."""
    async with an_engine(
        model, load_mode, graphs=graphs, depth=2, num_records=20, num_gpu_blocks_override=24
    ) as engine:
        for _ in range(5):
            await ask_all(engine, answers)
            await forget_on_device(engine)
        stats = engine.snapshot().stats
        assert stats.num_preemptions > 0
        assert stats.num_external_cached_tokens > 0
        assert stats.num_invalid_blocks == 0


async def test_it_learns_and_chooses(model: LoadedModel, answers: list[list[int]]) -> None:
    async with an_engine(model, "auto", graphs="FULL_AND_PIECEWISE", depth=2) as engine:
        for _ in range(3):
            await ask_all(engine, answers)
            await forget_on_device(engine)
        calls = engine._scheduler._connector
        assert calls is not None
        side = calls._connector
        assert isinstance(side, PipelineConnector)
        load_s = side._scheduler.chooser.load_rate.seconds(1 << 30)
        step_s = side._scheduler.chooser.step_times.seconds(64, 0)
        assert load_s is not None
        assert 1e-3 < load_s < 10
        assert step_s is not None
        assert 1e-6 < step_s < 1


@pytest.mark.parametrize("load_mode", ["layerwise", "bulk", "hybrid", "auto"])
@pytest.mark.parametrize("group_size", [1, 3])
def test_the_check_passes(load_mode: str, group_size: int) -> None:
    """Which way "auto" takes depends on times, so two plays with different numbers of queries may
    load different things."""
    extra = {"load_mode": load_mode, "group_size": group_size, "host_bytes": 1 << 17}
    ids = [one.id for one in PROPERTIES]
    only = [i for i in ids if load_mode != "auto" or i != "match-has-no-effects"]

    def check() -> None:
        report = check_connector(
            "PipelineConnector", extra_config=extra, quick=True, device="cuda", only=only
        )
        report.raise_if_failed()

    call_within(check, CHECK_S)
