"""The directory: whose it is, how much it holds, who goes first, and what never stops it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from slab_kit import (
    PATIENCE_S,
    SPACE,
    found,
    header,
    record,
    said,
    start,
)

from interlace.connectors.slab_store import directory as directory_module
from interlace.connectors.slab_store.catalog import Catalog
from interlace.connectors.slab_store.directory import (
    MARKER,
    Limits,
    NoRoomError,
    SlabDirectory,
    SlabFile,
)
from interlace.connectors.slab_store.layout import VERSION
from interlace.connectors.slab_store.slab import Slab
from interlace.engine.errors import ConfigError

SLAB = header(1).shape.file_bytes
NAME = SPACE.folder_name
NOW_NS = 10**18


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def directory(root: Path, slabs: float | None = None, **options: Any) -> SlabDirectory:
    """Prepared, with room for so many slabs."""
    limits = Limits(capacity_bytes=None if slabs is None else int(slabs * SLAB))
    made = SlabDirectory(root, options.pop("limits", limits), **options)
    made.prepare()
    return made


def add(store: SlabDirectory, number: int, used_ns: int | None = None) -> Path:
    """A sealed slab with that record."""
    writer = store.create_slab(NAME, header(1))
    writer.add([record(number)])
    writer.close()
    if used_ns is not None:
        os.utime(writer.path, ns=(used_ns, used_ns))
    return writer.path


def held(path: Path) -> int:
    """Bytes on the disk."""
    return path.stat().st_blocks * 512


def there(store: SlabDirectory) -> list[Path]:
    return [file.path for file in store.slabs()]


# ---------------------------------------------------------------- whose it is


def test_a_directory_is_made_and_known_again(root: Path) -> None:
    for _ in range(3):
        store = directory(root / "deeper")
    assert [path.name for path in store.root.iterdir()] == [MARKER]
    assert json.loads((store.root / MARKER).read_bytes())["version"] == VERSION
    add(store, 1)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (store.root, store.root / NAME)]
    assert modes == [0o700, 0o700]
    files = [path for path in store.root.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


@pytest.mark.parametrize(
    "name", ["0123456789abcdef-v1/00/manifest.json", "notes", NAME + "/x.slab"]
)
def test_a_directory_that_holds_other_things_is_refused_and_left_alone(
    root: Path, name: str
) -> None:
    (root / name).parent.mkdir(parents=True)
    (root / name).write_text("mine")
    with pytest.raises(ConfigError, match="a directory of its own"):
        directory(root)
    assert (root / name).read_text() == "mine"
    assert not (root / MARKER).exists()


def test_hidden_files_are_no_reason_to_refuse(root: Path) -> None:
    root.mkdir()
    (root / ".nfs0001").touch()
    directory(root)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "{}", '{"format": 1}', "\xff" * 9, "[" * 10**5]
)
def test_a_marker_that_cannot_be_read_is_refused(root: Path, text: str) -> None:
    root.mkdir()
    (root / MARKER).write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"cannot be read .* another directory, or remove"):
        directory(root)


@pytest.mark.parametrize("version", [0, VERSION + 1, "1", None])
def test_another_version_is_named(root: Path, version: object) -> None:
    root.mkdir()
    (root / MARKER).write_text(json.dumps({"version": version}))
    with pytest.raises(ConfigError, match=f"version {version}, .* version {VERSION}: give"):
        directory(root)


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for path in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "link"):
        with pytest.raises(ConfigError, match="is no directory"):
            directory(path)


@pytest.mark.parametrize("function", ["os.fdopen", "os.rename"])
def test_b69_a_marker_that_cannot_be_written_leaves_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    def fail(first: Any, *rest: Any) -> None:
        if isinstance(first, int):
            os.close(first)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail) if function == "os.rename" else patch.setattr(
            function, fail
        )
        with pytest.raises(OSError, match="No space"):
            directory(root)
    assert not list(root.iterdir())
    directory(root)


PREPARE = """
import sys, time
from pathlib import Path
from interlace.connectors.slab_store.directory import Limits, SlabDirectory
while time.time() < float(sys.argv[2]): pass
for number in range(200):
    SlabDirectory(Path(sys.argv[1]) / str(number), Limits()).prepare()
"""


def test_b64_two_processes_prepare_at_once(root: Path) -> None:
    both = [start(PREPARE, root, time.time() + 0.6) for _ in range(2)]
    for process in both:
        said(process)
    for number in range(200):
        assert [path.name for path in (root / str(number)).iterdir()] == [MARKER]


# ---------------------------------------------------------------- who goes


def test_b67_b68_the_least_recently_used_goes_first(root: Path) -> None:
    store = directory(root, 3)
    paths = [add(store, number, NOW_NS + number) for number in range(3)]
    assert there(store) == paths
    paths.append(add(store, 3, NOW_NS + 3))
    assert there(store) == paths[1:]
    with Slab.open(paths[1]) as slab:
        slab.touch()
    again = directory(root, 3)  # after a restart
    paths.append(add(again, 4, NOW_NS + 4))
    assert set(there(again)) == {paths[1], paths[3], paths[4]}
    assert (store.num_evicted, again.num_evicted) == (1, 1)


def test_a_capacity_is_used_to_its_last_byte(root: Path) -> None:
    store = directory(root, 2)
    add(store, 0)
    add(store, 1)
    assert store.num_evicted == 0
    smaller = directory(root, limits=Limits(capacity_bytes=2 * SLAB - 1))
    assert len(smaller.collect()) == 1
    assert smaller.collect() == []


def test_b67_a_smaller_capacity_holds_after_a_restart(root: Path) -> None:
    store = directory(root)
    paths = [add(store, number, NOW_NS + number) for number in range(6)]
    smaller = directory(root, 2)
    removed = smaller.collect()
    assert [file.path for file in removed] == paths[:4]
    assert there(smaller) == paths[4:]


def test_all_spaces_count_together(root: Path) -> None:
    store = directory(root, 2)
    first = add(store, 0, NOW_NS)
    for name in ("0" * 16, "1" * 16):
        store.create_slab(name, header(1)).close()
    assert first not in there(store)
    assert len(store.spaces()) == 3
    assert len(there(store)) == 2


def test_b74_a_slab_with_a_living_writer_is_never_removed(root: Path) -> None:
    store = directory(root, 2)
    writer = store.create_slab(NAME, header(1))
    os.utime(writer.path, ns=(1, 1))
    sealed = add(store, 1)
    assert add(store, 2) in there(store)
    assert sealed not in there(store)
    second = directory(root, 2).create_slab(NAME, header(1))
    with pytest.raises(NoRoomError, match="give the store more capacity"):
        store.create_slab(NAME, header(1))
    with pytest.raises(NoRoomError):
        directory(root, 1).collect()
    assert set(there(store)) == {writer.path, second.path}
    for one in (writer, second):
        one.close()
    add(store, 3)


def test_who_reads_a_slab_is_no_writer(root: Path) -> None:
    """Readers lock it for a moment, to ask whether it has one."""
    store = directory(root, 1)
    path = add(store, 1)
    with path.open("rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        assert add(store, 2) in there(store)


@pytest.mark.parametrize("slabs", [0, 0.5, 1.5])
def test_if_not_enough_can_go_nothing_does(root: Path, slabs: float) -> None:
    """Or each try would cost the whole store, and bring nothing."""
    paths = [add(directory(root), number) for number in range(2)]
    store = directory(root, slabs)
    writer = directory(root).create_slab(NAME, header(1))
    for _ in range(2):
        with pytest.raises(NoRoomError):
            store.create_slab(NAME, header(1))
    assert set(there(store)) == {*paths, writer.path}
    assert store.num_evicted == 0
    writer.close()


# ---------------------------------------------------------------- holes

LARGE = header(64)
LARGE_BYTES = LARGE.shape.file_bytes


def held_with(num_records: int) -> int:
    """Bytes on the disk of a large slab with so many records."""
    return LARGE.shape.record_at(num_records)


def add_large(store: SlabDirectory, number: int) -> Path:
    """A large slab with one record, sealed."""
    writer = store.create_slab(NAME, LARGE)
    writer.add([record(number)])
    writer.close()
    return writer.path


def test_a_slab_counts_in_full_while_it_is_written_to_and_then_what_it_holds(root: Path) -> None:
    store = directory(root)
    writer = store.create_slab(NAME, LARGE)
    for number in range(3):
        (file,) = store.slabs()
        assert file.num_bytes == LARGE_BYTES
        assert file.disk_bytes == held_with(number) == held(file.path)
        writer.add([record(number)])
    writer.close()
    (file,) = store.slabs()
    assert (file.num_bytes, file.reserved_bytes) == (held_with(3), 0)


def test_processes_that_store_little_take_little(root: Path) -> None:
    store = directory(root, limits=Limits(capacity_bytes=LARGE_BYTES + 20 * held_with(1)))
    for number in range(21):
        add_large(store, number)
    assert (len(there(store)), store.num_evicted) == (21, 0)
    add_large(store, 21)
    assert (len(there(store)), store.num_evicted) == (21, 1)


def test_b68_what_a_living_writer_may_still_take_counts(root: Path) -> None:
    store = directory(root, limits=Limits(capacity_bytes=2 * LARGE_BYTES - 1))
    writer = store.create_slab(NAME, LARGE)
    with pytest.raises(NoRoomError):
        directory(root, limits=store._limits).create_slab(NAME, LARGE)
    writer.close()
    add_large(store, 1)
    assert len(there(store)) == 2


def test_of_sealed_slabs_nobody_is_asked_twice(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs an open each, of thousands perhaps, while others wait."""
    store = directory(root)
    for number in range(20):
        add_large(store, number)
    add(store, 20)  # it has no holes: there is nothing to ask
    writer = store.create_slab(NAME, LARGE)
    asked: list[Path] = []
    real = directory_module.has_writer

    def has_writer(path: Path) -> bool:
        asked.append(path)
        return real(path)

    monkeypatch.setattr(directory_module, "has_writer", has_writer)
    again = directory(root)
    for _ in range(3):
        assert len(again.slabs()) == 22
    assert len(asked) == len(set(asked)) + 2 == 23
    assert asked.count(writer.path) == 3
    writer.close()


class Entries:
    """What `scandir` finds, on a file system that says that files hold so many blocks."""

    def __init__(self, path: Any, num_blocks: int, real: Any) -> None:
        with real(path) as found:
            self.entries = list(found)
        self._num_blocks = num_blocks

    def __enter__(self) -> Iterator[Any]:
        for one in self.entries:
            yield SimpleNamespace(
                name=one.name, path=one.path, is_dir=one.is_dir, stat=self._stat(one)
            )

    def __exit__(self, *_: object) -> None:
        pass

    def _stat(self, one: os.DirEntry[str]) -> Any:
        def stat_of(*, follow_symlinks: bool) -> SimpleNamespace:
            real = one.stat(follow_symlinks=follow_symlinks)
            names = ("st_mode", "st_size", "st_mtime_ns")
            fields = {name: getattr(real, name) for name in names}
            return SimpleNamespace(**fields, st_blocks=self._num_blocks)

        return stat_of


@pytest.mark.parametrize("num_blocks", [0, 1, 15, 16, 24, 10**6])
def test_file_systems_that_count_blocks_in_their_own_way(
    root: Path, monkeypatch: pytest.MonkeyPatch, num_blocks: int
) -> None:
    """None at all, or only later: then limits are to hold all the same. Or compressed; or more than
    the size, for what describes the file."""
    path = add_large(directory(root), 1)
    writer = directory(root).create_slab(NAME, LARGE)
    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda where: Entries(where, num_blocks, real))
    files = {file.path: file for file in directory(root).slabs()}
    told = min(512 * num_blocks, LARGE_BYTES)
    assert files[path].num_bytes == (told if told >= 8192 else LARGE_BYTES)
    assert files[path].reserved_bytes == 0
    assert files[writer.path].num_bytes == LARGE_BYTES
    assert files[writer.path].disk_bytes == told
    writer.close()


def test_a_slab_whose_writer_cannot_be_asked_for_counts_in_full(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = add_large(directory(root), 1)

    def refuse(_path: Path) -> bool:
        raise OSError(errno.EMFILE, "Too many open files")

    store = directory(root)
    with monkeypatch.context() as patch:
        patch.setattr(directory_module, "has_writer", refuse)
        assert [file.num_bytes for file in store.slabs()] == [LARGE_BYTES]
    assert [file.num_bytes for file in store.slabs()] == [held(path)]


# ---------------------------------------------------------------- the floor


class Disk:
    """A file system of so many bytes, as `statvfs` tells: what is removed may stay in use."""

    def __init__(self, store: Path, slabs: float) -> None:
        self.num_bytes = int(slabs * SLAB)
        self.in_use = 0
        """Of files without a name, and other people's."""
        self._store = store

    def statvfs(self, path: object) -> SimpleNamespace:
        used = sum(held(one) for one in self._store.rglob("*.slab*") if one.is_file())
        return SimpleNamespace(f_frsize=1, f_bavail=max(0, self.num_bytes - used - self.in_use))


@pytest.fixture
def disk(root: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk(root, 5)
    monkeypatch.setattr(os, "statvfs", disk.statvfs)
    return disk


def test_b68_the_floor_holds_whoever_else_fills_the_disk(root: Path, disk: Disk) -> None:
    store = directory(root, limits=Limits(min_free_bytes=2 * SLAB))
    for number in range(5):
        add(store, number, NOW_NS + number)
        assert disk.statvfs(root).f_bavail >= 2 * SLAB
    assert len(there(store)) == 3
    disk.in_use = SLAB
    add(store, 5)
    assert len(there(store)) == 2
    disk.in_use = 3 * SLAB - 100
    with pytest.raises(NoRoomError, match="lower floor"):
        store.create_slab(NAME, header(1))
    assert len(there(store)) == 2
    with contextlib.suppress(NoRoomError):
        store.collect()
    assert disk.statvfs(root).f_bavail >= 2 * SLAB


def test_b68_the_floor_holds_when_writers_have_taken_their_room(root: Path, disk: Disk) -> None:
    """What is free now may be promised to one."""
    disk.num_bytes = 2 * LARGE_BYTES + SLAB
    store = directory(root, limits=Limits(min_free_bytes=SLAB))
    writers = [store.create_slab(NAME, LARGE) for _ in range(2)]
    assert disk.statvfs(root).f_bavail > LARGE_BYTES
    with pytest.raises(NoRoomError):
        store.create_slab(NAME, LARGE)
    for writer in writers:
        writer.add([record(number) for number in range(64)])
        writer.close()
    assert disk.statvfs(root).f_bavail == SLAB


def test_b68_removed_slabs_that_others_have_open_are_not_free_yet(
    root: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the floor is kept, and no more slabs go for the same room."""
    now = [0.0]
    store = directory(root, limits=Limits(), clock=lambda: now[0])
    for number in range(5):
        add(store, number, NOW_NS + number)
    real = Path.unlink

    def unlink(path: Path, *, missing_ok: bool = False) -> None:
        disk.in_use += SLAB
        real(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    for moment in (0.0, 0.5, 1.9):
        now[0] = moment
        with pytest.raises(NoRoomError, match=r"not let go of .* try again"):
            store.create_slab(NAME, header(1))
        assert len(there(store)) == 4
    disk.in_use = 0
    add(store, 5)
    assert (len(there(store)), store.num_evicted) == (5, 1)
    with pytest.raises(NoRoomError):  # and so on, with the next one
        store.create_slab(NAME, header(1))
    assert store.num_evicted == 2
    now[0] += 2.1  # what is not free by now will not be
    with pytest.raises(NoRoomError):
        store.create_slab(NAME, header(1))
    assert store.num_evicted == 3


# ---------------------------------------------------------------- what never stops it


def test_b66_an_undeletable_slab_stays_and_counts(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = directory(root, 3)
    stubborn, second = add(store, 0, NOW_NS), add(store, 1, NOW_NS + 1)
    real = Path.unlink

    def unlink(path: Path, **named: Any) -> None:
        if path == stubborn:
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        real(path, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        for number in range(2, 6):
            add(store, number, NOW_NS + number)
    assert len(there(store)) == 3
    assert stubborn in there(store)
    assert second not in there(store)
    assert store.num_undeletable == 1
    assert caplog.text.count("cannot be removed") == 1
    real(stubborn)
    add(store, 6)
    assert store.num_undeletable == 0, "it is gone"


def test_nothing_but_undeletable_slabs_is_no_room_until_they_are_tried_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    store = directory(root, 2, clock=lambda: now[0])
    for number in range(2):
        add(store, number)

    def unlink(path: Path, **named: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        for _ in range(2):
            with pytest.raises(NoRoomError):
                store.create_slab(NAME, header(1))
    assert store.num_undeletable == 2
    now[0] = 59.0
    with pytest.raises(NoRoomError):
        store.create_slab(NAME, header(1))
    now[0] = 60.0
    add(store, 2)
    add(store, 3)
    add(store, 4)
    assert store.num_undeletable == 0


def test_a_slab_that_cannot_be_opened_for_now_stays_for_now(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    store = directory(root, 2, clock=lambda: now[0])
    first, second = add(store, 0, NOW_NS), add(store, 1, NOW_NS + 1)
    real = os.open

    def refuse(path: Any, *rest: Any) -> int:
        if path == first:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        add(store, 2)
    assert first in there(store)
    assert second not in there(store)
    now[0] = 60.0
    add(store, 3)
    assert first not in there(store)


def test_b66_files_that_vanish_while_it_looks_count_as_gone(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = directory(root, 2)
    first, second = add(store, 0, NOW_NS), add(store, 1, NOW_NS + 1)
    real = SlabDirectory.slabs

    def slabs(self: SlabDirectory) -> list[SlabFile]:
        files = real(self)
        first.unlink()
        return files

    with monkeypatch.context() as patch:
        patch.setattr(SlabDirectory, "slabs", slabs)
        third = add(store, 2)
    assert there(store) == [second, third]
    assert store.num_evicted == 1


def test_b66_files_and_folders_that_vanish_while_they_are_listed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = directory(root, 2)
    first, second = add(store, 0), add(store, 1)
    (root / ("0" * 16)).mkdir()
    real = os.scandir

    @contextlib.contextmanager
    def scandir(path: Any) -> Iterator[list[os.DirEntry[str]]]:
        with real(path) as found:
            entries = list(found)
        first.unlink(missing_ok=True)
        if Path(path) == root:
            (root / ("0" * 16)).rmdir()
        yield entries

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scandir)
        assert there(store) == [second]


def test_a_space_that_cannot_be_read_is_passed_over(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = directory(root, 1)
    first = add(store, 0)
    (root / ("f" * 16)).mkdir()
    real = os.scandir

    def scandir(path: Any) -> Any:
        if Path(path).name == "f" * 16:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    for number in range(3):
        assert there(store) != [first] or number == 0
        add(store, number)
    assert len(there(store)) == 1
    assert caplog.text.count("does not count") == 1


def test_strays_are_neither_counted_nor_removed(root: Path) -> None:
    store = directory(root, 1)
    path = add(store, 1)
    folder = path.parent
    (folder / "notes").write_bytes(bytes(10 * SLAB))
    (folder / "link.slab").symlink_to(folder / "notes")
    (folder / "folder.slab").mkdir()
    os.mkfifo(folder / "pipe.slab")
    (root / "stray.slab").write_bytes(bytes(10 * SLAB))
    (root / ".trash").mkdir()
    (root / ".trash" / "x.slab").write_bytes(bytes(10 * SLAB))
    (root / "elsewhere").symlink_to(folder)
    strays = [one for one in root.rglob("*") if one != path]
    assert there(store) == [path]
    add(store, 2)
    assert path not in there(store)
    assert all(os.path.lexists(one) for one in strays)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("function", ["mkdir", "open", "posix_fallocate", "ftruncate", "pwrite"])
def test_b69_a_full_disk_is_no_room(
    root: Path, monkeypatch: pytest.MonkeyPatch, function: str, code: int
) -> None:
    store = directory(root)

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, function, fail)
        with pytest.raises(NoRoomError, match="give the store a smaller capacity"):
            store.create_slab(NAME, header(1))
    assert not list(root.glob("*/*"))
    add(store, 1)


def test_other_errors_stay_what_they_are_and_the_lock_is_let_go(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = directory(root)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    for name in ("posix_fallocate", "ftruncate", "statvfs"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            with pytest.raises(OSError, match="Input/output"):
                store.create_slab(NAME, header(1))
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    add(directory(root), 1)


# ---------------------------------------------------------------- leftovers


def test_b67_leftovers_of_the_dead_go_after_a_minute(root: Path) -> None:
    now = [NOW_NS]
    store = directory(root, 2, now_ns=lambda: now[0])
    sealed = add(store, 1, NOW_NS)
    leftover = sealed.with_name("0-0.slab.new")
    leftover.write_bytes(bytes(SLAB))
    os.utime(leftover, ns=(NOW_NS, NOW_NS))
    now[0] = NOW_NS + 59 * 10**9
    assert store.collect() == []
    assert [file.is_new for file in store.slabs()].count(True) == 1
    add(store, 2, NOW_NS)
    assert leftover.exists()
    assert not sealed.exists(), "a young one counts, and may be somebody's"
    now[0] = NOW_NS + 61 * 10**9
    assert [file.path for file in store.collect()] == [leftover]
    assert store.num_evicted == 1, "nobody needed its room"
    add(store, 3)
    assert store.num_evicted == 1


def test_what_is_being_made_by_the_living_stays_however_old(root: Path) -> None:
    store = directory(root, now_ns=lambda: NOW_NS)
    writer = store.create_slab(NAME, header(1))
    young = writer.path.rename(writer.path.with_name(writer.path.name + ".new"))
    os.utime(young, ns=(1, 1))
    assert store.collect() == []
    writer.close()
    assert [file.path for file in store.collect()] == [young]


# ---------------------------------------------------------------- several processes

HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_b62_a_process_that_hangs_with_the_lock_is_not_waited_for_long(root: Path) -> None:
    now = [0.0]
    store = directory(root, clock=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
    add(store, 1)
    lock = root / "interlace-slabs.lock"
    process = start(HOLDER, lock)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    for until_s in (2.0, 4.0):
        with pytest.raises(
            NoRoomError, match=r"for 2 s: .* end the process .*interlace-slabs.lock"
        ):
            store.create_slab(NAME, header(1))
        assert until_s <= now[0] < until_s + 0.05
    assert len(there(store)) == 1
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    add(store, 2)


def test_a_child_forked_meanwhile_does_not_hold_the_lock(root: Path) -> None:
    now = [0.0]
    store = directory(root, clock=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
    end_read, end_write = os.pipe()
    with store._locked(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads of pytest's
        pid = os.fork()
        if not pid:
            os.close(end_write)
            os.read(end_read, 1)
            os._exit(0)
    add(store, 1)
    for fd in (end_read, end_write):
        os.close(fd)
    os.waitpid(pid, 0)


CREATOR = """
import os, sys, time
from pathlib import Path
from types import SimpleNamespace
from slab_kit import SPACE, header, record
from interlace.connectors.slab_store.directory import Limits, NoRoomError, SlabDirectory
root, start, capacity, disk, floor, count, size = Path(sys.argv[1]), *map(float, sys.argv[2:])
def statvfs(path):
    used = sum(one.stat().st_blocks * 512 for one in root.rglob("*.slab*"))
    return SimpleNamespace(f_frsize=1, f_bavail=int(disk) - used)
os.statvfs = statvfs
limits = Limits(capacity_bytes=int(capacity), min_free_bytes=int(floor))
store = SlabDirectory(root, limits, clock=lambda: 0.0)  # patient, however busy the machine
store.prepare()
while time.time() < start: pass
made = refused = 0
before = None
for number in range(int(count)):
    try:
        writer = store.create_slab(SPACE.folder_name, header(int(size)))
        writer.add([record(number)])
        made += 1
    except NoRoomError as error:
        refused += 1
        continue
    if before: before.close()
    before = writer
print(made, refused)
"""


@pytest.mark.parametrize("num_records", [1, 4])
@pytest.mark.parametrize("limit", ["capacity", "floor"])
@pytest.mark.soak(quick=60, full=5000)
def test_b68_limits_hold_for_two_processes_together(
    root: Path, limit: str, num_records: int, num_runs: int
) -> None:
    """Five slabs: each process writes to at most two, one of them about to be sealed. Each slab
    gets one record, so those with room for more have holes."""
    most = 5 * header(num_records).shape.file_bytes
    limits = (most, 10**9, 0) if limit == "capacity" else (10**9, most + 3 * SLAB, 3 * SLAB)
    store = directory(root, clock=lambda: 0.0)
    add(store, 1)
    both = [
        start(CREATOR, root, time.time() + 0.6, *limits, num_runs, num_records) for _ in range(2)
    ]
    sums, most_slabs = [], 0
    while any(process.poll() is None for process in both):
        with store._locked():  # nobody makes, or removes, one meanwhile
            files = store.slabs()
        sums.append(sum(file.num_bytes for file in files))
        most_slabs = max(most_slabs, len(files))
        time.sleep(0.005)
    numbers = [tuple(map(int, said(process).split())) for process in both]
    assert max(sums) <= most
    assert numbers == [(num_runs, 0)] * 2
    assert most_slabs >= 5 if num_records == 1 else most_slabs > 5, "the room is used"


def test_two_stores_in_one_directory_find_each_others_records(root: Path) -> None:
    stores = [directory(root, 4) for _ in range(2)]
    for number, store in enumerate(stores * 3):
        add(store, number, NOW_NS + number)
    with contextlib.closing(Catalog(root / NAME, SPACE)) as catalog:
        catalog.look()
        assert found(catalog, range(9)) == [2, 3, 4, 5]
