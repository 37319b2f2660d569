"""Anything goes, over registered slabs and reads at once: aborts, resets, damaged and lost files,
reads that hang past their deadline and return later, pools too small.

Every answer is a plain decoder's, or an error where loads may fail requests.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from deep_model import deep_model
from host_memory import StrictMemory, registering_in
from pipeline_files_kit import a_step, engine_of, right, scheduler_of, stored
from pipeline_kit import RECORD_BYTES, ask, forget_on_device, some_tokens
from slab_kit import flip

from interlace.connectors.pipeline import worker_maps
from interlace.connectors.slab_store import reading
from interlace.connectors.slab_store import slab as slabs

WAYS = ("auto", "bulk", "layerwise", "hybrid", "hybrid")


def disturbed(monkeypatch: pytest.MonkeyPatch, draw: random.Random) -> threading.Event:
    """Reads are slow, fail, or hang until the event is set, or for a while."""
    read, most_s, over = reading.Reads._read, draw.choice([0.0, 0.002, 0.01]), threading.Event()
    fault_rate = draw.choice([0.0, 0.02, 0.1])

    def disturb(reads: reading.Reads, run: Any) -> None:
        time.sleep(draw.random() * most_s)
        if draw.random() < fault_rate:
            if draw.random() < 0.5:
                raise OSError("broken")
            over.wait(draw.random() * 0.3)
        read(reads, run)

    monkeypatch.setattr(reading.Reads, "_read", disturb)
    return over


def damage(folder: Path, draw: random.Random) -> None:
    """A byte of some records, in place."""
    for path in sorted(folder.glob("*/*.slab")):
        with slabs.Slab.open(path) as slab:
            places = [slab.header.shape.record_at(entry.record) for entry in slab.look()]
        for at in draw.sample(places, draw.randint(0, min(2, len(places)))):
            flip(path, at + draw.randrange(RECORD_BYTES), 4)


@pytest.mark.soak(quick=4, full=200)
async def test_anything_goes(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, draw, folder, model = StrictMemory(), random.Random(seed), tmp_path / "kv", deep_model()
    registering_in(memory, monkeypatch)
    monkeypatch.setattr(worker_maps, "LOOK_S", 0.003)
    monkeypatch.setattr(worker_maps, "_QUIET_S", draw.choice([0.004, 1.0]))
    monkeypatch.setattr(worker_maps, "_BUSY_PAUSE_S", 0.0)
    prompts = [some_tokens(40 + i, draw.randint(20, 100)) for i in range(5)]
    prompts += [prompts[0][:40] + some_tokens(60, 20)]
    for prompt in prompts[:4]:
        await stored(folder, prompt, registered_bytes=0)
    if draw.random() < 0.5:
        damage(folder, draw)
    over, may_fail = disturbed(monkeypatch, draw), draw.random() < 0.3
    async with engine_of(
        folder,
        policy="fail" if may_fail else "recompute",
        load_mode=draw.choice(WAYS),
        depth=draw.choice([1, 2]),
        num_records=draw.choice([30, 60, 200]),
        kv_role=draw.choice(["kv_both", "kv_both", "kv_consumer"]),
        tiers=draw.choice([["memory", "file"], ["file"]]),
        slab_bytes=2 * 8192 + 7 * RECORD_BYTES,
        registered_bytes=draw.choice([0, 20, 200]) * RECORD_BYTES,
        read_deadline_s=0.05,
    ) as engine:
        scheduler = scheduler_of(engine)
        for _ in range(14):
            chosen = draw.sample(prompts, draw.randint(1, 4))
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(ask(engine, prompt, 4)) for prompt in chosen]
                if draw.random() < 0.4:
                    await asyncio.sleep(draw.random() * 0.03)
                    draw.choice(tasks).cancel()
                if draw.random() < 0.15:
                    await asyncio.sleep(draw.random() * 0.02)
                    engine.reset_prefix_cache(reset_connector=True)
                if draw.random() < 0.15:
                    paths = sorted(folder.glob("*/*.slab"))
                    if paths:
                        draw.choice(paths).unlink()
            for prompt, task in zip(chosen, tasks, strict=True):
                if not task.cancelled() and not (may_fail and task.result().error is not None):
                    right(model, prompt, task.result())
            if draw.random() < 0.6:
                await forget_on_device(engine)
            if draw.random() < 0.3:
                await asyncio.sleep(0.02)
        over.set()
        for _ in range(500):
            await a_step(engine)
            if scheduler.is_idle:
                break
            await asyncio.sleep(0.01)
        index = scheduler.index
        assert scheduler.is_idle
        assert index.num_free + index.num_stored == index.num_records
        assert "pinned=0" in repr(index)
    assert not memory.registered
