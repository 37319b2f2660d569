"""Loads that fail: exact blame, right KV afterwards, and what is damaged goes."""

from __future__ import annotations

import errno
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_engine import ExampleEngine, example_config, folders, store

from interlace.connectors.kv_folders.folders import KVFolders, Run
from interlace.connectors.kv_folders.listing import FolderListing
from interlace.engine.request import Request, RequestStatus

FIRST, SECOND = list(range(8)), list(range(16))
PROMPT = list(range(17))


@pytest.fixture
def chain(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A directory, the folder of blocks 0 and 1, and the folder of blocks 2 and 3."""
    root = tmp_path / "kv"
    store(root, FIRST)
    (first,) = folders(root)
    store(root, SECOND)
    (second,) = set(folders(root)) - {first}
    return root, first, second


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def truncate(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])


def edit(path: Path, **changes: Any) -> None:
    document = json.loads(path.read_bytes())
    path.write_bytes(json.dumps(document | changes).encode())


LAYER, LAST_LAYER, MANIFEST = "layer_000.safetensors", "layer_001.safetensors", "manifest.json"
FOUND_BY_INDEXING: dict[str, Callable[[Path], object]] = {
    "no manifest": lambda f: (f / MANIFEST).unlink(),
    "empty manifest": lambda f: truncate(f / MANIFEST, 0),
    "manifest of one byte": lambda f: truncate(f / MANIFEST, 1),
    "manifest but its last byte": lambda f: truncate(
        f / MANIFEST, (f / MANIFEST).stat().st_size - 1
    ),
    "manifest of another kind": lambda f: (f / MANIFEST).write_bytes(b"[1, 2]"),
    "manifest that is no text": lambda f: (f / MANIFEST).write_bytes(b"\xff\xfe{"),
    "version of the future": lambda f: edit(f / MANIFEST, version=2),
    "no hashes": lambda f: edit(f / MANIFEST, block_hashes=[]),
    "short hash": lambda f: edit(f / MANIFEST, block_hashes=["00"]),
    "odd identity": lambda f: edit(f / MANIFEST, identity={"model": "x", "other": 1}),
    "no layer file": lambda f: (f / LAST_LAYER).unlink(),
    "empty layer file": lambda f: truncate(f / LAYER, 0),
    "layer file of one byte": lambda f: truncate(f / LAYER, 1),
    "layer file but its last byte": lambda f: truncate(f / LAYER, (f / LAYER).stat().st_size - 1),
}
FOUND_BY_LOADING: dict[str, Callable[[Path], object]] = {
    **FOUND_BY_INDEXING,
    "a bit of the data": lambda f: flip(f / LAST_LAYER, -1),
    "a bit of the first layer's data": lambda f: flip(f / LAYER, -9),
    "a bit of the header": lambda f: flip(f / LAYER, 12),
    "a bit of the length": lambda f: flip(f / LAYER, 0),
    "a digest": lambda f: flip(f / MANIFEST, (f / MANIFEST).read_bytes().index(b"xxh3") + 12),
    "another shape": lambda f: edit(f / MANIFEST, block_shape=[2, 4, 2, 1]),
    "other sizes": lambda f: edit(f / MANIFEST, block_shape=[2, 4, 1, 4]),
    "no folder": shutil.rmtree,
    "a file in its place": lambda f: f.rename(f.with_name("moved")) and f.write_bytes(b""),
}


@pytest.mark.parametrize("damage", FOUND_BY_INDEXING.values(), ids=FOUND_BY_INDEXING)
def test_b65_damage_found_while_indexing_is_a_miss(
    chain: tuple[Path, Path, Path], damage: Callable[[Path], object]
) -> None:
    root, _, second = chain
    damage(second)
    with ExampleEngine(example_config(root)) as engine:
        request = engine.request(PROMPT)
        assert engine.match(request) == (8, False)
        assert engine.scheduler.counters.damaged_folders == 1
        assert not second.exists()
        assert engine.run(PROMPT) == 8  # and is stored again
        assert second.exists()
        assert engine.run(PROMPT) == 16


def _work(engine: ExampleEngine, request: Request, load_async: bool) -> None:
    """Admit, let the load fail, and compute to the end."""
    assert engine.admit(request) == 16
    if load_async:
        engine.receive(request)
    while rest := request.num_tokens - engine.num_computed[request.request_id]:
        engine.step({request: rest})


@pytest.mark.parametrize("load_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("damage", FOUND_BY_LOADING.values(), ids=FOUND_BY_LOADING)
def test_b22_b62_b65_damage_found_while_loading_is_an_invalid_block(
    chain: tuple[Path, Path, Path], damage: Callable[[Path], object], load_async: bool
) -> None:
    """B22: exactly the piece's blocks. B62: wrong bytes of the right length. B65: all else."""
    root, _, second = chain
    with ExampleEngine(example_config(root, load_async=load_async, refresh_s=1000.0)) as engine:
        request = engine.request(PROMPT)
        assert engine.match(request) == (16, load_async)
        damage(second)
        _work(engine, request, load_async)
        assert engine.invalid == {block.block_id for block in request.blocks[2:4]}
        engine.check(request)
        assert engine.worker.counters.blocks_loaded == 2
        assert engine.worker.counters.damaged_folders <= 1
        assert engine.scheduler.counters.damaged_folders == engine.worker.counters.damaged_folders
        assert engine.match(engine.request(PROMPT))[0] in (8, 16)  # 16: saved again by now
        engine.finish(request)
        engine.settle()
        if second.is_file():
            return  # nothing of ours: left alone, and in the way
        assert engine.match(engine.request(PROMPT)) == (16, load_async)
    with ExampleEngine(example_config(root)) as engine:
        assert engine.run(PROMPT) == 16


@pytest.mark.parametrize("k", range(4))
def test_b21_each_block_in_turn_with_two_requests(tmp_path: Path, k: int) -> None:
    """B21: every block is a folder of its own, and block k is bad for both requests."""
    root = tmp_path / "kv"
    known: set[Path] = set()
    by_block = []
    for n in range(4, 20, 4):
        store(root, range(n))
        (new,) = set(folders(root)) - known
        known.add(new)
        by_block.append(new)
    with ExampleEngine(example_config(root, refresh_s=1000.0)) as engine:
        one, two = engine.request(PROMPT), engine.request(PROMPT)
        assert engine.match(one) == engine.match(two) == (16, False)
        flip(by_block[k] / LAST_LAYER, -2)
        engine.admit(one)
        engine.admit(two)
        engine.step({one: 1, two: 1})
        assert engine.invalid == {one.blocks[k].block_id, two.blocks[k].block_id}
        for request in (one, two):
            assert engine.num_computed[request.request_id] == k * 4
        assert engine.scheduler.counters.damaged_folders == 1
        engine.step({one: 17 - 4 * k, two: 17 - 4 * k})
        engine.check(one)
        engine.check(two)


def test_b65_a_newer_folder_of_that_name_is_not_removed(chain: tuple[Path, Path, Path]) -> None:
    root, _, second = chain
    store_ = KVFolders(root, example_identity(root))
    old = store_.signature(second)
    shutil.copytree(second, root / "copy")
    shutil.rmtree(second)
    (root / "copy").rename(second)
    assert store_.signature(second) != old
    assert not store_.remove(second, old)
    assert store_.check(second).block_hashes
    assert store_.remove(second, store_.signature(second))
    assert not second.exists()


def test_b74_another_run_in_its_place_is_neither_loaded_nor_removed(
    chain: tuple[Path, Path, Path],
) -> None:
    root, first, second = chain
    with ExampleEngine(example_config(root, refresh_s=1000.0)) as engine:
        request = engine.request(PROMPT)
        engine.match(request)
        shutil.rmtree(second)
        shutil.copytree(first, second)
        engine.admit(request)
        engine.step({request: 1})
        assert engine.invalid == {block.block_id for block in request.blocks[2:4]}
        assert second.exists()
        assert engine.worker.counters.damaged_folders == 0


@pytest.mark.parametrize("load_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    "error",
    [RuntimeError("boom"), OSError(errno.EIO, "bad disk"), MemoryError(), None],
    ids=["RAISE", "EIO", "MemoryError", "NONE"],
)
def test_b22_b26_a_read_that_raises_fails_the_load_and_nothing_else(
    chain: tuple[Path, Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    load_async: bool,
    error: BaseException | None,
) -> None:
    root, _, _ = chain

    def read_layer(*_: object) -> None:
        if error is not None:
            raise error

    with ExampleEngine(example_config(root, load_async=load_async)) as engine:
        request = engine.request(PROMPT)
        engine.match(request)
        with monkeypatch.context() as patch:
            patch.setattr(KVFolders, "read_layer", read_layer)
            _work(engine, request, load_async)
        assert engine.invalid == {block.block_id for block in request.blocks[:4]}
        engine.check(request)
        assert engine.match(request) == (0, False), "the request does not try again"
        engine.finish(request)
        engine.settle()
        assert engine.run([*PROMPT, 99]) in (0, 16)


@pytest.mark.parametrize("load_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("method", ["read_layer", "manifest", "signature"])
@pytest.mark.parametrize(
    "code",
    [errno.EMFILE, errno.ENOMEM, errno.ETIMEDOUT, errno.ESTALE, errno.EACCES, errno.EIO],
    ids=lambda code: errno.errorcode[code],
)
def test_only_what_is_really_damaged_is_removed(
    chain: tuple[Path, Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    load_async: bool,
    method: str,
    code: int,
) -> None:
    """All that may pass fails the load, and leaves good KV where it is, to be tried again."""
    root, first, second = chain

    def fail(*_: object) -> None:
        raise OSError(code, "no")

    with ExampleEngine(example_config(root, load_async=load_async)) as engine:
        request = engine.request(PROMPT)
        engine.match(request)
        index = engine.scheduler._index
        assert index is not None
        with monkeypatch.context() as patch:
            patch.setattr(KVFolders, method, fail)
            _work(engine, request, load_async)
        assert engine.invalid == {block.block_id for block in request.blocks[:4]}
        engine.check(request)
        assert engine.worker.counters.damaged_folders == 0
        assert engine.match(engine.request(PROMPT)) == (0, False), "not at once"
        index.known._clock = lambda: time.monotonic() + 61
        engine.match_at_last(engine.request(PROMPT), 16)
    assert first.exists()
    assert second.exists()


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While the event is not set, every read of a layer hangs."""
    gate = threading.Event()
    read_layer = KVFolders.read_layer

    def hang(*arguments: Any) -> Any:
        gate.wait(30)
        return read_layer(*arguments)

    monkeypatch.setattr(KVFolders, "read_layer", hang)
    yield gate
    gate.set()


@pytest.mark.parametrize("load_async", [False, True], ids=["sync", "async"])
def test_b62_a_read_that_hangs_fails_within_the_deadline_and_others_at_once(
    chain: tuple[Path, Path, Path], hanging: threading.Event, load_async: bool
) -> None:
    root, _, _ = chain
    with ExampleEngine(example_config(root, load_async=load_async, deadline_s=0.3)) as engine:
        for _ in range(3):
            request = engine.request(PROMPT)
            engine.invalid.clear()
            engine.received.clear()
            start = time.monotonic()
            _work(engine, request, load_async)
            assert time.monotonic() - start < 5
            assert engine.invalid == {block.block_id for block in request.blocks[:4]}
            engine.check(request)
        hanging.set()
        worker = engine.worker._worker
        end = time.monotonic() + 20
        while worker.step_loads._reader.is_busy or worker.background_loads._reader.is_busy:
            assert time.monotonic() < end
            time.sleep(0.005)
        engine.invalid.clear()
        engine.received.clear()
        request = engine.request([*PROMPT, 5])
        _work(engine, request, load_async)
        assert not engine.invalid, "it works again"
        engine.check(request)


def test_an_aborted_request_is_received_and_never_sent(
    chain: tuple[Path, Path, Path], hanging: threading.Event
) -> None:
    root, _, _ = chain
    with ExampleEngine(example_config(root, load_async=True)) as engine:
        request = engine.request(PROMPT)
        assert engine.admit(request) == 16
        engine.step()
        blocks = list(request.blocks)
        assert not engine.finish(request, RequestStatus.FINISHED_ABORTED)
        engine.step()
        assert not engine.received
        hanging.set()
        engine.until(lambda: engine.received == [request.request_id])
        for _ in range(3):
            engine.step()
        assert engine.received == [request.request_id]
        assert not engine.sent
        assert len(blocks) == 5


def test_b37_asynchronous_loads_take_turns(chain: tuple[Path, Path, Path]) -> None:
    root, _, _ = chain
    with ExampleEngine(example_config(root, load_async=True)) as engine:
        requests = [engine.request([*SECOND, 50 + i]) for i in range(6)]
        for request in requests:
            assert engine.admit(request) == 16
        engine.until(lambda: len(engine.received) == 6)
        for request in requests:
            engine.check(request, 16)


def test_a_damaged_folder_that_cannot_be_removed_is_not_promised_again(
    chain: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B66: an undeletable file stops nothing."""
    root, _, second = chain
    monkeypatch.setattr(KVFolders, "remove", lambda *_: False)
    with ExampleEngine(example_config(root)) as engine:
        request = engine.request(PROMPT)
        engine.match(request)
        flip(second / LAYER, -1)
        _work(engine, request, load_async=False)
        engine.finish(request)
        engine.settle()
        refreshes = _count_refreshes(engine, monkeypatch)
        end = time.monotonic() + 20
        while refreshes[0] < 3:
            assert time.monotonic() < end
            engine.step()
            time.sleep(0.005)
        assert engine.match(engine.request(PROMPT))[0] in (8, 16)


def _count_refreshes(engine: ExampleEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    look, count = FolderListing.look, [0]

    def counted(listing: FolderListing) -> None:
        look(listing)
        count[0] += 1

    monkeypatch.setattr(FolderListing, "look", counted)
    return count


def example_identity(root: Path) -> Any:
    from interlace.connectors.kv_folders.identity import KVIdentity

    return KVIdentity.of(example_config(root))


# ---------------------------------------------------------------- a source that goes meanwhile


def _removed(folder: Path, root: Path) -> None:
    folder.rename(root / "gone")


def _half_removed(folder: Path, _: Path) -> None:
    (folder / LAST_LAYER).unlink()


def _written_anew(folder: Path, root: Path) -> None:
    """The same blocks: what comes is as good as what was promised."""
    shutil.copytree(folder, root / "copy")
    shutil.rmtree(folder)
    (root / "copy").rename(folder)


def _of_another_prompt(folder: Path, root: Path) -> None:
    """A whole folder with other blocks in its place."""
    shutil.rmtree(folder)
    other = root / "other"
    store(other, range(100, 116))
    shutil.copytree(folders(other)[0], folder)


def _with_other_kv(folder: Path, root: Path) -> None:
    """The promised hashes, and KV that its manifest vouches for, but not the one read before."""
    own = KVFolders(root, example_identity(root))
    manifest = own.manifest(folder)
    rows = np.stack([own.read_layer(folder, manifest, i) for i in range(2)]) ^ np.uint8(1)
    run = Run(
        manifest.parent_hash,
        manifest.block_hashes,
        manifest.block_shape,
        manifest.layer_names,
        rows,
        release=lambda: None,
    )
    shutil.rmtree(folder)
    own.publish(*own.write(run))


@pytest.mark.parametrize("load_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("held_at", [0, 1], ids=["first layer", "last layer"])
@pytest.mark.parametrize(
    "change", [_removed, _half_removed, _written_anew, _of_another_prompt, _with_other_kv]
)
def test_b05_a_source_that_goes_while_it_is_read_is_a_failed_load_never_data(
    chain: tuple[Path, Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    load_async: bool,
    held_at: int,
    change: Callable[[Path, Path], object],
) -> None:
    """A gate holds the load of the second folder after its manifest was read, before the named
    layer, while another process removes or replaces the folder."""
    root, _, second = chain
    read_layer, arrived, gate = KVFolders.read_layer, threading.Event(), threading.Event()

    def held(own: KVFolders, folder: Path, manifest: Any, index: int) -> Any:
        if folder == second and index == held_at and not arrived.is_set():
            arrived.set()
            assert gate.wait(30)
        return read_layer(own, folder, manifest, index)

    def other_process() -> None:
        assert arrived.wait(30)
        change(second, root)
        gate.set()

    other = threading.Thread(target=other_process)
    with ExampleEngine(example_config(root, load_async=load_async, refresh_s=1000.0)) as engine:
        request = engine.request(PROMPT)
        engine.match(request)
        with monkeypatch.context() as patch:
            patch.setattr(KVFolders, "read_layer", held)
            other.start()
            _work(engine, request, load_async)
        other.join(30)
        lost = {block.block_id for block in request.blocks[2:4]}
        assert engine.invalid == (set() if change is _written_anew else lost)
        engine.check(request)
        if change in (_of_another_prompt, _with_other_kv):
            assert second.exists(), "what came in its place is not ours to remove"
        engine.finish(request)
        engine.settle()
