"""Engines over PipelineConnector with a store of files in a folder, and what their answers are."""

from __future__ import annotations

import asyncio
import collections
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from deep_model import deep_model
from pipeline_kit import BLOCK_SIZE, PATIENCE_S, RECORD_BYTES, ask, forget_on_device, some_tokens
from tiny_model import plain_answer

from interlace import AsyncEngine, EngineConfig, KVTransferConfig
from interlace.connectors.pipeline.sched_stats import PipelineStats
from interlace.connectors.pipeline.scheduler import PipelineScheduler
from interlace.connectors.pipeline_connector import PipelineConnector
from interlace.connectors.slab_store.files import read_at
from interlace.engine.outputs import Completion
from interlace.layers.checkpoint import LoadedModel

PROMPT = some_tokens(0, 10 * BLOCK_SIZE + 3)


@asynccontextmanager
async def engine_of(
    folder: Path,
    model: LoadedModel | None = None,
    *,
    depth: int = 1,
    num_records: int = 200,
    kv_role: Literal["kv_both", "kv_producer", "kv_consumer"] = "kv_both",
    policy: Literal["fail", "recompute"] = "recompute",
    block_size: int = BLOCK_SIZE,
    **options: Any,
) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(
        block_size=block_size,
        num_gpu_blocks_override=61,
        skip_tokenizer_init=True,
        max_inflight_steps=depth,
        max_num_batched_tokens=32,
        kv_transfer_config=KVTransferConfig(
            kv_connector="PipelineConnector",
            kv_role=kv_role,
            kv_load_failure_policy=policy,
            kv_connector_extra_config={
                "store": "file",
                "path": str(folder),
                "slab_bytes": 1 << 16,
                "min_free_bytes": 0,
                "load_mode": "bulk",
                "host_bytes": num_records * RECORD_BYTES,
                **options,
            },
        ),
    )
    model = model or deep_model()
    async with asyncio.timeout(2 * PATIENCE_S), AsyncEngine.from_loaded(config, model) as engine:
        yield engine


def waiting_for(may_go_on: threading.Event) -> Callable[[int, memoryview, int], int]:
    """`read_at`, whose reads of records hang until then."""

    def hang(fd: int, buffer: memoryview, offset: int) -> int:
        if len(buffer) == RECORD_BYTES:
            may_go_on.wait(PATIENCE_S)
        return read_at(fd, buffer, offset)

    return hang


def right(model: LoadedModel, prompt: Sequence[int], done: Completion) -> None:
    assert list(done.token_ids) == plain_answer(model, list(prompt), len(done.token_ids))


async def stored(folder: Path, prompt: Sequence[int] = PROMPT, **options: Any) -> None:
    """An engine computes the prompt, and ends."""
    async with engine_of(folder, **options) as engine:
        right(deep_model(), prompt, await ask(engine, prompt, 3))
        await forget_on_device(engine)


def num_external(done: Completion) -> int:
    assert done.usage is not None
    return done.usage.num_external_cached_tokens


def scheduler_of(engine: AsyncEngine) -> PipelineScheduler:
    """The connector's scheduler side."""
    connector = engine._scheduler._connector
    assert connector is not None
    side = connector._connector
    assert isinstance(side, PipelineConnector)
    return side._scheduler


def counts_of(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """What engines count from now on, all of it as one."""
    counts = collections.Counter[str]()
    take = PipelineScheduler.take_stats

    def noted(scheduler: PipelineScheduler) -> PipelineStats | None:
        taken = take(scheduler)
        counts.update({} if taken is None else taken.data)
        return taken

    monkeypatch.setattr(PipelineScheduler, "take_stats", noted)
    return counts


async def a_step(engine: AsyncEngine) -> None:
    """What has ended beside the steps is heard of with the next one."""
    await ask(engine, [1, 2], 1)
