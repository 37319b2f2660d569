"""ExampleConnector with several workers, and what it tells: statistics, events, faults."""

from __future__ import annotations

import dataclasses
import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
from example_engine import BLOCK_SIZE, LAYERS, ExampleEngine, example_config, folders, store
from tiny_model import plain_answer, tiny_model

from interlace import AsyncEngine, EngineConfig, KVTransferConfig, SamplingParams
from interlace.connectors.example_connector import ExampleConnector
from interlace.connectors.example_scheduler import MAX_EVENTS
from interlace.connectors.example_stats import ExampleConnectorStats
from interlace.connectors.kv_folders.folders import KVFolders
from interlace.connectors.kv_folders.identity import KVIdentity
from interlace.engine.errors import ConfigError
from interlace.engine.kv_connector import KVConnectorRole
from interlace.engine.kv_events import MEDIUM_STORAGE, BlockRemoved, BlockStored
from interlace.layers.virtual_lanes import VirtualLanes

PROMPT = list(range(17))
BLOCK_BYTES = len(LAYERS) * BLOCK_SIZE * 16
asynchronously = pytest.mark.parametrize("load_async", [False, True], ids=["sync", "async"])


def of_rank(root: Path, rank: int, num_workers: int = 2) -> list[Path]:
    """Visible folders of one rank."""
    config = example_config(root, num_workers=num_workers).for_rank(rank)
    own = KVFolders(root, KVIdentity.of(config))
    return [path for path in folders(root) if own.manifest(path).identity == own.identity]


@asynchronously
@pytest.mark.parametrize("num_workers", [2, 3])
def test_each_worker_stores_and_loads_its_own_part(
    tmp_path: Path, num_workers: int, load_async: bool
) -> None:
    with ExampleEngine(example_config(tmp_path, num_workers=num_workers)) as engine:
        assert engine.run(PROMPT) == 0
        assert engine.sent == ["r1"], "once, when all have reported it"
        assert engine.scheduler.counters.blocks_saved == 4
        assert [len(of_rank(tmp_path, rank, num_workers)) for rank in range(num_workers)] == (
            [1] * num_workers
        )
    config = example_config(tmp_path, num_workers=num_workers, load_async=load_async)
    with ExampleEngine(config) as engine:
        assert engine.run(PROMPT) == 16
        assert engine.scheduler.counters.blocks_loaded == 4
        assert all(worker.counters.blocks_loaded == 4 for worker in engine.workers)
        assert engine.scheduler.counters.foreign_folders == 0
    with ExampleEngine(example_config(tmp_path)) as engine:
        assert engine.run(PROMPT) == 0, "another number of workers has other parts"
        assert engine.scheduler.counters.foreign_folders == num_workers


def test_what_one_worker_lacks_is_not_promised_and_is_saved_again(tmp_path: Path) -> None:
    store(tmp_path, PROMPT, num_workers=2)
    (lost,) = of_rank(tmp_path, 1)
    shutil.rmtree(lost)
    with ExampleEngine(example_config(tmp_path, num_workers=2)) as engine:
        assert engine.run(PROMPT) == 0
        assert engine.run(PROMPT) == 16
        assert all(worker.counters.saves_dropped_error == 0 for worker in engine.workers)
    assert len(folders(tmp_path)) == 2


@asynchronously
@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_that_one_worker_cannot_load_is_an_invalid_block_for_all(
    tmp_path: Path, rank: int, load_async: bool
) -> None:
    store(tmp_path, PROMPT, num_workers=2)
    config = example_config(tmp_path, num_workers=2, load_async=load_async)
    with ExampleEngine(config) as engine:
        request = engine.request(PROMPT)
        engine.match(request)
        hashes = set(engine.workers[rank].inject_store_fault("flipped", request.block_hashes[0]))
        assert hashes == set(request.block_hashes)
        engine.prefill(request)
        assert engine.invalid == {block.block_id for block in request.blocks[:4]}
        engine.check(request)
        engine.finish(request)
        engine.settle()
        assert engine.scheduler.counters.blocks_loaded == 0
        assert engine.run(PROMPT) == 16


@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_that_cannot_be_written_discards_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """A full queue of one worker, known before the save is allowed."""
    with ExampleEngine(example_config(tmp_path, num_workers=2)) as engine:
        saves = engine.workers[rank]._worker.saves
        assert saves is not None
        with monkeypatch.context() as patch:
            patch.setattr(saves._writer, "_queue_bytes", 1)
            engine.run(PROMPT)
        assert engine.sent == ["r1"]
        assert not folders(tmp_path)
        counters = engine.scheduler.counters
        assert (counters.saves_dropped_queue_full, counters.saves_dropped_bad_blocks) == (1, 0)
        assert engine.workers[1 - rank].counters.saves_dropped_bad_blocks == 1
        assert engine.run(PROMPT) == 0
        assert engine.run(PROMPT) == 16


@pytest.mark.parametrize("lanes", [None, "store first", "lazy"])
def test_a_part_that_fails_after_it_was_allowed_is_a_miss_and_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lanes: str | None
) -> None:
    publish = KVFolders.publish

    def failing(own: KVFolders, *arguments: Any) -> Any:
        if own.identity.rank == 1:
            own.discard(arguments[0])
            raise OSError(errno.ENOSPC, "No space left on device")
        return publish(own, *arguments)

    virtual = None
    if lanes is not None:
        virtual = VirtualLanes(0, "lazy" if lanes == "lazy" else ("store",))
    with ExampleEngine(example_config(tmp_path, num_workers=2, lanes=virtual)) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(KVFolders, "publish", failing)
            engine.run(PROMPT)
        assert engine.sent == ["r1"]
        assert engine.scheduler.counters.saves_dropped_error == 1
        assert (len(of_rank(tmp_path, 0)), len(of_rank(tmp_path, 1))) == (1, 0)
        assert list(engine.scheduler.take_events()) == []
        assert engine.match(engine.request(PROMPT)) == (0, False)
        engine.run(PROMPT)
        assert engine.run(PROMPT) == 16
        assert not engine.scheduler._scheduler._planner._open


def test_workers_may_take_turns_and_differ_in_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker's part ends many steps before the other's: the save ends with the last one."""
    lanes = VirtualLanes(0, "lazy", polls_per_work=10**6)
    with ExampleEngine(example_config(tmp_path, num_workers=2, lanes=lanes)) as engine:
        lanes.drain()
        request = engine.request(PROMPT)
        engine.admit(request)
        engine.step({request: 17})
        assert engine.finish(request)
        engine.step()
        saves = [worker._worker.saves for worker in engine.workers]
        for number, one in enumerate(saves):
            assert one is not None
            assert one._writer._lane.record().wait()
            for _ in range(3):
                engine.step()
            assert bool(engine.sent) == (number == 1)
            assert engine.scheduler.counters.blocks_saved == 4 * number
        assert engine.run(PROMPT) == 16


async def test_several_workers_under_the_whole_engine(tmp_path: Path) -> None:
    model, source = tiny_model(), [5, 9, 2, 7, 1, 3] * 5
    config = EngineConfig(
        block_size=4,
        num_gpu_blocks_override=60,
        skip_tokenizer_init=True,
        tensor_parallel_size=2,
        kv_transfer_config=KVTransferConfig(
            kv_connector="ExampleConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"shared_storage_path": str(tmp_path)},
        ),
    )
    params = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
    right = plain_answer(model, source, 7)
    for expected in (0, 28):
        async with AsyncEngine.from_loaded(config, model) as engine:
            answer = await engine.complete(source, params)
            assert answer.usage.num_external_cached_tokens == expected
            assert list(answer.token_ids) == right


# ---------------------------------------------------------------- statistics


def test_statistics_say_what_happened_since_they_were_asked_for(tmp_path: Path) -> None:
    """Of all workers together, and each thing once."""
    with ExampleEngine(example_config(tmp_path, num_workers=2)) as engine:
        assert engine.worker.get_kv_connector_stats() is None
        assert engine.scheduler.get_kv_connector_stats() is None
        engine.run(PROMPT)
        engine.run(PROMPT)
        engine.step()
        assert engine.stats == {
            "blocks_saved": 8,
            "bytes_saved": 8 * BLOCK_BYTES,
            "blocks_loaded": 8,
            "bytes_loaded": 8 * BLOCK_BYTES,
        }
        assert engine.worker.get_kv_connector_stats() is None
        assert engine.scheduler.get_kv_connector_stats() is None


def test_statistics_of_failures_and_drops(tmp_path: Path) -> None:
    with ExampleEngine(example_config(tmp_path, refresh_s=1000.0)) as engine:
        engine.run(PROMPT)
        request = engine.request(PROMPT)
        assert engine.match(request) == (16, False)
        engine.worker.inject_store_fault("flipped", request.block_hashes[3])
        saves = engine.worker._worker.saves
        assert saves is not None
        saves._writer._queue_bytes = 1
        engine.prefill(request)
        engine.finish(request)
        engine.settle()
        engine.step()
        del engine.stats["blocks_saved"], engine.stats["bytes_saved"]
        assert engine.stats == {
            "blocks_failed": 4,
            "damaged_folders": 1,
            "saves_dropped_queue_full": 1,
        }


def test_statistics_add_up_and_are_made_of_their_data() -> None:
    made = ExampleConnector.build_kv_connector_stats()
    assert made.is_empty()
    data = {"blocks_saved": 2, "bytes_saved": 10}
    one = ExampleConnector.build_kv_connector_stats(data)
    assert made.aggregate(one) is made
    made.aggregate(ExampleConnectorStats(data={"blocks_saved": 1, "blocks_loaded": 4}))
    assert made.reduce() == {"blocks_saved": 3, "bytes_saved": 10, "blocks_loaded": 4}
    assert one.data == data == {"blocks_saved": 2, "bytes_saved": 10}
    assert not made.is_empty()
    made.reset()
    assert made.is_empty()
    assert ExampleConnector.build_kv_connector_stats({"blocks_saved": 0}).is_empty()


# ---------------------------------------------------------------- events


@pytest.mark.parametrize("num_workers", [1, 2])
def test_events_tell_what_was_published_and_lost(tmp_path: Path, num_workers: int) -> None:
    with ExampleEngine(example_config(tmp_path, num_workers=num_workers)) as engine:
        request = engine.request(PROMPT)
        engine.prefill(request)
        for token in range(50, 58):
            request.append_output(token)
            engine.step({request: 1})
        engine.finish(request)
        engine.settle()
        hashes = tuple(request.block_hashes)
        stored = list(engine.scheduler.take_events())
        assert stored == [
            BlockStored(hashes[:4], None, (), 0, medium=MEDIUM_STORAGE),
            BlockStored(hashes[4:6], hashes[3], (), 0, medium=MEDIUM_STORAGE),
        ]
        assert list(engine.scheduler.take_events()) == []
        again = engine.request(PROMPT)
        assert engine.match(again)[0] == 16
        engine.workers[-1].inject_store_fault("missing", hashes[1])
        engine.prefill(again)
        assert list(engine.scheduler.take_events()) == [BlockRemoved(hashes[:4], MEDIUM_STORAGE)]
        engine.finish(again)
        engine.settle()
        engine.until(lambda: engine.scheduler.counters.blocks_saved >= 10)
        assert list(engine.scheduler.take_events()) == stored[:1]


def test_events_that_nobody_takes_have_a_bound(tmp_path: Path) -> None:
    """I12."""
    with ExampleEngine(example_config(tmp_path)) as engine:
        side = engine.scheduler._scheduler
        for number in range(MAX_EVENTS + 3):
            side._note_stored(None, (bytes([number % 256]),))
        assert engine.scheduler.counters.events_dropped == 3
        assert len(list(engine.scheduler.take_events())) == MAX_EVENTS


# ---------------------------------------------------------------- faults, and what it asks for


@asynchronously
@pytest.mark.parametrize("kind", ExampleConnector.store_fault_kinds)
def test_every_kind_of_fault_fails_exactly_the_blocks_that_it_names(
    tmp_path: Path, kind: str, load_async: bool
) -> None:
    config = example_config(
        tmp_path, load_async=load_async, lanes=VirtualLanes(3), refresh_s=86_400.0, deadline_s=60.0
    )
    with ExampleEngine(config) as engine:
        engine.run(PROMPT[:9])
        engine.run(PROMPT)
        request = engine.request(PROMPT)
        lost = set(engine.worker.inject_store_fault(kind, request.block_hashes[2]))
        assert lost == set(request.block_hashes[2:4])
        assert engine.match(request) == (16, load_async), "the index has not seen it"
        engine.prefill(request)
        assert engine.invalid == {block.block_id for block in request.blocks[2:4]}
        engine.check(request)
        engine.finish(request)
        engine.settle()
        assert engine.run(PROMPT) == 16, "it was saved again"


def test_a_fault_reaches_every_folder_that_holds_a_lost_block(tmp_path: Path) -> None:
    """Runs that overlap: whichever folder a load takes, it fails."""
    with (
        ExampleEngine(example_config(tmp_path, lanes=VirtualLanes(0, "lazy"))) as one,
        ExampleEngine(example_config(tmp_path, lanes=VirtualLanes(0, "lazy"))) as other,
    ):
        for engine, chunks in ((one, [8, 9]), (other, [12, 5])):
            request = engine.request(PROMPT)
            engine.give_blocks(request)
            for chunk in chunks:
                engine.step({request: chunk})
            engine.finish(request)
            engine.settle()
        assert len(folders(tmp_path)) == 3
        worker = one.worker
        assert set(worker.inject_store_fault("short", request.block_hashes[3])) <= set(
            request.block_hashes
        )
        assert not set(worker.inject_store_fault("flipped", request.block_hashes[3])), "it is gone"
        assert not set(worker.inject_store_fault("flipped", b"unknown"))
        with pytest.raises(KeyError):
            worker.inject_store_fault("burnt", request.block_hashes[0])


def test_what_it_asks_of_an_engine(tmp_path: Path) -> None:
    config = example_config(tmp_path)
    assert ExampleConnector.get_required_kvcache_layout(config) == "NHD"
    assert ExampleConnector.requires_piecewise_for_cudagraph({})
    setup = ExampleConnector.check_setup(tmp_path)
    assert not setup.engine_options
    with ExampleEngine(
        example_config(setup.extra_config.pop("shared_storage_path"), **setup.extra_config)
    ) as engine:
        engine.run(PROMPT)
        assert folders(tmp_path / "kv")


def test_an_engine_that_keeps_hidden_states_is_refused(tmp_path: Path) -> None:
    config = dataclasses.replace(example_config(tmp_path), hidden_state_layer_ids=(1,))
    with pytest.raises(ConfigError, match="hidden_state_layer_ids"):
        ExampleConnector(config, KVConnectorRole.WORKER)
