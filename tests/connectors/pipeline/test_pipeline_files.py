"""PipelineConnector with a store of files, in real engines: restarts, damage, limits, hangs."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from deep_model import deep_model
from engine_kit import until
from pipeline_files_kit import (
    PROMPT,
    engine_of,
    num_external,
    right,
    scheduler_of,
    stored,
    waiting_for,
)
from pipeline_kit import BLOCK_SIZE, RECORD_BYTES, ask, forget_on_device, some_tokens

from interlace import AsyncEngine, EngineConfig, KVTransferConfig, SamplingParams
from interlace.connectors.conformance import check_connector
from interlace.connectors.pipeline import worker_files
from interlace.connectors.pipeline.sched_files import FileTier
from interlace.connectors.slab_store import directory, slab_writer
from interlace.connectors.slab_store import slab as slabs
from interlace.connectors.slab_store.inspection.chains import list_prefixes
from interlace.connectors.slab_store.inspection.survey import open_store, survey
from interlace.connectors.slab_store.layout import MOST_TOKENS
from interlace.engine.errors import ConfigError
from interlace.layers.checkpoint.loading import Silent


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("load_mode", ["auto", "bulk", "layerwise", "hybrid"])
async def test_a_restarted_engine_finds_what_was_stored(
    load_mode: str, depth: int, tmp_path: Path
) -> None:
    folder, model = tmp_path / "kv", deep_model()
    await stored(folder)
    async with engine_of(folder, load_mode=load_mode, depth=depth) as engine:
        done = await ask(engine, PROMPT, 5)
        right(model, PROMPT, done)
        # From both ends a part of it is computed.
        assert num_external(done) == (5 if load_mode == "hybrid" else 10) * BLOCK_SIZE
        await forget_on_device(engine)
        again = await ask(engine, PROMPT, 5)
        right(model, PROMPT, again)
        assert num_external(again) > 0 or load_mode == "auto", "from memory now"


def test_lanes_read_where_the_system_does_not_tell_of_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")  # as outside of Linux
    assert worker_files.num_read_lanes() >= 4


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.soak(quick=4, full=40)
async def test_a_flipped_bit_is_computed_and_serves_nobody(
    seed: int, policy: Literal["fail", "recompute"], tmp_path: Path
) -> None:
    folder, model, draw = tmp_path / "kv", deep_model(), random.Random(seed)
    await stored(folder)
    (path,) = folder.glob("*/*.slab")
    with slabs.Slab.open(path) as slab:
        entry = draw.choice(slab.look()[:10])  # of the prompt: the last block has an answer in it
        offset = slab.header.shape.record_at(entry.record) + draw.randrange(RECORD_BYTES)
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    async with engine_of(folder, policy=policy) as engine:
        done = await ask(engine, PROMPT, 5)
        if policy == "recompute":
            right(model, PROMPT, done)
        else:
            assert done.error is not None
        await forget_on_device(engine)
        again = await ask(engine, PROMPT, 5)
        right(model, PROMPT, again)
    async with engine_of(folder) as engine:
        right(model, PROMPT, await ask(engine, PROMPT, 5))


@pytest.mark.parametrize("what", ["removed", "cut off", "emptied"])
async def test_files_that_go_under_a_running_engine(what: str, tmp_path: Path) -> None:
    folder, model = tmp_path / "kv", deep_model()
    await stored(folder)
    async with engine_of(folder) as engine:
        (path,) = folder.glob("*/*.slab")
        if what == "removed":
            path.unlink()
        else:
            os.truncate(path, 0 if what == "emptied" else path.stat().st_size // 2)
        right(model, PROMPT, await ask(engine, PROMPT, 5))
        await forget_on_device(engine)
        right(model, PROMPT, await ask(engine, PROMPT, 5))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
async def test_a_disk_that_takes_nothing_more(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(slab_writer, "write_at", fail)
    await stored(tmp_path / "kv")
    monkeypatch.undo()
    async with engine_of(tmp_path / "kv") as engine:
        done = await ask(engine, PROMPT, 3)
        right(deep_model(), PROMPT, done)
        assert num_external(done) == 0


async def test_a_directory_that_cannot_be_used_is_named_before_the_first_request(
    tmp_path: Path,
) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "photos").mkdir()
    with pytest.raises(ConfigError, match="holds other things than a store of slabs"):
        async with engine_of(tmp_path / "kv"):
            pass
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(ConfigError, match=r"give the store another one"):
        async with engine_of(tmp_path / "file" / "kv"):
            pass


async def test_a_read_that_hangs_costs_a_recompute_and_the_engine_ends_in_spite_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = tmp_path / "kv", deep_model()
    await stored(folder)
    may_go_on = threading.Event()
    async with engine_of(folder, read_deadline_s=0.2) as engine:
        monkeypatch.setattr(slabs, "read_at", waiting_for(may_go_on))
        done = await ask(engine, PROMPT, 5)
        right(model, PROMPT, done)
        other = some_tokens(5, 20)
        right(model, other, await ask(engine, other, 4))
        may_go_on.set()
        await forget_on_device(engine)
        right(model, PROMPT, await ask(engine, PROMPT, 5))


async def test_a_reset_is_not_undone_by_a_read_that_comes_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor by what was being written meanwhile."""
    folder, model = tmp_path / "kv", deep_model()
    await stored(folder)
    may_go_on = threading.Event()
    async with engine_of(folder, kv_role="kv_consumer", read_deadline_s=0.2) as engine:
        monkeypatch.setattr(slabs, "read_at", waiting_for(may_go_on))
        right(model, PROMPT, await ask(engine, PROMPT, 2))
        await until(lambda: engine.reset_prefix_cache(reset_connector=True))
        may_go_on.set()
        await asyncio.sleep(0.3)
        for _ in range(3):
            other = some_tokens(7, 9)
            right(model, other, await ask(engine, other, 2))
            done = await ask(engine, PROMPT, 2)
            right(model, PROMPT, done)
            assert num_external(done) == 0
            await forget_on_device(engine)


async def test_a_block_that_hangs_is_not_promised_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = tmp_path / "kv", deep_model()
    await stored(folder)
    may_go_on = threading.Event()
    async with engine_of(folder, read_deadline_s=0.2) as engine:
        monkeypatch.setattr(slabs, "read_at", waiting_for(may_go_on))
        for number in range(4):
            done = await ask(engine, [*PROMPT, number], 2)
            right(model, [*PROMPT, number], done)
            await until(engine.reset_prefix_cache)  # not while a save is under way
        may_go_on.set()
        files = scheduler_of(engine)._tier
        assert isinstance(files, FileTier)
        assert len(files._open_fetches) <= 10, "of the first request alone"


async def test_a_read_may_end_at_any_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also between two questions: its load was lost once, and the request waited for ever."""
    folder = tmp_path / "kv"
    await stored(folder)
    has_ended = worker_files.Fetching.has_ended
    answers = itertools.cycle([False, True])
    monkeypatch.setattr(
        worker_files.Fetching,
        "has_ended",
        lambda fetching, record: has_ended(fetching, record) and next(answers),
    )
    async with engine_of(folder) as engine:
        done = await ask(engine, PROMPT, 5)
        right(deep_model(), PROMPT, done)
        assert num_external(done) == 10 * BLOCK_SIZE


async def test_two_engines_share_a_directory(tmp_path: Path) -> None:
    folder, model = tmp_path / "kv", deep_model()
    async with engine_of(folder) as first, engine_of(folder) as second:
        right(model, PROMPT, await ask(first, PROMPT, 3))
        for _ in range(100):
            await forget_on_device(second)
            done = await ask(second, PROMPT, 3)
            right(model, PROMPT, done)
            if num_external(done):
                break
            await asyncio.sleep(0.1)
        assert num_external(done) == 10 * BLOCK_SIZE


@pytest.mark.parametrize("other", ["model", "block_size", "salt"])
async def test_what_is_not_the_same_misses(other: str, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    await stored(folder)
    model = deep_model(5) if other == "model" else deep_model()
    block_size = 2 * BLOCK_SIZE if other == "block_size" else BLOCK_SIZE
    async with engine_of(folder, model, block_size=block_size, num_records=400) as engine:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        salt = "somebody else" if other == "salt" else None
        done = await engine.complete(list(PROMPT), params, cache_salt=salt)
        right(model, PROMPT, done)
        assert num_external(done) == 0


async def test_a_producer_loads_nothing_and_a_consumer_stores_nothing(tmp_path: Path) -> None:
    folder, model = tmp_path / "kv", deep_model()
    async with engine_of(folder, kv_role="kv_consumer") as engine:
        right(model, PROMPT, await ask(engine, PROMPT, 3))
        await forget_on_device(engine)
    assert not list(folder.glob("*/*.slab"))
    await stored(folder, kv_role="kv_producer")
    assert list(folder.glob("*/*.slab"))
    async with engine_of(folder, kv_role="kv_producer") as engine:
        assert num_external(await ask(engine, PROMPT, 3)) == 0
    async with engine_of(folder, kv_role="kv_consumer") as engine:
        assert num_external(await ask(engine, PROMPT, 3)) == 10 * BLOCK_SIZE


@pytest.mark.soak(quick=3, full=200)
async def test_a_small_memory_and_a_small_store_still_give_right_answers(
    seed: int, tmp_path: Path
) -> None:
    """Both evict all the time."""
    folder, model, draw = tmp_path / "kv", deep_model(), random.Random(seed)
    prefixes = [some_tokens(n % 3, 40)[: draw.randrange(12, 40)] for n in range(9)]
    prompts = [prefix + some_tokens(n, 6) for n, prefix in enumerate(prefixes)]
    for _ in range(2):
        async with engine_of(
            folder, depth=1 + seed % 2, num_records=24, capacity_bytes=3 << 16
        ) as engine:
            for _ in range(12):
                asked = draw.sample(prompts, 3)
                answers = await asyncio.gather(*(ask(engine, prompt, 4) for prompt in asked))
                for prompt, done in zip(asked, answers, strict=True):
                    right(model, prompt, done)
                await forget_on_device(engine)
    owner = directory.SlabDirectory(folder, directory.Limits(capacity_bytes=3 << 16))
    assert await asyncio.to_thread(owner.collect) == []


async def test_at_its_second_use(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    async with engine_of(folder, store_threshold=2) as engine:
        await ask(engine, PROMPT, 3)
        await forget_on_device(engine)
        assert not list(folder.glob("*/*.slab"))
        await ask(engine, PROMPT, 3)
        await forget_on_device(engine)
    async with engine_of(folder) as engine:
        assert num_external(await ask(engine, PROMPT, 3)) == 10 * BLOCK_SIZE


async def test_an_idle_engine_finds_what_another_has_stored(tmp_path: Path) -> None:
    """With its first question: it need not have asked before."""
    folder = tmp_path / "kv"
    async with engine_of(folder) as idle:
        await stored(folder)
        tier = scheduler_of(idle)._tier
        assert isinstance(tier, FileTier)
        await until(lambda: len(tier._stored._catalog) >= 10)
        done = await ask(idle, PROMPT, 3)
        right(deep_model(), PROMPT, done)
        assert num_external(done) == 10 * BLOCK_SIZE


async def test_people_see_what_a_prompt_begins_with_and_how_often_it_was_loaded(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "kv"
    await stored(folder)
    await stored(folder, PROMPT[: 3 * BLOCK_SIZE + 1], kv_role="kv_consumer")

    def listed() -> list[tuple[tuple[int, ...], int]]:
        found = survey(open_store(folder), Silent())
        return [(one.first_tokens, one.num_hits) for one in list_prefixes(found).prefixes]

    assert await asyncio.to_thread(listed) == [(tuple(PROMPT[:MOST_TOKENS]), 1)]
    async with engine_of(folder) as engine:
        for _ in range(2):
            await ask(engine, PROMPT, 1)  # the second time from host memory
            await forget_on_device(engine)
    assert await asyncio.to_thread(listed) == [(tuple(PROMPT[:MOST_TOKENS]), 2)]


def test_the_check_passes(tmp_path: Path) -> None:
    """Each scenario finds what those before it have stored, if it asks for the same."""
    extra = {
        "store": "file",
        "path": str(tmp_path / "kv"),
        "host_bytes": 256 << 10,
        "min_free_bytes": 0,
        "slab_bytes": 200_000,
        "load_mode": "bulk",
    }
    report = check_connector("PipelineConnector", extra_config=extra, quick=True)
    report.raise_if_failed()
    assert list((tmp_path / "kv").glob("*/*.slab"))


async def test_stores_of_other_kinds_refuse_each_others_directories(tmp_path: Path) -> None:
    """Else each would fill the other's, and neither find what is there."""

    @asynccontextmanager
    async def example(folder: Path) -> AsyncIterator[AsyncEngine]:
        config = EngineConfig(
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=61,
            skip_tokenizer_init=True,
            kv_transfer_config=KVTransferConfig(
                kv_connector="ExampleConnector",
                kv_role="kv_both",
                kv_connector_extra_config={"shared_storage_path": str(folder)},
            ),
        )
        async with AsyncEngine.from_loaded(config, deep_model()) as engine:
            yield engine

    await stored(tmp_path / "slabs")
    with pytest.raises(ConfigError, match="holds slabs of PipelineConnector's store"):
        async with example(tmp_path / "slabs"):
            pass
    async with example(tmp_path / "folders") as engine:
        await ask(engine, PROMPT, 2)
    with pytest.raises(ConfigError, match="for instance ExampleConnector's folders"):
        async with engine_of(tmp_path / "folders"):
            pass
