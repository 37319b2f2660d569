"""PipelineConnector's tiers: host memory, files, and files alone."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from deep_model import deep_model
from engine_kit import until
from pipeline_files_kit import (
    PROMPT,
    a_step,
    counts_of,
    engine_of,
    num_external,
    right,
    scheduler_of,
    waiting_for,
)
from pipeline_kit import BLOCK_SIZE, ask, forget_on_device, some_tokens

from interlace import AsyncEngine, KVTransferConfig
from interlace.connectors.conformance import check_connector
from interlace.connectors.pipeline.options import PipelineOptions
from interlace.connectors.slab_store import slab as slabs
from interlace.engine.errors import ConfigError

NUM_LOADED = 10 * BLOCK_SIZE
FILES: dict[str, Any] = {"store": None, "tiers": ["file"]}


def options(**extra: Any) -> PipelineOptions:
    return PipelineOptions.of(
        KVTransferConfig(
            kv_connector="PipelineConnector", kv_role="kv_both", kv_connector_extra_config=extra
        )
    )


@pytest.mark.parametrize(
    "tiers",
    [[], "file", ["memory", "memory"], ["file", "memory"], ["disk"], [["file"]], [None], {"file"}],
)
def test_other_tiers_are_refused(tiers: Any) -> None:
    with pytest.raises(ConfigError, match=r"tiers must be one of \['memory'\], .*, not "):
        options(tiers=tiers, path="kv")


@pytest.mark.parametrize(
    ("store", "tiers"), [("memory", ["memory", "file"]), ("memory", ["file"]), ("file", ["memory"])]
)
def test_a_store_and_tiers_at_odds_are_refused(store: str, tiers: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"store='{store}' and tiers=.*: leave one of them out"):
        options(store=store, tiers=tiers, path="kv")


@pytest.mark.parametrize("extra", [{"tiers": ["memory"], "path": "kv"}, {"tiers": ["file"]}])
def test_a_path_is_for_files(extra: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="give both, or neither"):
        options(**extra)


@pytest.mark.parametrize(
    ("extra", "right"),
    [
        ({}, (False, True)),
        ({"store": "memory"}, (False, True)),
        ({"tiers": ["memory"]}, (False, True)),
        ({"store": "file", "path": "kv"}, (True, True)),
        ({"tiers": ("memory", "file"), "path": "kv"}, (True, True)),
        ({"store": "file", "tiers": ["memory", "file"], "path": "kv"}, (True, True)),
        ({"tiers": ["file"], "path": "kv"}, (True, False)),
        ({"store": "file", "tiers": ["file"], "path": "kv"}, (True, False)),
    ],
)
def test_what_they_mean(extra: dict[str, Any], right: tuple[bool, bool]) -> None:
    made = options(**extra)
    assert (made.has_files, made.keeps_in_memory) == right


async def ask_again(engine: AsyncEngine) -> int:
    """Tokens that were loaded, when the device has forgotten them and files were looked at."""
    await forget_on_device(engine)
    while not scheduler_of(engine).is_idle:
        await a_step(engine)
    done = await ask(engine, PROMPT, 1)
    right(deep_model(), PROMPT, done)
    return num_external(done)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("load_mode", ["bulk", "layerwise", "hybrid"])
async def test_files_alone(
    load_mode: str, depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read once is read again. A hit is never missed, at whatever time it is asked for."""
    folder, counts = tmp_path / "kv", counts_of(monkeypatch)
    async with engine_of(folder, load_mode=load_mode, depth=depth, **FILES) as engine:
        right(deep_model(), PROMPT, await ask(engine, PROMPT, 1))
        for _ in range(4):
            assert await ask_again(engine) > 0
        assert counts["blocks_written"] == 10
        index = scheduler_of(engine).index
        await forget_on_device(engine)
        await until_found(engine)
        assert index.num_free == index.num_records
    counts.clear()
    async with engine_of(folder, load_mode=load_mode, depth=depth, **FILES) as engine:
        for number in range(1, 4):
            num_loaded = await ask_again(engine)
            await forget_on_device(engine)
            if load_mode == "hybrid":  # a part of it is computed
                assert 0 < num_loaded < NUM_LOADED
                assert 0 < counts["blocks_fetched"] <= 10 * number
            else:
                assert num_loaded == NUM_LOADED
                assert counts["blocks_fetched"] == 10 * number
    assert not counts["blocks_failed_to_fetch"]
    assert not counts["blocks_written"]
    assert not counts["blocks_saved"], "it lies in files already"


async def until_found(engine: AsyncEngine) -> None:
    """Until each block that was written is found in its file."""
    index = scheduler_of(engine).index
    for _ in range(200):
        if not index.num_stored:
            return
        await a_step(engine)
        await asyncio.sleep(0.01)
    raise AssertionError(index)


@pytest.mark.parametrize("tiers", [["memory"], ["memory", "file"]])
async def test_memory_in_front(
    tiers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, counts = tmp_path / "kv", counts_of(monkeypatch)
    has_files = "file" in tiers
    changes: dict[str, Any] = {
        "store": None,
        "tiers": tiers,
        "path": str(folder) if has_files else None,
    }
    for number in range(2):
        async with engine_of(folder, **changes) as engine:
            found = [await ask_again(engine) for _ in range(3)]
            was_stored = number and has_files
            assert found == [NUM_LOADED if was_stored else 0, NUM_LOADED, NUM_LOADED]
            await forget_on_device(engine)
    assert counts["blocks_fetched"] == (10 if has_files else 0), "once, and then from memory"
    assert folder.exists() == has_files


@pytest.mark.parametrize("seed", range(3))
async def test_few_buffers_and_a_small_store_still_give_right_answers(
    seed: int, tmp_path: Path
) -> None:
    folder, model, draw = tmp_path / "kv", deep_model(), random.Random(seed)
    prefixes = [some_tokens(n % 3, 40)[: draw.randrange(12, 40)] for n in range(9)]
    prompts = [prefix + some_tokens(n, 6) for n, prefix in enumerate(prefixes)]
    async with engine_of(
        folder, depth=1 + seed % 2, num_records=24, capacity_bytes=3 << 16, **FILES
    ) as engine:
        for _ in range(12):
            asked = draw.sample(prompts, 3)
            answers = await asyncio.gather(*(ask(engine, prompt, 4) for prompt in asked))
            for prompt, done in zip(asked, answers, strict=True):
                right(model, prompt, done)
            await forget_on_device(engine)
        while not scheduler_of(engine).is_idle:
            await a_step(engine)
        await until_found(engine)
        index = scheduler_of(engine).index
        assert index.num_free == index.num_records


async def test_a_buffer_whose_read_is_late_stays_out_of_use_until_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, may_go_on = tmp_path / "kv", threading.Event()
    async with engine_of(folder, **FILES) as engine:
        await ask(engine, PROMPT, 1)
    async with engine_of(folder, read_deadline_s=0.2, **FILES) as engine:
        index = scheduler_of(engine).index
        monkeypatch.setattr(slabs, "read_at", waiting_for(may_go_on))
        right(deep_model(), PROMPT, await ask(engine, PROMPT, 1))
        await until(lambda: engine.snapshot().idle and not engine.snapshot().num_held_requests)
        assert index.num_free + index.num_stored <= index.num_records - 8
        may_go_on.set()
        while not scheduler_of(engine).is_idle:
            await a_step(engine)
        await until_found(engine)
        assert index.num_free == index.num_records


def test_the_check_passes(tmp_path: Path) -> None:
    extra = {
        "tiers": ["file"],
        "path": str(tmp_path / "kv"),
        "host_bytes": 256 << 10,
        "min_free_bytes": 0,
        "slab_bytes": 200_000,
        "load_mode": "bulk",
    }
    report = check_connector("PipelineConnector", extra_config=extra, quick=True)
    report.raise_if_failed()
    assert report.result("failures-exact").verdict == "ok", "files can be damaged"


def test_a_capacity_holds_one_file_at_least() -> None:
    for capacity, slab in ((1 << 16, 1 << 16), (None, 1 << 40)):
        PipelineOptions(store="file", path="kv", capacity_bytes=capacity, slab_bytes=slab)
    with pytest.raises(ConfigError, match=r"less than one file of slab_bytes=65536: allow more"):
        PipelineOptions(store="file", path="kv", capacity_bytes=65535, slab_bytes=65536)
