"""Prompts that are computed from the front while what lies in files is read and loaded from the
back: slow reads, damage, hangs, aborts, and requests at once. Answers are those of a plain decoder.
"""

from __future__ import annotations

import asyncio
import collections
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from deep_model import deep_model
from host_memory import StrictMemory, registering_in
from pipeline_files_kit import (
    PROMPT,
    a_step,
    counts_of,
    engine_of,
    num_external,
    right,
    scheduler_of,
    stored,
    waiting_for,
)
from pipeline_kit import BLOCK_SIZE, RECORD_BYTES, ask, forget_on_device, some_tokens
from slab_kit import flip

from interlace import AsyncEngine
from interlace.connectors.pipeline.rates import LoadRate
from interlace.connectors.slab_store import reading
from interlace.connectors.slab_store import slab as slabs

LONG = some_tokens(3, 25 * BLOCK_SIZE + 2)


@pytest.fixture(params=["checked by who reads", "checked in the pages"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Nothing is registered either way: `registered_bytes` is 0 in these tests."""
    if request.param == "checked in the pages":
        registering_in(StrictMemory(), monkeypatch)
    return str(request.param)


async def settled(engine: AsyncEngine) -> None:
    """Until nothing is under way; then no record is kept from others."""
    scheduler = scheduler_of(engine)
    for _ in range(500):
        await a_step(engine)
        if scheduler.is_idle:
            break
        await asyncio.sleep(0.01)
    index = scheduler.index
    assert index.num_free + index.num_stored == index.num_records
    assert "pinned=0" in repr(index)


def slowed(monkeypatch: pytest.MonkeyPatch, draw: random.Random, most_s: float) -> None:
    """Reads take their time."""
    read = reading.Reads._read

    def slow(reads: reading.Reads, run: Any) -> None:
        time.sleep(draw.random() * most_s)
        read(reads, run)

    monkeypatch.setattr(reading.Reads, "_read", slow)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("most_s", [0.0, 0.02])
async def test_the_back_comes_from_files(
    most_s: float, depth: int, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model, counts = tmp_path / "kv", deep_model(), counts_of(monkeypatch)
    await stored(folder, LONG)
    slowed(monkeypatch, random.Random(depth), most_s)
    async with engine_of(folder, load_mode="hybrid", depth=depth, registered_bytes=0) as engine:
        done = await ask(engine, LONG, 5)
        right(model, LONG, done)
        await settled(engine)  # reads that nobody needs any more may still be under way
        assert 0 < num_external(done) < 25 * BLOCK_SIZE
        assert counts["chose_hybrid"] == 1
        assert counts["blocks_fetched"] > 0
        assert scheduler_of(engine).is_idle
        await forget_on_device(engine)
        right(model, LONG, await ask(engine, LONG, 5))
        await settled(engine)


@pytest.mark.parametrize("place", [0, 3, 12, 20, 24])
async def test_a_damaged_block_of_either_end_is_computed(
    place: int, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = tmp_path / "kv", deep_model()
    await stored(folder, LONG, slab_bytes=1 << 18)
    (path,) = folder.glob("*/*.slab")
    with slabs.Slab.open(path) as slab:
        at = slab.header.shape.record_at(place) + RECORD_BYTES // 2
    flip(path, at, 6)
    async with engine_of(folder, load_mode="hybrid", registered_bytes=0) as engine:
        for _ in range(3):
            right(model, LONG, await ask(engine, LONG, 5))
            await forget_on_device(engine)
        await settled(engine)
        assert scheduler_of(engine).is_idle


async def test_reads_that_hang_cost_computing_and_no_record_for_ever(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model, may_go_on = tmp_path / "kv", deep_model(), threading.Event()
    await stored(folder, LONG)
    read = reading.Reads._read

    def hang(reads: reading.Reads, run: Any) -> None:
        may_go_on.wait(60)
        read(reads, run)

    monkeypatch.setattr(reading.Reads, "_read", hang)
    monkeypatch.setattr(slabs, "read_at", waiting_for(may_go_on))
    async with engine_of(
        folder, load_mode="hybrid", registered_bytes=0, read_deadline_s=0.05
    ) as engine:
        right(model, LONG, await ask(engine, LONG, 5))
        may_go_on.set()
        await settled(engine)


@pytest.mark.soak(quick=3, full=200)
async def test_random_traffic_from_files_and_both_ends(
    seed: int, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small pools of blocks and records, slow reads, aborts in between."""
    draw, folder, model = random.Random(seed), tmp_path / "kv", deep_model()
    prompts = [some_tokens(20 + i, draw.randint(20, 100)) for i in range(5)]
    prompts += [prompts[0][:40] + some_tokens(40, 20)]
    for prompt in prompts[:4]:
        await stored(folder, prompt)
    slowed(monkeypatch, draw, draw.choice([0.0, 0.003, 0.01]))
    seen, load_mode = collections.Counter[int](), draw.choice(["hybrid", "hybrid", "auto"])
    async with engine_of(
        folder,
        load_mode=load_mode,
        depth=draw.choice([1, 2]),
        num_records=draw.choice([30, 60, 200]),
        registered_bytes=0,
    ) as engine:
        for _ in range(12):
            chosen = draw.sample(prompts, draw.randint(1, 4))
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(ask(engine, prompt, 4)) for prompt in chosen]
                lost = draw.choice(tasks) if draw.random() < 0.4 else None
                if lost is not None:
                    await asyncio.sleep(draw.random() * 0.03)
                    lost.cancel()
            for prompt, task in zip(chosen, tasks, strict=True):
                if not task.cancelled():
                    right(model, prompt, task.result())
                    seen[num_external(task.result())] += 1
            if draw.random() < 0.7:
                await forget_on_device(engine)
        await settled(engine)
    assert any(seen) or load_mode == "auto", seen


async def test_where_reading_is_slow_both_ends_are_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By rates that make reading all as slow as computing all."""
    folder, model, counts = tmp_path / "kv", deep_model(), counts_of(monkeypatch)
    await stored(folder, LONG)
    async with engine_of(folder, load_mode="auto", registered_bytes=0) as engine:
        chooser = scheduler_of(engine).chooser
        monkeypatch.setattr(chooser, "fetch_rate", LoadRate(25 * RECORD_BYTES / 2.0))
        monkeypatch.setattr(
            chooser, "computing_s", lambda first, end: 2.0 * (end - first) / len(LONG)
        )
        monkeypatch.setattr(
            chooser.step_times, "seconds", lambda count, before: 2.0 * count / len(LONG)
        )
        right(model, LONG, await ask(engine, LONG, 5))
        await a_step(engine)
        assert counts["chose_hybrid"] == 1
        forecast = chooser.last_forecast
        assert forecast is not None
        assert forecast.bulk_load_s == pytest.approx(2.0)
        assert forecast.hybrid_s == pytest.approx(1.0, rel=0.1)


async def test_what_has_no_room_in_memory_is_computed(tmp_path: Path) -> None:
    """Two requests at once want more records than there are to read into."""
    folder, model = tmp_path / "kv", deep_model()
    prompts = [LONG, some_tokens(9, 22 * BLOCK_SIZE + 1), PROMPT]
    for prompt in prompts:
        await stored(folder, prompt)
    async with engine_of(folder, load_mode="hybrid", num_records=40, registered_bytes=0) as engine:
        for _ in range(3):
            answers = await asyncio.gather(*(ask(engine, prompt, 4) for prompt in prompts))
            for prompt, done in zip(prompts, answers, strict=True):
                right(model, prompt, done)
            await forget_on_device(engine)
