"""What connectors and their tiers tell Prometheus: bytes, times, hits, drops, what is stuck."""

from __future__ import annotations

import asyncio
import functools
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from engine_kit import until
from metrics_kit import Values, read
from multi_kit import multi_config
from pipeline_files_kit import (
    PROMPT,
    a_step,
    engine_of,
    num_external,
    scheduler_of,
    stored,
    waiting_for,
)
from pipeline_kit import BLOCK_SIZE, RECORD_BYTES, ask, forget_on_device
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from tiny_model import tiny_model

from interlace import AsyncEngine, EngineConfig, KVTransferConfig
from interlace.connectors.counted_metrics import FAMILIES, CountedMetrics, Number
from interlace.connectors.example_connector import ExampleConnector
from interlace.connectors.example_stats import NUMBERS as EXAMPLE_NUMBERS
from interlace.connectors.kv_folders.counters import KVFolderCounters
from interlace.connectors.multi_connector import MultiConnector
from interlace.connectors.pipeline.sched_metrics import NUMBERS as PIPELINE_NUMBERS
from interlace.connectors.pipeline.sched_stats import LEVELS, PipelineStats
from interlace.connectors.pipeline.sched_stats import Counter as Counts
from interlace.connectors.pipeline_connector import PipelineConnector
from interlace.connectors.slab_store import slab as slabs
from interlace.connectors.slab_store.slab_writer import SlabWriter

Kinds = dict[type[Any], Callable[..., Any]]


def registry_and_kinds() -> tuple[CollectorRegistry, Kinds]:
    registry = CollectorRegistry()
    return registry, {
        kind: functools.partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)
    }


def of(values: Values, name: str, **labels: str) -> float:
    """An engine's number."""
    told = sorted({"engine": "0", **labels}.items())
    return values[f"interlace_{name}" + "".join(f"{{{k}={v}}}" for k, v in told)]


numbers = pytest.mark.parametrize("table", [PIPELINE_NUMBERS, EXAMPLE_NUMBERS])


@numbers
def test_each_number_has_a_family_and_a_place_of_its_own_in_it(
    table: Mapping[str, Number],
) -> None:
    for number in table.values():
        assert (FAMILIES[number.family].label is None) == (number.label is None)
    places = [(number.family, number.label) for number in table.values()]
    assert len(places) == len(set(places))


def test_what_the_statistics_document_is_exported() -> None:
    assert set(EXAMPLE_NUMBERS) == set(KVFolderCounters.__annotations__)
    documented = set(re.findall(r"`([a-z]+_[a-z_]+)`", PipelineStats.__doc__ or ""))
    assert documented - {"load_timed_bytes"} <= set(PIPELINE_NUMBERS)
    undocumented = {n for n in PIPELINE_NUMBERS if not n.endswith("_timed_bytes")} - documented
    assert not undocumented
    levels = {n for n, number in PIPELINE_NUMBERS.items() if FAMILIES[number.family].is_level}
    assert levels == LEVELS


def test_levels_are_the_newest_and_counts_add_up() -> None:
    stats = PipelineStats(data={"blocks_saved": 2, "open_saves": 3})
    stats.aggregate(PipelineStats(data={"blocks_saved": 1, "open_saves": 0}))
    assert stats.data == {"blocks_saved": 3, "open_saves": 0}
    assert not PipelineStats(data={"open_saves": 0}).is_empty()
    assert PipelineStats().is_empty()


def test_a_level_is_told_when_it_changes() -> None:
    counts = Counts()
    counts.set_levels({"open_loads": 0, "open_saves": 2})
    taken = counts.take()
    assert taken is not None
    assert taken.data == {"open_saves": 2}
    counts.set_levels({"open_loads": 0, "open_saves": 2})
    assert counts.take() is None
    counts.set_levels({"open_saves": 1})
    counts.set_levels({"open_saves": 0})
    taken = counts.take()
    assert taken is not None
    assert taken.data == {"open_saves": 0}


def test_counts_begin_at_zero_and_strangers_are_left_out() -> None:
    registry, kinds = registry_and_kinds()
    exporter = CountedMetrics(
        EngineConfig(), kinds, ["engine"], {0: ["0"], 1: ["1"]}, PIPELINE_NUMBERS
    )
    told = functools.partial(registry.get_sample_value, labels={"engine": "0"})
    assert told("interlace_kv_loaded_blocks_total") == 0
    exporter.observe({"blocks_loaded": 3, "nobody_knows": 9})
    exporter.observe({"blocks_loaded": 4, "write_queue_bytes": 100})
    exporter.observe({"write_queue_bytes": 40})
    exporter.observe({"blocks_loaded": 5}, 1)
    assert told("interlace_kv_loaded_blocks_total") == 7
    assert told("interlace_kv_write_queue_bytes") == 40


def test_connectors_of_different_kinds_share_families_in_one_multi_connector() -> None:
    registry, kinds = registry_and_kinds()
    names = ("PipelineConnector", "ExampleConnector", "PipelineConnector")
    config = multi_config([{"kv_connector": name} for name in names])
    metrics = MultiConnector.build_prom_metrics(config, kinds, ["engine"], {0: ["0"]})
    assert metrics is not None
    for number, key in enumerate(metrics.exporters):
        metrics.observe({key: {"blocks_loaded": number + 1}})
    name = "interlace_kv_loaded_blocks_total"
    told = [
        registry.get_sample_value(name, {"engine": "0", "connector": key})
        for key in metrics.exporters
    ]
    assert told == [1, 2, 3]


@pytest.mark.parametrize("kind", [PipelineConnector, ExampleConnector])
def test_without_any_labels(kind: type[PipelineConnector] | type[ExampleConnector]) -> None:
    registry, kinds = registry_and_kinds()
    kind.build_prom_metrics(EngineConfig(), kinds, [], {0: []}).observe({"blocks_loaded": 2})
    assert registry.get_sample_value("interlace_kv_loaded_blocks_total") == 2


async def rest(engine: AsyncEngine) -> None:
    await forget_on_device(engine)
    while not scheduler_of(engine).is_idle:
        await a_step(engine)


async def test_a_prompt_that_is_written_and_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, may_go_on = tmp_path / "kv", threading.Event()
    async with engine_of(folder) as engine:
        await ask(engine, PROMPT, 1)
        await rest(engine)
        written = read(engine.metrics)
    monkeypatch.setattr(slabs, "read_at", waiting_for(may_go_on))
    async with engine_of(folder) as engine:
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(ask(engine, PROMPT, 1))
            # Reads that have ended when they are first looked at are not timed.
            await until(lambda: engine.snapshot().stats.num_steps >= 3)
            may_go_on.set()
        assert num_external(asked.result()) == 10 * BLOCK_SIZE
        await rest(engine)
        values = read(engine.metrics)
        assert engine.snapshot().kv_connector_stats["bytes_fetched"] == 10 * RECORD_BYTES
    assert of(written, "kv_saved_blocks_total") == of(written, "kv_written_blocks_total") == 10
    for transfer in ("save", "write"):
        moved = of(written, "kv_transfer_bytes_total", transfer=transfer)
        assert moved == 10 * RECORD_BYTES
        assert of(written, "kv_timed_transfer_bytes_total", transfer=transfer) == moved
        assert of(written, "kv_transfer_seconds_total", transfer=transfer) > 0
    assert of(written, "kv_host_blocks", state="stored") == 10
    assert of(written, "kv_host_blocks", state="free") == 190
    assert of(written, "kv_write_queue_bytes") == 0
    assert of(values, "kv_loaded_blocks_total") == of(values, "kv_fetched_blocks_total") == 10
    assert of(values, "kv_load_ways_total", way="bulk") == 1
    for transfer in ("load", "read"):
        assert of(values, "kv_transfer_bytes_total", transfer=transfer) == 10 * RECORD_BYTES
    for transfer in ("load_beside", "read"):
        timed = of(values, "kv_timed_transfer_bytes_total", transfer=transfer)
        assert timed == 10 * RECORD_BYTES
        assert of(values, "kv_transfer_seconds_total", transfer=transfer) > 0
    assert values["interlace_kv_hit_tokens_total"] == 10 * BLOCK_SIZE
    assert not [name for name in values if "_created" in name]
    for transfer in ("load", "save"):
        assert of(values, "kv_open_transfers", transfer=transfer) == 0


async def test_small_saves_that_share_a_transfer_are_timed_once(tmp_path: Path) -> None:
    async with engine_of(tmp_path / "kv") as engine:
        prompts = [[n, *PROMPT[: 2 * BLOCK_SIZE]] for n in range(3)]
        await asyncio.gather(*(ask(engine, prompt, 1) for prompt in prompts))
        await rest(engine)
        values = read(engine.metrics)
    moved = of(values, "kv_transfer_bytes_total", transfer="save")
    assert moved == 6 * RECORD_BYTES
    assert of(values, "kv_timed_transfer_bytes_total", transfer="save") == moved


async def test_loads_within_a_step_are_timed(tmp_path: Path) -> None:
    async with engine_of(tmp_path / "kv", load_mode="layerwise") as engine:
        for _ in range(2):
            await ask(engine, PROMPT, 2)
            await rest(engine)
        values = read(engine.metrics)
    assert of(values, "kv_load_ways_total", way="layerwise") == 1
    assert of(values, "kv_timed_transfer_bytes_total", transfer="load") == 10 * RECORD_BYTES
    assert of(values, "kv_transfer_seconds_total", transfer="load") > 0


async def test_reads_that_hang_are_told_and_so_is_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, may_go_on = tmp_path / "kv", threading.Event()
    await stored(folder)
    async with engine_of(folder, read_deadline_s=0.2) as engine:
        monkeypatch.setattr(slabs, "read_at", waiting_for(may_go_on))
        await ask(engine, PROMPT, 5)
        await a_step(engine)
        values = read(engine.metrics)
        assert of(values, "kv_failed_reads_total", reason="late") == 10
        assert 0 < of(values, "kv_hanging_transfers") <= 10
        assert of(values, "kv_open_transfers", transfer="load") == 1
        may_go_on.set()
        await rest(engine)
        values = read(engine.metrics)
        assert of(values, "kv_hanging_transfers") == of(values, "kv_read_queue_blocks") == 0
        assert of(values, "kv_load_failed_blocks_total") == 10


async def test_what_waits_to_be_written_and_what_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, add = threading.Event(), SlabWriter.add

    def slow(writer: SlabWriter, records: Any) -> Any:
        may_go_on.wait(20)
        return add(writer, records)

    monkeypatch.setattr(SlabWriter, "add", slow)
    async with engine_of(tmp_path / "kv", num_records=40) as engine:
        try:
            await ask(engine, PROMPT, 1)
            while not (queued := of(read(engine.metrics), "kv_write_queue_bytes")):
                await a_step(engine)
            assert 0 < queued <= 10 * RECORD_BYTES
        finally:
            may_go_on.set()
        await rest(engine)
        values = read(engine.metrics)
    assert of(values, "kv_write_queue_bytes") == 0
    reasons = ("order", "write_queue", "disk_full", "disk_error", "record", "copy")
    dropped = [of(values, "kv_dropped_blocks_total", reason=reason) for reason in reasons]
    assert sum(dropped) + of(values, "kv_written_blocks_total") == 10


async def test_example_connector_tells_what_its_workers_count(tmp_path: Path) -> None:
    config = EngineConfig(
        block_size=4,
        num_gpu_blocks_override=40,
        skip_tokenizer_init=True,
        kv_transfer_config=KVTransferConfig(
            kv_connector="ExampleConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"shared_storage_path": str(tmp_path)},
        ),
    )
    async with AsyncEngine.from_loaded(config, tiny_model()) as engine:
        for _ in range(2):
            await ask(engine, PROMPT, 2)
            await forget_on_device(engine)
        values = read(engine.metrics)
    assert of(values, "kv_saved_blocks_total") >= 10
    assert of(values, "kv_loaded_blocks_total") == 10
    assert of(values, "kv_transfer_bytes_total", transfer="load") > 0
    assert of(values, "kv_dropped_saves_total", reason="disk_error") == 0
    assert values["interlace_kv_hit_tokens_total"] == 10 * BLOCK_SIZE
