"""ExampleConnector, driven hook by hook: hits, loads and saves that go well."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from example_engine import BLOCK_SIZE, LAYERS, ExampleEngine, example_config, folders, store
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from interlace.connectors.kv_folders.folders import KVFolders
from interlace.connectors.kv_folders.identity import KVIdentity
from interlace.engine.request import RequestStatus
from interlace.layers.forward_context import ForwardContext


@pytest.mark.parametrize("load_async", [False, True])
def test_a_prompt_comes_back_in_another_engine(tmp_path: Path, load_async: bool) -> None:
    prompt = list(range(1, 15))
    store(tmp_path, prompt)
    with ExampleEngine(example_config(tmp_path, load_async=load_async)) as engine:
        request = engine.request(prompt)
        assert engine.match(request) == (12, load_async)
        assert engine.admit(request) == 12
        if load_async:
            engine.until(lambda: engine.received == [request.request_id])
            engine.allocated(request, 0)
        engine.step({request: 2})
        engine.check(request)
        assert not engine.finish(request), "all blocks are stored already"
        assert engine.worker.counters.blocks_loaded == 3
        assert engine.scheduler.counters.blocks_loaded == 3
        assert engine.scheduler.counters.blocks_saved == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_every_type_of_pages(tmp_path: Path, dtype: str) -> None:
    prompt = list(range(20))
    store(tmp_path, prompt, dtype=dtype)
    with ExampleEngine(example_config(tmp_path, dtype=dtype)) as engine:
        assert engine.run(prompt) == 16


def test_files_are_safetensors_that_others_can_read(tmp_path: Path) -> None:
    store(tmp_path, range(8), dtype="bfloat16")
    (folder,) = folders(tmp_path)
    with safe_open(folder / "layer_001.safetensors", framework="pt") as file:
        assert list(file.keys()) == ["kv_cache"]
        tensor = file.get_tensor("kv_cache")
    assert tensor.dtype == torch.bfloat16
    assert tuple(tensor.shape) == (2, 2, BLOCK_SIZE, 1, 2)
    modes = {path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (folder, folder.parent)} == {0o700}


@given(
    stored=st.integers(0, 34),
    length=st.integers(1, 34),
    num_local=st.integers(0, 8),
)
@settings(max_examples=40, deadline=None)
def test_b45_b46_exactly_the_whole_blocks_before_the_last_token(
    tmp_path_factory: pytest.TempPathFactory, stored: int, length: int, num_local: int
) -> None:
    """B45: a token is left to compute. B46: it is subtracted once."""
    root = tmp_path_factory.mktemp("kv")
    local = min(num_local, (length - 1) // BLOCK_SIZE) * BLOCK_SIZE
    if stored:
        store(root, range(stored))
    with ExampleEngine(example_config(root)) as engine:
        request = engine.request(range(length))
        full = min(stored // BLOCK_SIZE, (length - 1) // BLOCK_SIZE) * BLOCK_SIZE
        expected = max(0, full - local)
        assert engine.match(request, local) == (expected, False)
        # B18: asking changes nothing.
        side = engine.scheduler._scheduler
        before = f"{vars(side)} {vars(side._planner)}"
        for _ in range(4):
            assert engine.match(request, local) == (expected, False)
        assert f"{vars(side)} {vars(side._planner)}" == before


def test_b69_folders_are_spread_and_a_query_reads_no_file(tmp_path: Path) -> None:
    store(tmp_path / "kv", range(8))
    with ExampleEngine(example_config(tmp_path / "kv", refresh_s=1000.0)) as engine:
        request = engine.request(range(9))
        assert engine.match(request) == (8, False)
        for folder in folders(tmp_path / "kv"):
            assert folder.name.startswith(folder.parent.name)
        (tmp_path / "kv").rename(tmp_path / "away")
        assert engine.match(request) == (8, False)


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=7), min_size=1, max_size=6),
    chunk=st.integers(1, 9),
)
@settings(max_examples=25, deadline=None)
def test_a_prefix_is_a_chain_of_folders(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]], chunk: int
) -> None:
    """Any block-aligned prefix that was ever computed hits, whatever was stored in which run."""
    root = tmp_path_factory.mktemp("kv")
    seen: set[tuple[int, ...]] = set()
    with ExampleEngine(example_config(root)) as engine:
        for number, bits in enumerate(prompts):
            prompt = [bit for bit in bits for _ in range(BLOCK_SIZE)] + [2]
            request = engine.request(prompt)
            expected = 0
            while tuple(bits[: expected + 1]) in seen and expected < len(bits):
                expected += 1
            assert engine.admit(request) == expected * BLOCK_SIZE
            while rest := len(prompt) - engine.num_computed[request.request_id]:
                engine.step({request: min(chunk, rest)})
            engine.check(request)
            engine.finish(request)
            engine.settle()
            seen |= {tuple(bits[:n]) for n in range(1, len(bits) + 1)}
            assert engine.sent == sorted(set(engine.sent), key=engine.sent.index), number
    stored = [
        block_hash
        for folder in folders(root)
        for block_hash in _identity_folders(root).manifest(folder).block_hashes
    ]
    assert len(stored) == len(set(stored)) == len(seen), "each block is stored once"


def _identity_folders(root: Path) -> KVFolders:
    return KVFolders(root, KVIdentity.of(example_config(root)))


def test_generated_tokens_are_saved_in_whole_blocks(tmp_path: Path) -> None:
    with ExampleEngine(example_config(tmp_path)) as engine:
        request = engine.request(range(6))
        engine.prefill(request)
        for token in range(100, 111):
            request.append_output(token)
            engine.step({request: 1})
        engine.check(request)
        engine.finish(request)
        engine.settle()
        tokens = request.all_token_ids
    assert len(tokens) == 17
    with ExampleEngine(example_config(tmp_path)) as engine:
        assert engine.run(tokens) == 16


def test_with_two_steps_in_flight_a_block_is_saved_when_its_tokens_are_known(
    tmp_path: Path,
) -> None:
    with ExampleEngine(example_config(tmp_path)) as engine:
        request = engine.request(range(7))
        engine.admit(request)
        engine.step({request: 7})
        ahead = engine.plan({request: 1})  # fills the second block, with a token not known yet
        assert not ahead.message.kv_connector_metadata.saves
        engine.execute(ahead, {request.request_id: [*range(7), 50]})
        request.append_output(50)
        engine.apply(ahead)
        request.append_output(51)
        assert not engine.step({request: 1}).message.kv_connector_metadata.saves, "it is gathered"
        assert engine.finish(request)
        (save,) = engine.step().message.kv_connector_metadata.saves
        assert save.is_filled
        assert save.block_hashes == (request.block_hashes[1],)
        engine.settle()
    with ExampleEngine(example_config(tmp_path)) as engine:
        assert engine.run([*range(7), 50, 51, 52]) == 8


def test_with_two_steps_in_flight_a_gathered_run_is_copied_when_its_tokens_are_known(
    tmp_path: Path,
) -> None:
    tokens = [*range(4), *range(50, 90)]
    saves = []
    with ExampleEngine(example_config(tmp_path)) as engine:
        request = engine.request(range(4))
        engine.admit(request)
        engine.step({request: 4})
        for token in tokens[4:]:  # each step computes a token that is known when it has ended
            step = engine.plan({request: 1})
            saves += step.message.kv_connector_metadata.saves
            engine.execute(step, {request.request_id: tokens})
            request.append_output(token)
            engine.apply(step)
        (save,) = saves
        assert save.is_filled
        assert save.block_hashes == tuple(request.block_hashes[1:9])
        assert engine.finish(request)
        engine.settle()
    with ExampleEngine(example_config(tmp_path)) as engine:
        assert engine.run([*tokens, 1]) == 44


def test_what_is_known_only_at_the_end_is_saved_after_it(tmp_path: Path) -> None:
    with ExampleEngine(example_config(tmp_path)) as engine:
        request = engine.request(range(7))
        engine.admit(request)
        step = engine.plan({request: 7})
        engine.execute(step)
        engine.apply(step)
        ahead = engine.plan({request: 1})  # computes a token that is not known yet
        engine.execute(ahead, {request.request_id: [*range(7), 70]})
        request.append_output(70)
        assert engine.finish(request)
        engine.apply(ahead)
        copying = engine.step()
        (save,) = [save for save in copying.message.kv_connector_metadata.saves if save.is_filled]
        assert len(save.block_hashes) == 1
        engine.settle()
    with ExampleEngine(example_config(tmp_path)) as engine:
        assert engine.run([*range(7), 70, 71]) == 8


def test_roles_a_consumer_saves_nothing_and_a_producer_loads_nothing(tmp_path: Path) -> None:
    with ExampleEngine(example_config(tmp_path, role="kv_consumer")) as engine:
        engine.run(range(9))
        assert not folders(tmp_path)
    store(tmp_path, range(9), role="kv_producer")
    assert len(folders(tmp_path)) == 1
    with ExampleEngine(example_config(tmp_path, role="kv_producer")) as engine:
        assert engine.match(engine.request(range(9))) == (0, False)
    with ExampleEngine(example_config(tmp_path, role="kv_consumer")) as engine:
        assert engine.run(range(9)) == 8


def test_another_model_type_or_salt_never_hits(tmp_path: Path) -> None:
    store(tmp_path, range(9), identity="ab" * 32)
    for identity, dtype in (("cd" * 32, "float32"), ("ab" * 32, "float64")):
        config = example_config(tmp_path, identity=identity, dtype=dtype)
        with ExampleEngine(config) as engine:
            assert engine.match(engine.request(range(9))) == (0, False)
    with ExampleEngine(example_config(tmp_path, identity="ab" * 32)) as engine:
        assert engine.match(engine.request(range(9), salt="x")) == (0, False)
        assert engine.match(engine.request(range(9))) == (8, False)


def test_b48_hooks_may_come_twice_or_not_at_all(tmp_path: Path) -> None:
    store(tmp_path, range(8))
    with ExampleEngine(example_config(tmp_path)) as engine:
        request = engine.request(range(20))
        engine.admit(request)
        metadata = engine.plan({request: 12}).message.kv_connector_metadata
        worker = engine.worker
        worker.bind_connector_metadata(metadata)
        for name in (LAYERS[1], LAYERS[0], LAYERS[0], LAYERS[1]):
            worker.wait_for_layer_load(name)  # before start_load_kv: nothing is known yet
        assert worker.get_finished(set()) == (None, None)
        bad = worker.get_block_ids_with_load_errors()
        assert bad == {block.block_id for block in request.blocks[:2]}, "no layer was loaded"
        report = worker.build_connector_worker_meta()
        assert report is not None
        assert report.copied == tuple((save.save_id, 0) for save in metadata.saves)
        assert worker.build_connector_worker_meta() is None
        worker.clear_connector_metadata()


def test_layers_are_left_alone_where_there_is_nothing_to_wait_for_or_to_copy(
    tmp_path: Path,
) -> None:
    with ExampleEngine(example_config(tmp_path)) as engine:
        request = engine.request(range(2 * BLOCK_SIZE))
        engine.admit(request)
        for num_tokens, has_work in ((BLOCK_SIZE - 1, False), (1, True), (1, False)):
            step = engine.plan({request: num_tokens})
            engine.worker.bind_connector_metadata(step.message.kv_connector_metadata)
            engine.worker.start_load_kv(ForwardContext({}, None))
            assert engine.worker.has_connector_metadata() == has_work
            engine.execute(step)
            assert not engine.worker.has_connector_metadata()
            engine.apply(step)
        engine.finish(request)
        engine.settle()
        again = engine.request(range(2 * BLOCK_SIZE))
        assert engine.admit(again) == BLOCK_SIZE
        step = engine.plan({again: 1})
        engine.worker.bind_connector_metadata(step.message.kv_connector_metadata)
        engine.worker.start_load_kv(ForwardContext({}, None))
        assert engine.worker.has_connector_metadata(), "it loads"


def test_two_engines_see_each_other(tmp_path: Path) -> None:
    with (
        ExampleEngine(example_config(tmp_path)) as one,
        ExampleEngine(example_config(tmp_path)) as other,
    ):
        request = other.request(range(9))
        assert other.match(request) == (0, False)
        one.run(range(9))
        other.match_at_last(request, 8)
        for folder in folders(tmp_path):  # B66: removed behind our backs
            folder.rename(tmp_path / "elsewhere")
        other.match_at_last(request, 0)


def test_while_the_index_is_built_the_answer_is_none_until_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B62: a hung mount costs a recompute."""
    gate = threading.Event()
    looked = threading.Event()

    def hang(*_: object) -> dict[str, int]:
        looked.set()
        gate.wait(20)
        return {}

    monkeypatch.setattr(
        "interlace.connectors.kv_folders.listing.FolderListing._bucket_stamps", hang
    )
    with ExampleEngine(example_config(tmp_path, deadline_s=0.3)) as engine:
        request = engine.request(range(9))
        assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
        assert looked.wait(20)
        start = time.monotonic()
        assert engine.match(request) == (0, False)
        assert time.monotonic() - start < 10
        gate.set()


def test_b41_what_goes_between_query_and_allocation_is_an_invalid_block(tmp_path: Path) -> None:
    store(tmp_path, range(8))
    with ExampleEngine(example_config(tmp_path)) as engine:
        request = engine.request(range(9))
        assert engine.match(request) == (8, False)
        (folder,) = folders(tmp_path)
        folder.rename(tmp_path / "gone")
        engine.match_at_last(engine.request(range(9)), 0)
        engine.scheduler._scheduler._num_local[request.request_id] = 0
        engine.give_blocks(request, num_external=8)
        ids = {block.block_id for block in request.blocks[:2]}
        engine.step({request: 1})
        assert engine.invalid == ids
        engine.step({request: 9})
        engine.check(request)


def test_a_reset_says_that_nothing_is_forgotten_and_once_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store(tmp_path, range(9))
    with ExampleEngine(example_config(tmp_path)) as engine:
        for _ in range(2):
            assert engine.scheduler.reset_cache() is False
        assert engine.match(engine.request(range(9))) == (8, False)
    (record,) = caplog.records
    assert "other processes may share it" in record.getMessage()
    assert "shared_storage_path" in record.getMessage()


def test_a_block_is_not_saved_in_the_step_that_loads_it(tmp_path: Path) -> None:
    """Even if the index forgets meanwhile that it is stored: the copy would be made too early."""
    store(tmp_path, range(9))
    with ExampleEngine(example_config(tmp_path, refresh_s=1000.0)) as engine:
        request = engine.request(range(9))
        index = engine.scheduler._index
        assert engine.admit(request) == 8
        assert index is not None
        index.known.forget([str(folder) for folder in folders(tmp_path)])
        step = engine.step({request: 1})
        assert not step.message.kv_connector_metadata.saves
        assert not engine.invalid
        engine.check(request)


def test_a_directory_that_is_removed_is_made_again(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    with ExampleEngine(example_config(root)) as engine:
        for start in (0, 50, 100):
            engine.run(range(start, start + 9))
            assert len(folders(root)) == 1
            shutil.rmtree(tmp_path / "a")
        assert engine.worker.counters.saves_dropped_error == 0


def test_nothing_is_left_when_all_requests_have_ended(tmp_path: Path) -> None:
    """I1, and B58 to B61: no map grows."""
    with ExampleEngine(example_config(tmp_path)) as engine:
        for start in range(5):
            engine.run(range(start, start + 9))
            request = engine.request(range(start, start + 9))
            engine.match(request)
            engine.finish(request, RequestStatus.FINISHED_ABORTED)
        side = engine.scheduler._scheduler
        assert not side._requests
        assert not side._num_local
        assert not side._loads
        assert repr(side._planner) == "<SavePlanner open=[] hashes=0>"
        assert len(engine.free) == 255
        assert not list(next(tmp_path.iterdir()).joinpath("tmp").iterdir())
