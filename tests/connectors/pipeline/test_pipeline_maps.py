"""Slabs that are copied from directly, in real engines: what is loaded, is damaged, and goes."""

from __future__ import annotations

import asyncio
import collections
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from deep_model import deep_model
from host_memory import StrictMemory, registering_in
from multi_kit import multi_engine
from pipeline_files_kit import (
    PROMPT,
    a_step,
    counts_of,
    engine_of,
    num_external,
    right,
    scheduler_of,
    stored,
)
from pipeline_kit import BLOCK_SIZE, RECORD_BYTES, ask, forget_on_device, some_tokens
from slab_kit import flip

from interlace import AsyncEngine
from interlace.connectors.pipeline import worker_maps
from interlace.connectors.pipeline.sched_files import FileTier
from interlace.connectors.slab_store import slab as slabs

WAYS = ("auto", "bulk", "layerwise", "hybrid")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[StrictMemory]:
    memory = StrictMemory()
    registering_in(memory, monkeypatch)
    yield memory
    assert not memory.registered, "an engine that ends lets go of everything"


def mapped_in(engine: AsyncEngine) -> set[str]:
    """Slabs that the scheduler side orders loads from."""
    files = scheduler_of(engine)._tier
    assert isinstance(files, FileTier)
    return set(files._mapped)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("load_mode", WAYS)
async def test_a_restarted_engine_loads_from_where_things_lie(
    load_mode: str, depth: int, tmp_path: Path, memory: StrictMemory, monkeypatch: Any
) -> None:
    folder, model, counts = tmp_path / "kv", deep_model(), counts_of(monkeypatch)
    await stored(folder)
    async with engine_of(folder, load_mode=load_mode, depth=depth) as engine:
        assert memory.num_bytes == 11 * RECORD_BYTES, "with what was answered"
        for _ in range(2):
            done = await ask(engine, PROMPT, 5)
            right(model, PROMPT, done)
            assert num_external(done) > 0 or load_mode == "auto"
            await forget_on_device(engine)
        await a_step(engine)
        assert len(mapped_in(engine)) == 1
    assert counts["blocks_fetched"] == 0
    if load_mode in ("bulk", "layerwise"):
        assert counts["blocks_loaded_from_files"] == 20


async def test_who_loads_nothing_registers_nothing(tmp_path: Path, memory: StrictMemory) -> None:
    folder = tmp_path / "kv"
    await stored(folder)
    async with engine_of(folder, kv_role="kv_producer") as engine:
        assert num_external(await ask(engine, PROMPT, 2)) == 0
        assert not mapped_in(engine)
    assert memory.num_registered == 0


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("load_mode", ["bulk", "layerwise", "hybrid"])
@pytest.mark.parametrize("seed", range(3))
async def test_a_flipped_bit_is_found_in_the_pages_and_serves_nobody(
    seed: int,
    load_mode: str,
    policy: Literal["fail", "recompute"],
    tmp_path: Path,
    memory: StrictMemory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, model, draw = tmp_path / "kv", deep_model(), random.Random(seed)
    counts = counts_of(monkeypatch)
    await stored(folder)
    damage(folder, draw, load_mode)
    async with engine_of(folder, policy=policy, load_mode=load_mode) as engine:
        done = await ask(engine, PROMPT, 5)
        if policy == "recompute":
            right(model, PROMPT, done)
        else:
            assert done.error is not None
        await forget_on_device(engine)
        again = await ask(engine, PROMPT, 5)
        right(model, PROMPT, again)
        await a_step(engine)
        assert counts["blocks_failed_to_load"] > 0
    async with engine_of(folder, load_mode=load_mode) as engine:
        right(model, PROMPT, await ask(engine, PROMPT, 5))


def damage(folder: Path, draw: random.Random, load_mode: str) -> None:
    """A bit of a record of the prompt, in place; one that also a load from the back takes."""
    (path,) = folder.glob("*/*.slab")
    with slabs.Slab.open(path) as slab:
        entries = slab.look()
        entry = entries[9] if load_mode == "hybrid" else draw.choice(entries[:10])
        offset = slab.header.shape.record_at(entry.record) + draw.randrange(RECORD_BYTES)
    flip(path, offset, draw.randrange(8))


async def test_one_bad_block_among_several_requests_fails_one(
    tmp_path: Path, memory: StrictMemory
) -> None:
    """All of them load within one step."""
    folder, model = tmp_path / "kv", deep_model()
    prompts = [some_tokens(seed, 5 * BLOCK_SIZE + 2) for seed in range(3)]
    for prompt in prompts:
        await stored(folder, prompt)
    paths = sorted(folder.glob("*/*.slab"))
    with paths[1].open("r+b") as file:
        file.seek(paths[1].stat().st_size - 40_000)
        file.write(b"x")
    with slabs.Slab.open(paths[1]) as slab:
        at = slab.header.shape.record_at(2)
    with paths[1].open("r+b") as file:
        file.seek(at)
        file.write(b"\xee\xdd\xcc")
    async with engine_of(folder, load_mode="layerwise", policy="fail") as engine:
        answers = await asyncio.gather(*(ask(engine, prompt, 4) for prompt in prompts))
        assert [done.error is not None for done in answers] == [False, True, False]
        for number in (0, 2):
            right(model, prompts[number], answers[number])


async def test_who_is_refused_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, counts = StrictMemory(code=801), counts_of(monkeypatch)
    registering_in(memory, monkeypatch)
    await stored(tmp_path / "kv")
    async with engine_of(tmp_path / "kv") as engine:
        done = await ask(engine, PROMPT, 5)
        right(deep_model(), PROMPT, done)
        assert num_external(done) == 10 * BLOCK_SIZE
        await ask(engine, [1, 2], 1)
    assert memory.num_registered == 0
    assert counts["blocks_fetched"] == 10


@pytest.mark.parametrize("load_mode", ["bulk", "layerwise"])
async def test_what_is_read_is_checked_where_it_has_come_to(
    load_mode: str, tmp_path: Path, memory: StrictMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is registered, but who loads checks: a bad record is not kept in memory either."""
    folder, model, counts = tmp_path / "kv", deep_model(), counts_of(monkeypatch)
    await stored(folder)
    damage(folder, random.Random(3), load_mode)
    async with engine_of(folder, load_mode=load_mode, registered_bytes=0) as engine:
        for _ in range(3):
            right(model, PROMPT, await ask(engine, PROMPT, 5))
            await forget_on_device(engine)
    assert counts["blocks_failed_to_fetch"] == 1
    assert counts["blocks_fetched"] == 9
    assert memory.num_registered == 0


async def test_a_file_that_is_removed_is_let_go_of(
    tmp_path: Path, memory: StrictMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the thread, while nobody asks anything; what was promised by then is computed."""
    monkeypatch.setattr(worker_maps, "LOOK_S", 0.01)
    monkeypatch.setattr(worker_maps, "_QUIET_S", 0.02)
    folder, model = tmp_path / "kv", deep_model()
    await stored(folder)
    async with engine_of(folder, load_mode="layerwise") as engine:
        right(model, PROMPT, await ask(engine, PROMPT, 5))
        await forget_on_device(engine)
        (path,) = folder.glob("*/*.slab")
        path.unlink()
        for _ in range(2000):
            if not memory.registered:
                break
            await asyncio.sleep(0.01)
        assert not memory.registered
        right(model, PROMPT, await ask(engine, PROMPT, 5))


@pytest.mark.soak(quick=4, full=200)
async def test_slabs_that_come_and_go_under_random_traffic(
    seed: int, tmp_path: Path, memory: StrictMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for some of them only, and everything is looked at often."""
    monkeypatch.setattr(worker_maps, "LOOK_S", 0.002)
    monkeypatch.setattr(worker_maps, "_BUSY_PAUSE_S", 0.0)
    folder, model, draw = tmp_path / "kv", deep_model(), random.Random(seed)
    prompts = [some_tokens(10 + i, draw.randint(9, 60)) for i in range(6)]
    counts = counts_of(monkeypatch)
    slab_bytes = 2 * 8192 + 7 * RECORD_BYTES
    room = draw.choice([8, 16, 30]) * RECORD_BYTES
    seen = collections.Counter[int]()
    load_mode = draw.choice(WAYS)
    async with engine_of(
        folder,
        load_mode=load_mode,
        depth=draw.choice([1, 2]),
        num_records=12,
        slab_bytes=slab_bytes,
        registered_bytes=room,
        capacity_bytes=draw.choice([3, 20]) * slab_bytes,
    ) as engine:
        for _ in range(30):
            chosen = draw.sample(prompts, draw.randint(1, 3))
            answers = await asyncio.gather(*(ask(engine, prompt, 3) for prompt in chosen))
            for prompt, done in zip(chosen, answers, strict=True):
                right(model, prompt, done)
            assert memory.num_bytes <= room
            seen[len(memory.registered)] += 1
            await asyncio.sleep(0.004)
            await forget_on_device(engine)
    assert memory.num_registered > 1, seen
    assert counts["blocks_loaded_from_files"] > 0 or load_mode == "auto"


@asynccontextmanager
async def below_multi(folder: Path, load_mode: str, depth: int) -> AsyncIterator[AsyncEngine]:
    """Beside another child that stores nothing."""

    def child(**options: Any) -> dict[str, Any]:
        extra = {"host_bytes": 100 * RECORD_BYTES, "load_mode": load_mode, **options}
        return {"kv_connector": "PipelineConnector", "kv_connector_extra_config": extra}

    store = {"store": "file", "path": str(folder), "min_free_bytes": 0, "slab_bytes": 1 << 16}
    engine_options = {"max_inflight_steps": depth, "max_num_batched_tokens": 32}
    children = (child(), child(**store))
    async with multi_engine(deep_model(), *children, **engine_options) as engine:
        yield engine


@pytest.mark.parametrize("is_damaged", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("load_mode", ["bulk", "layerwise"])
async def test_below_a_multi_connector(
    load_mode: str, depth: int, is_damaged: bool, tmp_path: Path, memory: StrictMemory
) -> None:
    """What is found bad when a step's tokens have come is heard of through it."""
    folder, model = tmp_path / "kv", deep_model()
    async with below_multi(folder, load_mode, depth) as engine:
        right(model, PROMPT, await ask(engine, PROMPT, 3))
        await forget_on_device(engine)
    if is_damaged:
        damage(folder, random.Random(depth), load_mode)
    registered = memory.num_registered
    async with below_multi(folder, load_mode, depth) as engine:
        assert memory.num_registered == registered + 1
        done = await ask(engine, PROMPT, 5)
        right(model, PROMPT, done)
        assert is_damaged == (engine.snapshot().stats.num_invalid_blocks > 0)
        await forget_on_device(engine)
        right(model, PROMPT, await ask(engine, PROMPT, 5))
