"""Saves under preemption, bad blocks, full disks and shutdown: right KV is published, or none."""

from __future__ import annotations

import errno
import logging
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from example_engine import BLOCK_SIZE, LAYERS, ExampleEngine, example_config, folders, store

from interlace.connectors.kv_folders import writer
from interlace.connectors.kv_folders.folders import KVFolders
from interlace.connectors.kv_folders.writer import FolderWriter
from interlace.engine.config import EngineConfig
from interlace.engine.errors import ConfigError, ConnectorError
from interlace.engine.request import RequestStatus

PROMPT = list(range(9))


class Gate:
    """Holds the lane that writes before it does, until the test opens it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.arrived = threading.Event()
        write = KVFolders.write

        def held(*arguments: Any) -> Any:
            self.arrived.set()
            assert self.opened.wait(30)
            return write(*arguments)

        monkeypatch.setattr(KVFolders, "write", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


def test_b01_b04_a_preempted_request_saves_its_own_kv(tmp_path: Path, gate: Gate) -> None:
    """B01: its blocks are another's before the file is written. B04: no fence is needed, since
    the pages were copied before wait_for_save returned."""
    with ExampleEngine(example_config(tmp_path), num_blocks=4) as engine:
        victim = engine.request(PROMPT)
        engine.admit(victim)
        engine.step({victim: 9})
        assert gate.arrived.wait(20)
        engine.preempt(victim)
        other = engine.request(range(100, 109))
        engine.give_blocks(other)
        engine.step({other: 9}, preempted=[victim])
        engine.check(other)
        gate.opened.set()
        engine.finish(other)
        engine.settle()
        assert engine.finish(victim, RequestStatus.FINISHED_ABORTED) in (False, True)
        engine.settle()
    with ExampleEngine(example_config(tmp_path)) as engine:
        assert engine.run(PROMPT) == 8
        assert engine.run(range(100, 109)) == 8


@pytest.mark.parametrize("late", [False, True])
def test_b07_no_way_of_saving_reads_pages_after_its_step(
    tmp_path: Path, gate: Gate, late: bool
) -> None:
    """Blocks are copied in the step that fills them, or, known late, in a later one: on both ways
    the pages may change as soon as that step is over, while the writer has not begun."""
    with ExampleEngine(example_config(tmp_path)) as engine:
        request = engine.request(PROMPT)
        engine.admit(request)
        if late:  # the hashes of what the first step fills become known in the second
            hashes, request.block_hashes = request.block_hashes, []
            assert _saved(engine.step({request: 8})) == 0
            request.block_hashes = hashes
            assert _saved(engine.step({request: 1})) == 2
        else:
            assert _saved(engine.step({request: 9})) == 2
        assert gate.arrived.wait(20)
        for pages in engine.pages.values():
            pages.fill_(-1)
        gate.opened.set()
        engine.finish(request)
        engine.settle()
    with ExampleEngine(example_config(tmp_path)) as engine:
        assert engine.run(PROMPT) == 8, "what was saved is right: run checks every slot"


def test_b11_after_a_resume_only_full_blocks_are_saved(tmp_path: Path) -> None:
    with ExampleEngine(example_config(tmp_path)) as engine:
        request = engine.request(range(13))
        engine.admit(request)
        step = engine.step({request: 8})
        assert _saved(step) == 2
        engine.preempt(request)
        engine.step(preempted=[request])
        engine.give_blocks(request)
        step = engine.step({request: 10})  # ends in the middle of the third block
        assert _saved(step) == 0
        step = engine.step({request: 3})
        assert _saved(step) == 1
        engine.check(request)
        engine.finish(request)
        engine.settle()
    with ExampleEngine(example_config(tmp_path)) as engine:
        assert engine.run(range(13)) == 12


def _saved(step: Any) -> int:
    saves = step.message.kv_connector_metadata.saves
    for save in saves:
        assert len(save.block_ids) == len(save.block_hashes)
    return sum(len(save.block_ids) for save in saves)


def test_b12_b14_external_hit_preemption_and_resume_with_saves_open(
    tmp_path: Path, gate: Gate
) -> None:
    """B12: ids and hashes stay of one length. B14: a re-admission may find saves open."""
    gate.opened.set()
    store(tmp_path, PROMPT)
    gate.opened.clear()
    with ExampleEngine(example_config(tmp_path)) as engine:
        request = engine.request(range(21))
        assert engine.admit(request) == 8
        assert _saved(engine.step({request: 6})) == 1
        engine.preempt(request)
        engine.step(preempted=[request])
        assert engine.admit(request) == 8
        assert _saved(engine.step({request: 13})) == 2, "the open save is not repeated"
        gate.opened.set()
        engine.check(request)
        engine.finish(request)
        engine.settle()
        assert engine.sent == [request.request_id]
    with ExampleEngine(example_config(tmp_path)) as engine:
        assert engine.run(range(21)) == 20


def test_b15_a_resumed_request_saves_under_the_hashes_of_all_its_tokens(tmp_path: Path) -> None:
    with ExampleEngine(example_config(tmp_path)) as engine:
        request = engine.request(range(4))
        engine.prefill(request)
        for token in range(50, 83):
            request.append_output(token)
            engine.step({request: 1})
        engine.preempt(request)
        engine.step(preempted=[request])
        engine.until(lambda: engine.scheduler.counters.blocks_saved == 9)
        known = engine.scheduler._scheduler._known
        for folder in folders(tmp_path):
            shutil.rmtree(folder)
        engine.until(lambda: not any(h in known for h in request.block_hashes))
        engine.give_blocks(request)
        engine.step({request: 37})
        engine.finish(request)
        engine.settle()
        tokens = [*request.all_token_ids, 1]
    with ExampleEngine(example_config(tmp_path)) as engine:
        assert engine.run(tokens) == 36


def test_the_answer_is_gathered_into_runs_of_eight_blocks_and_a_rest(tmp_path: Path) -> None:
    saved = []
    with ExampleEngine(example_config(tmp_path)) as engine:
        request = engine.request(range(7))
        engine.prefill(request)
        for token in range(50, 95):
            request.append_output(token)
            saved.append(_saved(engine.step({request: 1})))
        engine.check(request)
        assert [n for n in saved if n] == [8]
        assert saved.index(8) == 28, "with the last token of the ninth block"
        assert engine.finish(request), "four blocks are copied in the next step"
        assert _saved(engine.step()) == 4
        engine.settle()
        assert engine.scheduler.counters.blocks_saved == 13
    assert len(folders(tmp_path)) == 3
    with ExampleEngine(example_config(tmp_path)) as engine:
        assert engine.run([*request.all_token_ids, 1]) == 52


@pytest.mark.parametrize("end", ["abort", "error", "preempted"])
def test_what_is_gathered_when_a_request_ends_otherwise(tmp_path: Path, end: str) -> None:
    """An abort saves it, an error does not, and a preemption loses nothing but the save."""
    with ExampleEngine(example_config(tmp_path)) as engine:
        request = engine.request(range(4))
        engine.prefill(request)
        for token in range(50, 58):
            request.append_output(token)
            engine.step({request: 1})
        engine.until(lambda: engine.scheduler.counters.blocks_saved == 1)
        status = RequestStatus.FINISHED_ABORTED
        if end == "preempted":
            engine.preempt(request)
            engine.step(preempted=[request])
        elif end == "error":
            status = RequestStatus.FINISHED_ERROR
        assert engine.finish(request, status) == (end == "abort")
        engine.settle()
        assert engine.scheduler.counters.blocks_saved == (3 if end == "abort" else 1)


def test_gathered_blocks_are_saved_as_they_are_after_bad_ones(tmp_path: Path) -> None:
    """What was gathered and then found to stand on a bad block is saved as it is computed anew."""
    with ExampleEngine(example_config(tmp_path)) as engine:
        request = engine.request(range(4))
        engine.prefill(request)
        for token in range(50, 66):
            request.append_output(token)
            step = engine.plan({request: 1})
            engine.execute(step)
            if token == 65:
                assert step.output is not None
                step.output.invalid_block_ids = {request.blocks[0].block_id}
                for pages in engine.pages.values():
                    pages.fill_(7)
            engine.apply(step)
        assert engine.num_computed[request.request_id] == 0
        engine.step({request: 20})
        engine.check(request)
        engine.finish(request)
        engine.settle()
    with ExampleEngine(example_config(tmp_path)) as engine:
        assert engine.run([*request.all_token_ids, 1]) == 20


def test_a_consumer_has_no_writer_no_memory_for_copies_and_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a consumer writes nothing")

    store(tmp_path, PROMPT)
    monkeypatch.setattr("interlace.connectors.example_saves.StagingPool", never)
    monkeypatch.setattr("interlace.connectors.example_worker.FolderWriter", never)
    monkeypatch.setattr(KVFolders, "remove_leftovers", never)
    with ExampleEngine(example_config(tmp_path, role="kv_consumer")) as engine:
        names = {thread.name for thread in threading.enumerate()}
        assert "interlace-lane-store" not in names
        assert engine.run(PROMPT) == 8


@pytest.mark.parametrize("full", [False, True])
def test_a_percent_sign_in_the_directory_s_name_breaks_no_log(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    full: bool,
) -> None:
    def write(*_: object) -> None:
        raise OSError(errno.ENOSPC, "100 %s full")

    root = tmp_path / "50%d of %s"
    monkeypatch.setattr(KVFolders, "write", write)
    with ExampleEngine(example_config(root, queue_bytes=1 if full else 10**6)) as engine:
        engine.run(PROMPT)
    (record,) = caplog.records
    assert str(root) in record.getMessage()
    assert ("behind" if full else "100 %s full") in record.getMessage()


def test_b12_the_writer_survives_any_exception_and_every_save_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: object) -> None:
        raise RuntimeError("boom")

    with ExampleEngine(example_config(tmp_path)) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(KVFolders, "write", write)
            for start in range(3):
                assert engine.run(range(start, start + 9)) == 0
        assert engine.worker.counters.saves_dropped_error == 3
        assert engine.scheduler.counters.saves_dropped_error == 3
        engine.run(PROMPT)
        assert engine.run(PROMPT) == 8


@pytest.mark.parametrize("where", ["write", "publish"])
def test_a_full_disk_drops_saves_and_says_so_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
) -> None:
    """B69: no space is a skipped save."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with ExampleEngine(example_config(tmp_path)) as engine:
        target = "interlace.connectors.kv_folders.folders.write_tensor"
        with monkeypatch.context() as patch:
            if where == "write":
                patch.setattr(target, full)
            else:
                patch.setattr(Path, "rename", full)
            for start in range(3):
                request = engine.request(range(start, start + 9))
                engine.prefill(request)
                for token in range(8):  # no retry in later steps
                    request.append_output(token)
                    engine.step({request: 1})
                engine.finish(request)
                engine.settle()
        assert engine.worker.counters.saves_dropped_error == 6, "a prompt and an answer each"
        assert engine.scheduler.counters.blocks_saved == 0
        assert not list(next(tmp_path.iterdir()).joinpath("tmp").iterdir())
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "No space left" in warnings[0].getMessage()


def test_b38_b43_a_full_queue_drops_saves_and_holds_up_nobody(tmp_path: Path, gate: Gate) -> None:
    one_save = len(LAYERS) * BLOCK_SIZE * 16
    with ExampleEngine(example_config(tmp_path, queue_bytes=4 * one_save)) as engine:
        requests = [engine.request(range(n, n + 5)) for n in range(7)]
        for request in requests:
            engine.prefill(request)
        for request in requests:
            engine.finish(request)
        gate.opened.set()
        engine.settle()
        assert engine.scheduler.counters.saves_dropped_queue_full == 3
        assert engine.scheduler.counters.blocks_saved == 4
        assert engine.run(range(10, 15)) == 0
        assert engine.run(range(10, 15)) == 4, "there is room again"


def test_b63_nothing_is_visible_before_the_step_was_applied_and_allowed(
    tmp_path: Path, gate: Gate
) -> None:
    with ExampleEngine(example_config(tmp_path)) as engine:
        request = engine.request(PROMPT)
        engine.admit(request)
        step = engine.plan({request: 9})
        engine.execute(step)
        assert gate.arrived.wait(20)
        gate.opened.set()
        _wait_for_the_writer(engine)
        engine.execute(engine.plan())  # a step in flight behind it
        _wait_for_the_writer(engine)
        assert not folders(tmp_path)
        assert engine.match(engine.request(PROMPT)) == (0, False)
        engine.apply(step)
        assert not folders(tmp_path)
        engine.step()
        _wait_for_the_writer(engine)
        assert len(folders(tmp_path)) == 1
        engine.finish(request)
        engine.settle()


def writer_of(engine: ExampleEngine) -> FolderWriter:
    saves = engine.worker._worker.saves
    assert saves is not None
    return saves._writer


def _wait_for_the_writer(engine: ExampleEngine) -> None:
    assert writer_of(engine)._lane.record().wait(20)


def test_truth_before_sharing_a_bad_block_beneath_drops_the_saves_of_every_sharer(
    tmp_path: Path,
) -> None:
    """B27 as far as stored KV goes: what was computed on a bad block is never published, and
    what is computed again is."""
    store(tmp_path, PROMPT)
    (stored,) = folders(tmp_path)
    with ExampleEngine(example_config(tmp_path, refresh_s=1000.0)) as engine:
        one, two = engine.request(range(17)), engine.request([*range(12), 70, 71, 72, 73, 74])
        assert engine.admit(one) == 8
        engine.give_blocks(two, num_local=0)
        two.blocks[:2] = one.blocks[:2]  # a sharer of the loaded prefix
        engine.allocated(two, 0)
        engine.num_computed[two.request_id] = 8
        data = bytearray((stored / "layer_001.safetensors").read_bytes())
        data[-1] ^= 1
        (stored / "layer_001.safetensors").write_bytes(data)
        step = engine.step({one: 9, two: 9})
        assert _saved(step) == 4 - 1, "the third block is of both"
        assert engine.invalid == {block.block_id for block in one.blocks[:2]}
        assert engine.num_computed[two.request_id] == 0
        engine.step()
        _wait_for_the_writer(engine)
        assert not folders(tmp_path)
        assert engine.worker.counters.saves_dropped_bad_blocks == 2
        step = engine.step({one: 17, two: 17})
        assert _saved(step) == 5, "all of it, with what was lost"
        for request in (one, two):
            engine.check(request)
            engine.finish(request)
        engine.settle()
    with ExampleEngine(example_config(tmp_path)) as engine:
        assert engine.run(range(17)) == 16
        assert engine.run(two.all_token_ids) == 16


def test_a_failed_request_saves_nothing_more_and_is_let_go(tmp_path: Path) -> None:
    with ExampleEngine(example_config(tmp_path)) as engine:
        request = engine.request(range(17))
        engine.admit(request)
        step = engine.plan({request: 17})
        engine.execute(step)
        assert step.output is not None
        step.output.invalid_block_ids = {request.blocks[1].block_id}
        assert engine.finish(request, RequestStatus.FINISHED_ERROR), "a save is open"
        engine.apply(step)
        engine.settle()
        assert engine.sent == [request.request_id]
        assert not folders(tmp_path)
        assert engine.scheduler.counters.saves_dropped_bad_blocks == 1


def test_a_save_planned_at_the_end_is_undone_by_a_bad_block_of_the_step_in_flight(
    tmp_path: Path,
) -> None:
    with ExampleEngine(example_config(tmp_path)) as engine:
        request = engine.request(range(7))
        engine.admit(request)
        engine.step({request: 7})
        step = engine.plan({request: 1})
        engine.execute(step, {request.request_id: [*range(7), 70]})
        request.append_output(70)
        assert engine.finish(request)
        assert step.output is not None
        step.output.invalid_block_ids = {request.blocks[0].block_id}
        engine.apply(step)
        engine.settle()
        assert engine.scheduler.counters.saves_dropped_bad_blocks == 1
        assert sum(1 for _ in folders(tmp_path)) == 1, "the first block was applied before"


def test_completion_is_reported_once_and_only_for_held_requests(tmp_path: Path) -> None:
    with ExampleEngine(example_config(tmp_path)) as engine:
        held = []
        for n in range(6):
            request = engine.request(range(n % 3, n % 3 + 9))
            engine.prefill(request)
            if engine.finish(request):
                held.append(request.request_id)
            if n == 2:
                engine.settle()
        engine.settle()
        for _ in range(3):
            engine.step()
        assert engine.sent == held == ["r1", "r2", "r3"]


def test_an_engine_that_closes_writes_what_was_allowed_and_nothing_else(
    tmp_path: Path, gate: Gate
) -> None:
    with ExampleEngine(example_config(tmp_path)) as engine:
        allowed = engine.request(PROMPT)
        engine.admit(allowed)
        engine.step({allowed: 9})
        late = engine.request(range(50, 59))
        engine.admit(late)
        engine.step({late: 9})  # carries the verdict on the first, and is not judged itself
        threading.Timer(0.05, gate.opened.set).start()
        engine.close()
        engine.close()
        assert "interlace-lane-store" not in {thread.name for thread in threading.enumerate()}
    with ExampleEngine(example_config(tmp_path)) as engine:
        assert engine.run(PROMPT) == 8
        assert engine.match(engine.request(range(50, 59))) == (0, False)
        assert not list(next(tmp_path.iterdir()).joinpath("tmp").iterdir())


def test_threads_end_with_the_engine(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with ExampleEngine(example_config(tmp_path)) as engine:
        engine.run(PROMPT)
        assert {thread.daemon for thread in set(threading.enumerate()) - before} == {True}
    end = time.monotonic() + 20
    while set(threading.enumerate()) - before:
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_long_run_becomes_several_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("interlace.connectors.example_save_planner.MAX_RUN_BLOCKS", 3)
    with ExampleEngine(example_config(tmp_path)) as engine:
        assert engine.run(range(33)) == 0
        assert len(folders(tmp_path)) == 3
        assert engine.run(range(33)) == 32


def test_a_run_takes_a_part_of_the_queue_only(tmp_path: Path) -> None:
    """So that a model with large blocks can be saved at all."""
    block = len(LAYERS) * BLOCK_SIZE * 16
    for queue_bytes, num_folders in ((12 * block, 3), (4 * block, 8), (block, 8)):
        root = tmp_path / str(queue_bytes)
        with ExampleEngine(example_config(root, queue_bytes=queue_bytes)) as engine:
            for end in (8, 20, 33):  # a chunk at a time: the writer may keep up
                request = engine.request(range(end))
                engine.prefill(request)
                engine.finish(request)
                engine.settle()
            num_dropped = engine.scheduler.counters.saves_dropped_queue_full
        if queue_bytes > block:
            assert num_dropped == 0
            assert len(folders(root)) >= num_folders


def test_b64_losing_the_race_is_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = KVFolders.publish

    def slower(own: KVFolders, *arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(KVFolders, "publish", publish)
            store(tmp_path, range(5))
        return publish(own, *arguments)

    with ExampleEngine(example_config(tmp_path, refresh_s=1000.0)) as engine:
        engine.match(engine.request(PROMPT))
        monkeypatch.setattr(KVFolders, "publish", slower)
        engine.run(PROMPT)
        monkeypatch.undo()
        assert engine.worker.counters.saves_dropped_error == 0
        assert engine.run(PROMPT) == 4, "the winner's manifest counts"
        assert engine.run(PROMPT) == 8, "the rest became a run of its own"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shared_storage_path": None}, "shared_storage_path must name a directory"),
        ({"shared_storage_path": ""}, "shared_storage_path must name a directory"),
        ({"shared_storage_path": 5}, "shared_storage_path must name a directory"),
        ({"load_asinc": True}, "Did you mean 'load_async'"),
        ({"load_async": "yes"}, "load_async must be true or false"),
        ({"refresh_s": 0}, "refresh_s"),
        ({"refresh_s": 1e12}, "refresh_s"),
        ({"deadline_s": 1e12}, "deadline_s"),
        ({"queue_bytes": 0}, "queue_bytes"),
        ({"deadline_s": "5"}, "deadline_s"),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    config: EngineConfig = example_config(tmp_path, **{"shared_storage_path": "x", **options})
    with pytest.raises(ConfigError, match=words):
        ExampleEngine(config)


def test_a_directory_that_cannot_be_written_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = example_config(tmp_path / "file" / "kv")
    with pytest.raises(ConfigError, match=r"file/kv.*Choose a shared_storage_path.*kv_consumer"):
        ExampleEngine(config)
    with ExampleEngine(example_config(tmp_path / "file" / "kv", role="kv_consumer")) as engine:
        assert engine.run(PROMPT) == 0
        assert engine.run(PROMPT) == 0


def test_b71_pages_of_another_layout_or_type_are_refused(tmp_path: Path) -> None:
    with ExampleEngine(example_config(tmp_path)) as engine:
        register = engine.worker.register_kv_caches
        pages = torch.zeros(8, 2, 4, 1, 2)
        with pytest.raises(ConnectorError, match="contiguous"):
            register({"a": pages.permute(0, 1, 4, 3, 2)})
        with pytest.raises(ConnectorError, match="contiguous"):
            register({"a": pages.view(8, 8, 2)})
        with pytest.raises(ConnectorError, match="dtype"):
            register({"a": pages.to(torch.float16)})
        with pytest.raises(ConnectorError, match="same in all layers"):
            register({"a": pages, "b": torch.zeros(8, 2, 4, 2, 2)})


def test_the_queue_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate) -> None:
    """I12."""
    monkeypatch.setattr(writer, "MAX_SAVES", 2)
    with ExampleEngine(example_config(tmp_path)) as engine:
        for n in range(4):
            engine.prefill(engine.request(range(n, n + 9)))
        gate.opened.set()
        engine.until(lambda: engine.scheduler.counters.blocks_saved == 4)
        assert engine.scheduler.counters.saves_dropped_queue_full == 2
