"""The whole engine under connectors that behave badly, and ends at any moment."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from engine_kit import greedy, until
from tiny_model import plain_answer, tiny_model

from interlace import AsyncEngine
from interlace.engine.config import EngineConfig, KVTransferConfig


def kv_config(root: Path, *, load_async: bool) -> EngineConfig:
    return EngineConfig(
        model="tiny",
        block_size=4,
        num_gpu_blocks_override=65,
        kv_transfer_config=KVTransferConfig(
            kv_connector="ExampleConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "shared_storage_path": str(root),
                "load_async": load_async,
            },
        ),
    )


def kv_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("interlace-kv")]


@pytest.mark.parametrize("load_async", [False, True])
async def test_cancelled_at_any_moment(tmp_path: Path, load_async: bool) -> None:
    """Threads end, nothing temporary is left, and what is stored is right."""
    model = tiny_model()
    root = tmp_path / "kv"
    prompt = [(i * 7) % 60 for i in range(60)]
    before = kv_threads()

    async def work(opened: asyncio.Event) -> None:
        async with AsyncEngine.from_loaded(kv_config(root, load_async=load_async), model) as engine:
            opened.set()
            await asyncio.gather(*(engine.complete([*prompt, i], greedy(6)) for i in range(4)))

    for delay_ms in (0, 1, 2, 3, 4, 6, 9, 14, 20):
        opened = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(work(opened))
            await opened.wait()
            await asyncio.sleep(delay_ms / 1e3)
            task.cancel()
    await until(lambda: kv_threads() == before)
    assert not list(root.glob("*/tmp/*"))
    async with AsyncEngine.from_loaded(kv_config(root, load_async=load_async), model) as engine:
        done = await engine.complete([*prompt, 1], greedy(6))
    assert list(done.token_ids) == plain_answer(model, [*prompt, 1], 6)
