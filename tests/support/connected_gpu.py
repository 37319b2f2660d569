"""Small engines with a connector, for tests on a GPU: their blocks are handed on soon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from interlace import AsyncEngine, EngineConfig, KVTransferConfig, SamplingParams
from interlace.engine.outputs import Completion
from interlace.layers.checkpoint import LoadedModel

PATIENCE_S = 60.0
BLOCK_SIZE = 4
NUM_TOKENS = 9
COMMON = [5, 9, 2, 7, 1, 1, 8, 3]
PROMPTS = [COMMON + [i] * (5 * i) for i in range(1, 6)] + [COMMON[:6], list(range(50))]


@asynccontextmanager
async def an_engine(
    model: LoadedModel,
    connector: str,
    extra: dict[str, Any],
    *,
    mode: str | None = None,
    depth: int = 1,
    **options: Any,
) -> AsyncIterator[AsyncEngine]:
    """With room for few requests. `mode` is a `cudagraph_mode`."""
    given: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": 60,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 64,
        **options,
    }
    config = EngineConfig(
        cudagraph_mode=mode,
        max_inflight_steps=depth,
        kv_transfer_config=KVTransferConfig(
            kv_connector=connector,
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
        ),
        **given,
    )
    async with AsyncEngine.from_loaded(config, model) as engine:
        yield engine


async def ask(
    engine: AsyncEngine, prompt: Sequence[int], num_tokens: int = NUM_TOKENS
) -> Completion:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    async with asyncio.timeout(PATIENCE_S):
        return await engine.complete(list(prompt), params)


async def ask_all(engine: AsyncEngine, answers: list[list[int]]) -> list[Completion]:
    """All prompts at once; each answer is right."""
    done = await asyncio.gather(*(ask(engine, prompt) for prompt in PROMPTS))
    assert [list(one.token_ids) for one in done] == answers
    return list(done)


def _has_settled(engine: AsyncEngine) -> bool:
    snapshot = engine.snapshot()
    return snapshot.idle and not snapshot.num_held_requests


async def settle(engine: AsyncEngine) -> None:
    """Until every save has ended: some of them arrive steps after they were queued."""
    async with asyncio.timeout(PATIENCE_S):
        while not _has_settled(engine):  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.002)
    assert engine.snapshot().stats.num_stray_reports == 0
