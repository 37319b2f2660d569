"""What a hostile file system and unlucky moments do to stored KV and its index."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from example_engine import ExampleEngine, example_config, folders, store

from interlace.connectors.example_options import ExampleConnectorOptions
from interlace.connectors.kv_folders.folders import KVFolders
from interlace.connectors.kv_folders.index import FolderIndex
from interlace.engine.config import KVTransferConfig
from interlace.engine.errors import ConfigError

SHORT, LONG = list(range(9)), list(range(25))


def index_of(engine: ExampleEngine) -> FolderIndex:
    index = engine.scheduler._index
    assert index is not None
    index.close()
    assert index._look.wait(20)
    return index


def overlapping_runs(root: Path) -> None:
    """Blocks 0 and 1, 2 and 3, and 3 to 5: two engines computed one prompt in different chunks."""
    with (
        ExampleEngine(example_config(root)) as one,
        ExampleEngine(example_config(root)) as other,
    ):
        for engine, chunks in ((one, [8, 8]), (other, [12, 13])):
            index_of(engine)
            request = engine.request(LONG[: sum(chunks)])
            engine.give_blocks(request)
            for chunk in chunks:
                engine.step({request: chunk})
            engine.finish(request)
            engine.settle()


def test_a_block_is_not_saved_before_its_load_has_filled_it(tmp_path: Path) -> None:
    """The index thread forgets a folder between a load's order and the step's message.

    So it does after one failing `stat` or `open` there. The files are whole, and the load goes
    well; but its blocks look as if nobody had stored them, and as if they were filled.
    """
    root = tmp_path / "kv"
    overlapping_runs(root)
    assert len(folders(root)) == 3
    with ExampleEngine(example_config(root)) as engine:
        request = engine.request(LONG)
        assert engine.match(request) == (24, False)
        index = index_of(engine)
        engine.give_blocks(request, num_external=24)
        last = index.known.find(request.block_hashes[5])
        assert last is not None
        index.known.forget([last.folder])  # as the index thread may, in the middle of `schedule()`
        engine.step({request: 1})
        assert not engine.invalid
        engine.check(request)
        engine.finish(request)
        engine.settle()
    shutil.rmtree(last.folder)
    with ExampleEngine(example_config(root)) as engine:
        request = engine.request(LONG)
        engine.prefill(request)
        engine.check(request)


def edit_manifest(folder: Path, **changes: Any) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | changes))


def test_what_failed_and_cannot_be_removed_is_not_promised_after_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "kv"
    store(root, LONG)
    (folder,) = folders(root)
    monkeypatch.setattr(KVFolders, "remove", lambda *_: False)
    layer = folder / "layer_000.safetensors"
    layer.write_bytes(layer.read_bytes()[:-1] + b"?")
    with ExampleEngine(example_config(root)) as engine:
        found = []
        for _ in range(3):
            request = engine.request(LONG)
            found.append(engine.admit(request))
            engine.step({request: 25 - found[-1]})
            if rest := 25 - engine.num_computed[request.request_id]:
                engine.step({request: rest})
            engine.check(request)
            engine.finish(request)
            engine.settle()
        assert found == [24, 0, 0]


def test_a_foreign_folder_under_our_name_is_not_ours(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    store(root, LONG)
    (folder,) = folders(root)
    identity = json.loads((folder / "manifest.json").read_bytes())["identity"]
    edit_manifest(folder, identity=identity | {"dtype": "float64"})
    with ExampleEngine(example_config(root)) as engine:
        assert engine.run(LONG) == 0
        engine.prefill(engine.request(LONG))
        assert not engine.invalid, "promised, and not held"


def test_a_directory_that_was_removed_is_made_again(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    with ExampleEngine(example_config(root)) as engine:
        engine.run(SHORT)
        shutil.rmtree(root)
        engine.run(list(range(50, 59)))
        engine.run(list(range(150, 159)))
        assert engine.worker.counters.saves_dropped_error == 0
        assert len(folders(root)) == 2


def test_reset_cache_says_no_or_forgets(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    store(root, LONG)
    with ExampleEngine(example_config(root)) as engine:
        request = engine.request(LONG)
        assert engine.match(request)[0] == 24
        has_forgotten = engine.scheduler.reset_cache() is not False
        assert not has_forgotten or engine.match(request)[0] == 0


@pytest.mark.parametrize("option", ["refresh_s", "deadline_s"])
def test_seconds_beyond_what_a_thread_can_wait_are_refused(tmp_path: Path, option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        ExampleConnectorOptions.of(
            KVTransferConfig(
                kv_connector="ExampleConnector",
                kv_role="kv_both",
                kv_connector_extra_config={"shared_storage_path": str(tmp_path), option: 1e12},
            )
        )
