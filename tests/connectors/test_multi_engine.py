"""MultiConnector under the whole engine: two directories, two workers, right answers."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_kit import until
from example_engine import folders
from memory_store import MemoryStore
from multi_kit import multi_engine
from safetensors.numpy import load_file
from tiny_model import VOCAB_SIZE, plain_answer, tiny_model

from interlace import AsyncEngine, SamplingParams
from interlace.engine.outputs import Completion

MODEL = tiny_model()
NUM_TOKENS = 9
modes = pytest.mark.parametrize(
    ("load_async", "depth"), [(False, 1), (False, 2), (True, 1), (True, 2)]
)


@asynccontextmanager
async def an_engine(
    *children: Mapping[str, Any], depth: int = 1, workers: int = 1, num_blocks: int = 60
) -> AsyncIterator[AsyncEngine]:
    async with multi_engine(
        MODEL,
        *children,
        num_gpu_blocks_override=num_blocks,
        max_num_batched_tokens=24,
        max_inflight_steps=depth,
        tensor_parallel_size=workers,
    ) as engine:
        yield engine


def example(root: Path, *, load_async: bool = False, **more: Any) -> dict[str, Any]:
    extra = {"shared_storage_path": str(root), "load_async": load_async, "refresh_s": 0.02}
    return {"kv_connector": "ExampleConnector", "kv_connector_extra_config": extra, **more}


def memory(store: MemoryStore, *, load_async: bool = False, save_async: bool = False) -> Any:
    return {
        "kv_connector": "MemoryConnector",
        "kv_connector_module_path": "memory_connector",
        "kv_connector_extra_config": {
            "store": store,
            "load_async": load_async,
            "save_async": save_async,
        },
    }


async def ask(engine: AsyncEngine, prompt: list[int]) -> Completion:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    done = await engine.complete(prompt, params)
    assert list(done.token_ids) == plain_answer(MODEL, prompt, NUM_TOKENS)
    return done


async def settled(engine: AsyncEngine) -> None:
    """Until every save has ended."""
    await until(lambda: engine.snapshot().idle and not engine.snapshot().num_held_requests)
    assert engine.snapshot().stats.num_stray_reports == 0


def a_prompt(seed: int, length: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(VOCAB_SIZE) for _ in range(length)]


def stored(root: Path) -> set[tuple[str, bytes]]:
    """(layer's file, a block's pages), of all blocks in a directory."""
    return {
        (file.name, block.tobytes())
        for folder in folders(root)
        for file in folder.glob("*.safetensors")
        for block in load_file(file)["kv_cache"]
    }


@modes
async def test_two_directories_end_up_with_the_same_blocks_and_one_replaces_the_other(
    tmp_path: Path, load_async: bool, depth: int
) -> None:
    roots = [tmp_path / name for name in ("first", "second")]
    children = [example(root, load_async=load_async) for root in roots]
    prompt = a_prompt(1, 33)
    async with an_engine(*children, depth=depth) as engine:
        await ask(engine, prompt)
        await settled(engine)
    assert stored(roots[0]) == stored(roots[1])
    assert stored(roots[0])
    everything = stored(roots[0])
    for gone in roots:
        shutil.rmtree(gone)
        async with an_engine(*children, depth=depth) as engine:
            again = await ask(engine, prompt)
            await settled(engine)
        assert again.usage.num_external_cached_tokens == 32, "from the other one"
        assert stored(gone) == everything, "which the first one takes up again"


@pytest.mark.parametrize(
    ("load_async", "save_async", "workers"),
    [(False, False, 2), (True, True, 2), (True, True, 1), (False, True, 1)],
)
async def test_traffic_over_a_memory_and_a_directory(
    tmp_path: Path, load_async: bool, save_async: bool, workers: int
) -> None:
    """Preemption, shared prefixes and an abort; statistics and metrics of each child."""
    prefixes = [a_prompt(seed, 16) for seed in range(2)]
    prompts = [[*prefixes[i % 2], *a_prompt(9 + i, 5 + i % 3)] for i in range(8)]
    store = MemoryStore()
    for _ in range(2):
        children = (
            memory(store, load_async=load_async, save_async=save_async),
            example(tmp_path),
            memory(MemoryStore(), save_async=save_async),
        )
        async with an_engine(*children, workers=workers, num_blocks=24, depth=2) as engine:
            async with asyncio.TaskGroup() as group:
                for prompt in prompts:
                    group.create_task(ask(engine, prompt))
                group.create_task(_ask_and_leave(engine, prompts[0]))
            await settled(engine)
            counted = engine.snapshot().kv_connector_stats
            total = engine.snapshot().stats.num_external_cached_tokens
    keys = {name.partition("/")[0] for name in counted}
    assert {"0:memory_connector.MemoryConnector", "2:memory_connector.MemoryConnector"} <= keys
    assert total > 0


async def _ask_and_leave(engine: AsyncEngine, prompt: list[int]) -> None:
    stream = engine.generate(prompt, SamplingParams(temperature=0, max_tokens=30))
    async for _ in stream:
        break
    await stream.aclose()


async def test_a_decode_benchmark_may_stand_behind_a_store(tmp_path: Path) -> None:
    """What the store has is real; else the context is invented, and the store keeps that too."""
    invented = {"kv_connector": "DecodeBenchConnector"}
    prompt = a_prompt(3, 21)
    async with an_engine(example(tmp_path)) as engine:
        await ask(engine, prompt)
        await settled(engine)
    async with an_engine(example(tmp_path, kv_role="kv_consumer"), invented) as engine:
        assert (await ask(engine, prompt)).usage.num_external_cached_tokens == 20
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        other = await engine.complete(a_prompt(4, 21), params)
        assert other.usage.num_external_cached_tokens == 20
        assert list(other.token_ids) != plain_answer(MODEL, a_prompt(4, 21), NUM_TOKENS)
