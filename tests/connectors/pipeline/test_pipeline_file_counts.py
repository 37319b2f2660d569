"""What PipelineConnector counts of a store of files: reads, writes, and what became of them."""

from __future__ import annotations

import collections
import threading
from pathlib import Path
from typing import Any

import pytest
from deep_model import deep_model
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
    waiting_for,
)
from pipeline_kit import BLOCK_SIZE, RECORD_BYTES, ask, forget_on_device, some_tokens

from interlace.connectors.multi_connector import MultiConnector
from interlace.connectors.multi_stats import MultiKVConnectorStats
from interlace.connectors.slab_store import slab as slabs
from interlace.connectors.slab_store import writing
from interlace.connectors.slab_store.slab_writer import SlabWriter


async def test_blocks_of_a_load_that_is_late_count_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request has long ended when its reads return."""
    folder = tmp_path / "kv"
    await stored(folder)
    counts, may_go_on = counts_of(monkeypatch), threading.Event()
    async with engine_of(folder, read_deadline_s=0.2) as engine:
        monkeypatch.setattr(slabs, "read_at", waiting_for(may_go_on))
        right(deep_model(), PROMPT, await ask(engine, PROMPT, 5))
        assert counts["blocks_failed_to_load"] == 0, "the load has not ended"
        may_go_on.set()
        while not counts["blocks_failed_to_load"]:
            await a_step(engine)
    assert counts["blocks_failed_to_load"] == 10
    assert (counts["reads_late"], counts["blocks_failed_to_fetch"]) == (10, 10)
    assert counts["blocks_loaded"] == 0


async def test_what_the_disk_did_not_take_is_written_at_its_next_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has been used twice by then, as often as the threshold says."""
    folder = tmp_path / "kv"

    def fail(*_: object) -> None:
        raise OSError("no more")

    monkeypatch.setattr(writing, "_AGAIN_S", 0.0)
    async with engine_of(folder, store_threshold=2) as engine:
        for number in range(3):
            with monkeypatch.context() as patch:
                if number < 2:
                    patch.setattr(SlabWriter, "add", fail)
                right(deep_model(), PROMPT, await ask(engine, PROMPT, 2))
                await forget_on_device(engine)
                while not scheduler_of(engine).is_idle:
                    await a_step(engine)
    async with engine_of(folder) as engine:
        assert num_external(await ask(engine, PROMPT, 2)) == 10 * BLOCK_SIZE


async def test_what_is_read_and_written_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What two engines report is what lies in the files, and what came from there."""
    folder, counts = tmp_path / "kv", counts_of(monkeypatch)
    for number in range(2):
        async with engine_of(folder) as engine:
            for _ in range(2):
                await ask(engine, PROMPT, 1)
                await forget_on_device(engine)
                while not scheduler_of(engine).is_idle:
                    await a_step(engine)
        num_written = num_records_in(folder)
        assert counts["blocks_written"] == num_written == 10
        assert counts["blocks_fetched"] == 10 * number
    assert not {name for name in counts if name.startswith(("reads_", "writes_", "slabs_"))}


def num_records_in(folder: Path) -> int:
    num_records = 0
    for path in folder.glob("*/*.slab"):
        with slabs.Slab.open(path) as slab:
            num_records += len(slab.look())
    return num_records


async def test_writes_that_are_dropped_are_counted_by_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no more")

    counts = counts_of(monkeypatch)
    async with engine_of(tmp_path / "kv", num_records=40) as engine:
        monkeypatch.setattr(SlabWriter, "add", fail)
        await ask(engine, PROMPT, 1)
        while not scheduler_of(engine).is_idle:
            await a_step(engine)
    reasons = ("error", "no_room", "queue_full")  # a slab is tried again after a second
    dropped = [counts[f"writes_dropped_{reason}"] for reason in reasons]
    assert dropped[0] >= 1
    assert sum(dropped) + counts["stores_dropped"] == 10
    assert counts["blocks_written"] == 0


async def test_a_store_that_is_full_counts_what_it_lets_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = counts_of(monkeypatch)
    async with engine_of(tmp_path / "kv", capacity_bytes=2 << 16) as engine:
        for seed in range(1, 5):
            await ask(engine, some_tokens(seed, 10 * BLOCK_SIZE + 1), 1)
            while not scheduler_of(engine).is_idle:
                await a_step(engine)
    assert counts["slabs_evicted"] >= 2
    assert counts["blocks_written"] == 40


async def test_reads_that_bring_nothing_are_counted_by_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, counts = tmp_path / "kv", counts_of(monkeypatch)
    await stored(folder)
    (path,) = folder.glob("*/*.slab")
    with slabs.Slab.open(path) as slab:
        offset = slab.header.shape.record_at(slab.look()[3].record)
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    counts.clear()
    async with engine_of(folder, kv_role="kv_consumer") as engine:
        right(deep_model(), PROMPT, await ask(engine, PROMPT, 2))
        await forget_on_device(engine)
        assert (counts["reads_damaged"], counts["blocks_failed_to_fetch"]) == (1, 1)
    path.write_bytes(bytes(data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :]))
    counts.clear()
    async with engine_of(folder, kv_role="kv_consumer") as engine:
        path.unlink()
        right(deep_model(), PROMPT, await ask(engine, PROMPT, 2))
        await forget_on_device(engine)
        assert counts["reads_failed"] + counts["fetches_missed"] == 10
    assert not counts["reads_late"]


async def test_children_of_a_multi_connector_count_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def child(name: str, **options: Any) -> dict[str, Any]:
        extra = {"store": "file", "path": str(tmp_path / name), "min_free_bytes": 0}
        extra |= {"slab_bytes": 1 << 16, "host_bytes": 200 * RECORD_BYTES} | options
        return {"kv_connector": "PipelineConnector", "kv_connector_extra_config": extra}

    seen: list[dict[str, Any]] = []
    take = MultiConnector.get_kv_connector_stats

    def noted(connector: MultiConnector) -> MultiKVConnectorStats | None:
        taken = take(connector)
        seen.extend([] if taken is None else [taken.reduce()])
        return taken

    monkeypatch.setattr(MultiConnector, "get_kv_connector_stats", noted)
    children = (child("a"), child("b", min_free_bytes=1 << 62))
    async with multi_engine(deep_model(), *children) as engine:
        await ask(engine, PROMPT, 1)
        while sum("writes_" in name or "_written" in name for one in seen for name in one) < 2:
            await a_step(engine)
    total = collections.Counter[str]()
    for one in seen:
        total.update(one)
    assert total["0:PipelineConnector/blocks_written"] == 10
    assert total["1:PipelineConnector/writes_dropped_no_room"] == 10
    assert not total["1:PipelineConnector/blocks_written"]
