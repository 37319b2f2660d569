"""Folders of KV on the disk: files, identity, races between processes, leftovers."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from interlace.connectors.kv_folders import manifest
from interlace.connectors.kv_folders.counters import Tally
from interlace.connectors.kv_folders.folders import KVFolders, Run, Signature
from interlace.connectors.kv_folders.identity import KVIdentity
from interlace.connectors.kv_folders.index import FolderIndex
from interlace.connectors.kv_folders.known import KnownFolders
from interlace.connectors.kv_folders.listing import FolderListing
from interlace.connectors.kv_folders.manifest import Manifest
from interlace.connectors.kv_folders.pages import DevicePages, HostPages
from interlace.connectors.kv_folders.staging import StagingPool
from interlace.connectors.kv_folders.tensor_file import (
    DamagedFileError,
    TensorFile,
    read_tensor,
    write_tensor,
)
from interlace.engine.config import EngineConfig, ModelConfig
from interlace.layers.virtual_lanes import Policy, VirtualLanes

SRC = str(Path(__file__).resolve().parents[2] / "src")
IDENTITY = KVIdentity(model="ab" * 32, dtype="float32", block_size=4)
SHAPE = (2, 4, 1, 2)


def block_hash(number: int) -> bytes:
    return number.to_bytes(32, "big")


def a_run(first: int, length: int, *, salt: int = 0) -> Run:
    """Blocks numbered `first`..; their content follows from number, layer and salt."""
    rows = np.zeros((2, length, 64), dtype=np.uint8)
    for layer in range(2):
        for i in range(length):
            rows[layer, i] = (7 * (first + i) + layer + salt) % 256
    hashes = tuple(block_hash(first + i) for i in range(length))
    return Run(block_hash(first - 1), hashes, SHAPE, ("a", "b"), rows, release=lambda: None)


@pytest.fixture
def store(tmp_path: Path) -> KVFolders:
    store = KVFolders(tmp_path / "kv", IDENTITY)
    store.prepare()
    return store


class Index(KnownFolders):
    """What is known of a directory, and how to look at it."""

    def __init__(
        self,
        store: KVFolders,
        tally: Tally | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(1, clock)
        self.refresh = FolderListing([store], self, tally or Tally()).look

    def publish(self, folder: Path, hashes: Sequence[bytes]) -> None:
        self.add(0, str(folder), hashes)


def an_index(store: KVFolders) -> Index:
    return Index(store)


@given(
    dtype=st.sampled_from(["float32", "float64", "float16", "bfloat16"]),
    length=st.integers(1, 5),
    data=st.data(),
)
@settings(max_examples=30, deadline=None)
def test_b62_any_flipped_bit_of_a_file_is_found(
    tmp_path_factory: pytest.TempPathFactory, dtype: str, length: int, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("file") / "x.safetensors"
    shape = (length, 2, 3)
    itemsize = getattr(torch, dtype).itemsize
    rows = np.frombuffer(os.urandom(length * 6 * itemsize), dtype=np.uint8)
    expected = write_tensor(path, dtype, shape, rows)
    assert read_tensor(path, dtype, shape, expected).tobytes() == rows.tobytes()
    assert path.stat().st_size == expected.num_bytes
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    with pytest.raises(DamagedFileError):
        read_tensor(path, dtype, shape, expected)


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    write_tensor(tmp_path / "x", "float32", (3, 4), array.view(np.uint8))
    assert (load_file(tmp_path / "x")["kv_cache"] == array).all()


def test_a_file_with_the_right_digest_and_another_shape_is_damaged(tmp_path: Path) -> None:
    rows = np.zeros(48, dtype=np.uint8)
    expected = write_tensor(tmp_path / "x", "float32", (2, 6), rows)
    for dtype, shape in (("float32", (6, 2)), ("float32", (2, 7)), ("float64", (2, 3))):
        with pytest.raises(DamagedFileError):
            read_tensor(tmp_path / "x", dtype, shape, expected)
    with pytest.raises(DamagedFileError):
        read_tensor(tmp_path / "x", "float32", (2, 6), TensorFile(10**15, expected.xxh3_128))


@given(
    changes=st.dictionaries(
        st.sampled_from(["version", "identity", "parent_hash", "block_hashes", "layers"]),
        st.recursive(
            st.none() | st.integers() | st.text(max_size=3),
            lambda inner: (
                st.lists(inner, max_size=2)
                | st.dictionaries(st.text(max_size=3), inner, max_size=2)
            ),
            max_leaves=4,
        ),
        min_size=1,
    )
)
@settings(max_examples=100, deadline=None)
def test_a_manifest_of_any_other_kind_is_damaged(changes: dict[str, object]) -> None:
    good = Manifest(
        identity=IDENTITY,
        parent_hash=block_hash(0),
        block_hashes=(block_hash(1),),
        block_shape=SHAPE,
        layer_names=("a",),
        files=(TensorFile(1, "00"),),
    )
    assert Manifest.from_bytes(good.to_bytes()) == good
    document = json.loads(good.to_bytes()) | changes
    if changes != {"version": 1} and "parent_hash" not in changes:
        with pytest.raises(DamagedFileError):
            Manifest.from_bytes(json.dumps(document).encode())
    with pytest.raises(DamagedFileError):
        Manifest.from_bytes(b"[" * 100_000)


@pytest.mark.parametrize("size", [float("inf"), float("nan"), "x", []])
def test_a_manifest_with_an_odd_size_is_damaged(size: object) -> None:
    text = json.dumps({"version": 1, "identity": dataclasses.asdict(IDENTITY)} | _rest(size))
    with pytest.raises(DamagedFileError):
        Manifest.from_bytes(text.encode())


def _rest(size: object) -> dict[str, object]:
    return {
        "parent_hash": "00" * 32,
        "block_hashes": ["01" * 32],
        "block_shape": [size, 4, 1, 2],
        "layers": [{"name": "a", "num_bytes": 1, "xxh3_128": "00"}],
    }


def test_b72_identity_separates_model_type_layout_size_group_and_rank() -> None:
    others = [
        dataclasses.replace(IDENTITY, **{name: value})  # type: ignore[arg-type]
        for name, value in {
            "model": "cd" * 32,
            "dtype": "bfloat16",
            "layout": "other",
            "block_size": 8,
            "group": 1,
            "rank": 1,
            "world_size": 2,
        }.items()
    ]
    names = {one.folder_name(block_hash(1)) for one in (IDENTITY, *others)}
    assert len(names) == len(others) + 1 == len(dataclasses.fields(KVIdentity)) + 1


def test_identity_of_a_configuration() -> None:
    config = EngineConfig(model="some/name")
    assert KVIdentity.of(config) == KVIdentity.of(EngineConfig(model="some/name"))
    assert KVIdentity.of(config).model != KVIdentity.of(EngineConfig(model="other")).model
    model = ModelConfig("some/name", "bfloat16", 64, 10, (0,), 0, model_identity="ef" * 32)
    identity = KVIdentity.of(config.resolved(model))
    assert (identity.model, identity.dtype) == ("ef" * 32, "bfloat16")


def test_b78_folder_names_are_equal_in_every_process() -> None:
    code = (
        "from interlace.connectors.kv_folders.identity import KVIdentity\n"
        "i = KVIdentity(model='ab' * 32, dtype='float32', block_size=4)\n"
        "print(i.folder_name(bytes(31) + b'\\x01'))"
    )
    names = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": SRC, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert names == {IDENTITY.folder_name(block_hash(1))}


def test_written_published_indexed_and_read(store: KVFolders) -> None:
    folder, manifest = store.publish(*store.write(a_run(5, 3)))
    assert store.check(folder) == manifest
    index = an_index(store)
    index.refresh()
    place = index.find(block_hash(6))
    assert place == (str(folder), 1)
    assert index.find(block_hash(8)) is None
    rows = store.read_layer(folder, manifest, 1)
    assert rows.tobytes() == a_run(5, 3).rows[1].tobytes()


WRITER_PROCESS = """
import sys, time
from pathlib import Path
import numpy as np
from interlace.connectors.kv_folders.folders import KVFolders, Run
from interlace.connectors.kv_folders.identity import KVIdentity
root, start = Path(sys.argv[1]), float(sys.argv[2])
def h(n): return n.to_bytes(32, "big")
while time.time() < start: pass
for round in range(50):
    store = KVFolders(root / str(round), KVIdentity(model="ab" * 32, dtype="float32", block_size=4))
    store.prepare()
    for key in range(1, 9):
        rows = np.full((2, 1, 64), key, dtype=np.uint8)
        run = Run(h(0), (h(key),), (2, 4, 1, 2), ("a", "b"), rows, lambda: None)
        folder, manifest = store.publish(*store.write(run))
        assert manifest.block_hashes == (h(key),)
        assert (store.read_layer(folder, manifest, 1) == key).all()
"""


def test_b64_two_processes_write_the_same_keys(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER_PROCESS, str(tmp_path), str(time.time() + 1.0)]
    env = {**os.environ, "PYTHONPATH": SRC}
    both = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors
    for number in range(50):
        store = KVFolders(tmp_path / str(number), IDENTITY)
        assert not list(store.tmp.iterdir())
        index = an_index(store)
        index.refresh()
        for key in range(1, 9):
            place = index.find(block_hash(key))
            assert place is not None
            manifest = store.check(Path(place.folder))
            assert (store.read_layer(Path(place.folder), manifest, 0) == key).all()


def test_strays_in_a_folder_do_not_matter_and_links_that_lead_nowhere_are_missing_files(
    store: KVFolders,
) -> None:
    folder, manifest = store.publish(*store.write(a_run(1, 2)))
    (folder / "notes").symlink_to("nowhere")
    assert store.check(folder) == manifest
    (folder / "layer_001.safetensors").unlink()
    (folder / "layer_001.safetensors").symlink_to("nowhere")
    with pytest.raises(DamagedFileError, match="missing"):
        store.check(folder)
    with pytest.raises(DamagedFileError, match="missing"):
        store.read_layer(folder, manifest, 1)


def test_a_damaged_winner_is_replaced(store: KVFolders) -> None:
    folder, _ = store.publish(*store.write(a_run(1, 2)))
    (folder / "layer_000.safetensors").unlink()
    again, manifest = store.publish(*store.write(a_run(1, 3)))
    assert again == folder
    assert len(store.check(folder).block_hashes) == len(manifest.block_hashes) == 3
    assert not list(store.tmp.iterdir())


def test_a_winner_that_cannot_be_replaced_is_an_error_and_leaves_nothing(
    store: KVFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = store.publish(*store.write(a_run(1, 2)))
    (folder / "manifest.json").unlink()
    written = store.write(a_run(1, 2))
    monkeypatch.setattr(KVFolders, "remove", lambda *_: False)
    with pytest.raises(OSError, match="cannot be replaced"):
        store.publish(*written)
    assert not written[0].exists()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_write_that_fails_half_way_leaves_nothing(
    store: KVFolders, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """No space for the first file, the second, or the manifest."""
    calls = [0]
    real_open = os.open

    def failing(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        calls[0] += 1
        if calls[0] == number:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_open(path, flags, mode, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr("interlace.connectors.kv_folders.tensor_file.os.open", failing)
        with pytest.raises(OSError, match="No space"):
            store.write(a_run(1, 2))
    assert not list(store.tmp.iterdir())


def test_b67_leftovers_of_dead_processes_are_removed_when_old(store: KVFolders) -> None:
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    names = {"dead": f"{dead.stdout.strip()}-aa", "ours": f"{os.getpid()}-aa", "odd": "notes"}
    for name in names.values():
        (store.tmp / name).mkdir()
        (store.tmp / name / "layer_000.safetensors").write_bytes(b"x")
    store.remove_leftovers()
    assert len(list(store.tmp.iterdir())) == 3, "they are young"
    store.remove_leftovers(now=time.time() + 3600)
    assert {path.name for path in store.tmp.iterdir()} == {names["ours"], names["odd"]}


def test_removing_what_is_not_there_is_no_error(store: KVFolders) -> None:
    """B66."""
    assert not store.remove(store.base / "00" / "x", Signature(0, 0))
    store.discard(store.tmp / "nothing")


# ---------------------------------------------------------------- the index


def test_foreign_folders_are_counted_and_left_alone(store: KVFolders) -> None:
    other = KVFolders(store.base.parent, dataclasses.replace(IDENTITY, dtype="float64"))
    rows = np.zeros((2, 1, 128), dtype=np.uint8)
    run = dataclasses.replace(a_run(1, 1), rows=rows)
    folder, _ = other.publish(*other.write(run))
    tally = Tally()
    index = Index(store, tally)
    for _ in range(3):
        index.refresh()
    assert index.find(block_hash(1)) is None
    assert folder.exists()
    assert tally.counters.foreign_folders == 1


def test_names_are_not_trusted(store: KVFolders) -> None:
    folder, _ = store.publish(*store.write(a_run(1, 2)))
    renamed = folder.with_name(folder.name[:2] + "0" * 62)
    folder.rename(renamed)
    (folder.parent / "stray").write_text("x")
    (store.base / "zz").mkdir()
    index = an_index(store)
    index.refresh()
    assert index.find(block_hash(2)) == (str(renamed), 1)


@given(
    actions=st.lists(
        st.tuples(
            st.sampled_from(["publish", "remove", "refresh", "drop", "own"]),
            st.integers(1, 6),
            st.integers(1, 4),
        ),
        max_size=14,
    )
)
@settings(max_examples=40, deadline=None)
def test_after_a_refresh_the_index_is_what_lies_there(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int, int]]
) -> None:
    """Two processes' folders overlap in every way; what goes and comes is seen."""
    store = KVFolders(tmp_path_factory.mktemp("kv"), IDENTITY)
    store.prepare()
    index = an_index(store)
    there: dict[Path, tuple[bytes, ...]] = {}
    dropped: set[Path] = set()
    for action, first, length in actions:
        path = store.path_of(block_hash(first))
        if action == "refresh":
            index.refresh()
        elif action in ("publish", "own") and path not in there:
            _, manifest = store.publish(*store.write(a_run(first, length)))
            there[path] = manifest.block_hashes
            dropped.discard(path)
            if action == "own":
                index.publish(path, manifest.block_hashes)
        elif action == "remove" and path in there:
            assert store.remove(path, store.signature(path))
            del there[path]
        elif action == "drop" and path in there:
            index.drop(str(path), store.signature(path))
            dropped.add(path)
    index.refresh()
    expected = {h for path, hashes in there.items() if path not in dropped for h in hashes}
    known = {block_hash(n) for n in range(12) if block_hash(n) in index}
    assert known == expected
    for wanted in expected:
        place = index.find(wanted)
        assert place is not None


def test_the_index_says_once_what_it_cannot_look_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    tally = Tally()
    store = KVFolders(tmp_path / "file", IDENTITY)
    index = Index(store, tally)
    for _ in range(3):
        index.refresh()
    assert len(caplog.records) == 1
    assert "none of it is loaded" in caplog.text


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "too many"), MemoryError()])
def test_a_folder_that_could_not_be_looked_into_is_looked_at_again(
    store: KVFolders,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    """Also one of a bucket that has not changed for long, and it hides no other."""
    folders = [store.publish(*store.write(a_run(first, 2)))[0] for first in (1, 11, 21)]
    for folder in folders:
        os.utime(folder.parent, (1, 1))
    check = KVFolders.check_files

    def failing(own: KVFolders, folder: Path, manifest: Manifest) -> None:
        if folder == folders[1]:
            raise error
        check(own, folder, manifest)

    index = an_index(store)
    with monkeypatch.context() as patch:
        patch.setattr(KVFolders, "check_files", failing)
        for _ in range(3):
            index.refresh()
    assert [block_hash(n) in index for n in (1, 11, 21)] == [True, False, True]
    assert len(caplog.records) == 1
    index.refresh()
    assert block_hash(11) in index
    monkeypatch.setattr(KVFolders, "check_files", None)  # nothing is looked into twice
    index.refresh()


def test_what_cannot_be_listed_hides_nothing_else_and_keeps_what_was_known_of_it(
    store: KVFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [store.publish(*store.write(a_run(first, 1)))[0] for first in range(1, 6)]
    buckets = {str(folder.parent) for folder in folders}
    index = an_index(store)
    scandir = os.scandir

    def failing(path: Path) -> object:
        if str(path) in buckets - {str(folders[2].parent)}:
            raise PermissionError(errno.EACCES, "no")
        return scandir(path)

    with monkeypatch.context() as patch:
        patch.setattr("interlace.connectors.kv_folders.listing.os.scandir", failing)
        index.refresh()
        assert block_hash(3) in index
        assert block_hash(1) not in index
    index.refresh()
    assert all(block_hash(n) in index for n in range(1, 6))
    monkeypatch.setattr("interlace.connectors.kv_folders.listing.os.scandir", failing)
    index.refresh()
    assert all(block_hash(n) in index for n in range(1, 6))


@pytest.mark.parametrize("kind", ["file", "dangling", "loop"])
def test_strays_named_like_buckets_and_folders_hide_nothing(store: KVFolders, kind: str) -> None:
    folder, _ = store.publish(*store.write(a_run(1, 2)))
    names = [store.base / f"{n:02x}" for n in range(256)]
    names += [folder.parent / (folder.name[:2] + f"{n:062x}") for n in range(3)]
    for stray in set(names) - {folder.parent}:
        if kind == "file":
            stray.write_text("x")
        else:
            stray.symlink_to("nowhere" if kind == "dangling" else stray.name)
    index = an_index(store)
    for _ in range(2):
        index.refresh()
    assert index.find(block_hash(2)) == (str(folder), 1)
    assert len(list(store.base.iterdir())) == 257, "all of it is left alone"


def test_a_ban_ends_with_its_time_or_with_the_folder(store: KVFolders) -> None:
    now = [0.0]
    index = Index(store, clock=lambda: now[0])
    folder, manifest = store.publish(*store.write(a_run(1, 2)))
    os.utime(folder.parent, (1, 1))
    index.refresh()
    index.drop(str(folder), store.signature(folder), 60.0)
    index.publish(folder, manifest.block_hashes)
    index.refresh()
    assert block_hash(1) not in index
    now[0] = 61.0
    index.refresh()
    assert block_hash(1) in index
    index.drop(str(folder), store.signature(folder))
    now[0] = 1e9
    index.refresh()
    assert block_hash(1) not in index
    assert store.remove(folder, store.signature(folder))
    store.publish(*store.write(a_run(1, 2)))
    index.refresh()
    assert block_hash(1) in index


def test_the_same_block_twice_is_damage_and_never_breaks_the_index(store: KVFolders) -> None:
    folder, manifest = store.publish(*store.write(a_run(1, 2)))
    twice = dataclasses.replace(manifest, block_hashes=(block_hash(1),) * 2)
    with pytest.raises(DamagedFileError, match="the same block twice"):
        Manifest.from_bytes(twice.to_bytes())
    index = an_index(store)
    index.publish(folder, twice.block_hashes)
    index.drop(str(folder), store.signature(folder))
    assert block_hash(1) not in index


# ---------------------------------------------------------------- when the index looks


class Hands:
    """A clock that a test turns."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def a_timed_index(store: KVFolders, policy: Policy) -> tuple[FolderIndex, Hands, VirtualLanes]:
    lanes, hands = VirtualLanes(0, policy, polls_per_work=8), Hands()
    return (
        FolderIndex([store], Tally(), lanes, refresh_s=1.0, deadline_s=5.0, clock=hands),
        hands,
        lanes,
    )


def ready(index: FolderIndex) -> bool:
    return index.is_ready


def _ask_until_ready(index: FolderIndex) -> None:
    """Asking lets the lane advance."""
    assert any(ready(index) for _ in range(20))


def test_the_first_answer_waits_for_the_first_look_and_for_no_longer_than_the_deadline(
    store: KVFolders,
) -> None:
    index, _, lanes = a_timed_index(store, "lazy")
    assert not ready(index)
    _ask_until_ready(index)
    assert list(lanes.trace) == ["index#1"]
    index, hands, lanes = a_timed_index(store, "lazy")
    hands.now = 4.9
    assert not ready(index)
    hands.now = 5.0
    assert ready(index)
    assert not lanes.trace


def test_a_look_is_asked_for_when_it_is_due_and_one_at_a_time(store: KVFolders) -> None:
    index, hands, lanes = a_timed_index(store, "eager")
    for _ in range(10):
        index.keep_fresh()
        assert ready(index)
        hands.now += 0.25
    assert list(lanes.trace) == ["index#1", "index#2", "index#3"]
    index.close()
    hands.now += 100.0
    index.keep_fresh()
    assert len(lanes.trace) == 3
    index, hands, lanes = a_timed_index(store, "lazy")
    for _ in range(3):
        index.keep_fresh()
        hands.now += 10.0
    assert lanes.pending == ["index#1"]


def test_after_a_long_time_without_questions_the_answer_is_looked_up_first(
    store: KVFolders,
) -> None:
    index, hands, lanes = a_timed_index(store, ("index",))
    _ask_until_ready(index)
    store.publish(*store.write(a_run(1, 2)))
    hands.now += 1.5
    assert ready(index), "known well enough, while it looks"
    assert lanes.pending
    assert block_hash(1) not in index.known
    lanes.drain()
    assert block_hash(1) in index.known
    index, hands, lanes = a_timed_index(store, "lazy")
    lanes.drain()
    hands.now += 100.0
    assert not ready(index), "others may have stored more since"
    hands.now += 5.0
    assert ready(index), "and may hang now"
    assert lanes.pending


@pytest.mark.parametrize("ends_in_time", [False, True])
def test_a_question_waits_for_one_look_however_long_the_steps_are(
    store: KVFolders, ends_in_time: bool
) -> None:
    """A step of ten seconds lies between two rounds of questions: no look is young then."""
    index, hands, lanes = a_timed_index(store, "lazy")
    lanes.drain()
    for _ in range(3):
        hands.now += 10.0
        assert not ready(index)
        if ends_in_time:
            lanes.drain()
        index.keep_fresh()
        lanes.drain()
        hands.now += 10.0
        assert [ready(index), ready(index)] == [True, True], "all of a round are answered"
        index.keep_fresh()
        lanes.drain()


def test_an_answer_that_nobody_fetched_grows_old(store: KVFolders) -> None:
    index, hands, lanes = a_timed_index(store, "lazy")
    lanes.drain()
    hands.now += 100.0
    assert not ready(index)
    lanes.drain()
    hands.now += 100.0
    index.keep_fresh()
    assert lanes.pending == ["index#3"]


def test_closing_the_index_waits_for_no_look_that_hangs(store: KVFolders) -> None:
    lanes = VirtualLanes(0, "lazy")
    index = FolderIndex([store], Tally(), lanes, refresh_s=1.0, deadline_s=5.0)
    index.close()
    assert not lanes.pending
    index.close()


def test_a_block_is_known_if_all_ranks_have_it(tmp_path: Path) -> None:
    stores = [
        KVFolders(tmp_path, dataclasses.replace(IDENTITY, rank=r, world_size=2)) for r in (0, 1)
    ]
    known = KnownFolders(2, time.monotonic)
    listing = FolderListing(stores, known, Tally())
    paths = []
    for one in stores:
        assert block_hash(2) not in known
        paths.append(one.publish(*one.write(a_run(1, 3)))[0])
        listing.look()
    assert block_hash(2) in known
    assert [known.find(block_hash(2), rank) for rank in (0, 1)] == [(str(p), 1) for p in paths]
    longer, _ = stores[1].publish(*stores[1].write(a_run(2, 3)))
    listing.look()
    assert block_hash(4) not in known, "the other rank lacks it"
    assert known.take_lost() == []
    known.drop(str(paths[1]), stores[1].signature(paths[1]))
    assert known.take_lost() == [(block_hash(1),)]
    assert known.take_lost() == []
    assert known.find(block_hash(2), 1) == (str(longer), 0), "its other place"
    listing.look()
    assert block_hash(1) not in known


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("kind", [HostPages, DevicePages])
@given(ids=st.lists(st.integers(0, 9), min_size=1, max_size=10, unique=True))
@settings(max_examples=20, deadline=None)
def test_pages_move_as_bytes(kind: type[HostPages | DevicePages], ids: list[int]) -> None:
    tensor = torch.randn(10, *SHAPE).to(torch.bfloat16)
    before = tensor.clone()
    pages = kind(tensor)
    assert (pages.block_shape, pages.block_bytes, pages.dtype) == (SHAPE, 32, "bfloat16")
    rows = np.empty((len(ids), 32), dtype=np.uint8)
    pages.read(ids, rows)
    tensor[ids] = 0
    pages.write(ids, rows)
    assert torch.equal(tensor, before)


def test_staging_memory_is_used_again() -> None:
    pool = StagingPool(1000)
    one, two, small = pool.take(900), pool.take(1000), pool.take(100)
    assert (len(one), len(two), len(small), len(pool.take(5000))) == (1000, 1000, 100, 5000)
    for memory in (one, two, small, np.empty(1000, dtype=np.uint8)):
        pool.give_back(memory)
    assert {id(pool.take(500)), id(pool.take(500))} == {id(one), id(two)}


def test_what_another_version_wrote_lies_elsewhere_and_stays(
    store: KVFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "VERSION", 2)
    newer = KVFolders(store.base.parent, IDENTITY)
    newer.prepare()
    folder, _ = newer.publish(*newer.write(a_run(1, 2)))
    monkeypatch.undo()
    index = an_index(store)
    index.refresh()
    assert block_hash(1) not in index
    assert folder.exists()
