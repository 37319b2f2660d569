"""Slab files: written and read, grown and sealed, cut off, removed, flipped, out of room."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slab_kit import (
    PATIENCE_S,
    RECORD_BYTES,
    block_hash,
    content,
    flip,
    folder_in,
    header,
    is_right,
    read,
    record,
    start,
    write_slab,
)

from interlace.connectors.slab_store import files
from interlace.connectors.slab_store import slab as slab_module
from interlace.connectors.slab_store.directory import has_writer
from interlace.connectors.slab_store.layout import (
    ENTRY_BYTES,
    HEADER_BYTES,
    NO_PARENT,
    DamagedSlabError,
    Entry,
    SlabHeader,
    SlabShape,
    parse_entries,
)
from interlace.connectors.slab_store.slab import Slab
from interlace.connectors.slab_store.slab_writer import NewRecord, SlabWriter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_in(tmp_path)


@pytest.fixture
def writer(folder: Path) -> Iterator[SlabWriter]:
    writer = SlabWriter.create(folder, header(4))
    yield writer
    writer.close()


# ---------------------------------------------------------------- written and read


def test_b73_what_was_written_is_read(folder: Path) -> None:
    with Slab.open(write_slab(folder, [0, 5, 6])) as slab:
        entries = slab.look()
        assert [one.block_hash for one in entries] == [block_hash(n) for n in (0, 5, 6)]
        assert [one.parent_hash for one in entries] == [NO_PARENT, block_hash(4), block_hash(5)]
        assert [one.record for one in entries] == [0, 1, 2]
        assert all(is_right(slab, one) for one in entries)
        assert slab.header == header(3)


def test_entries_say_when_they_were_saved(folder: Path) -> None:
    times = iter(range(101, 200))
    writer = SlabWriter.create(folder, header(), lambda: next(times))
    entries = writer.add([record(1), record(2)])
    writer.close()
    assert [one.saved_ns for one in entries] == [102, 103]
    assert writer.path.name.startswith(f"{101:016x}-")


def test_a_slab_has_its_final_size_from_creation_and_takes_room_for_what_is_there(
    writer: SlabWriter,
) -> None:
    shape = writer.header.shape
    for number in range(4):
        status = writer.path.stat()
        assert status.st_size == shape.file_bytes
        assert status.st_blocks * 512 == shape.record_at(number)
        writer.add([record(number)])
    writer.close()
    status = writer.path.stat()
    assert status.st_blocks * 512 == status.st_size == shape.file_bytes


def test_a_hole_is_no_damage(folder: Path) -> None:
    with Slab.open(write_slab(folder, [1], num_records=2000)) as slab:
        (entry,) = slab.look()
        assert slab.is_sealed
        assert is_right(slab, entry)


def test_what_holds_no_record_can_be_discarded(folder: Path) -> None:
    empty = SlabWriter.create(folder, header(4))
    used = SlabWriter.create(folder, header(4))
    used.add([record(1)])
    for writer in (empty, used, used):
        writer.discard()
    assert list(folder.iterdir()) == [used.path]
    with Slab.open(used.path) as slab:
        assert len(slab.look()) == 1
        assert slab.is_sealed


def test_looks_bring_what_is_new(writer: SlabWriter) -> None:
    with Slab.open(writer.path) as slab:
        assert slab.look() == []
        first = writer.add([record(1)])
        assert slab.look() == first
        assert slab.look() == []
        more = writer.add([record(2), record(3)])
        last = writer.add([record(4)])
        assert slab.look() == more + last
        assert not slab.is_sealed, "it has a writer"
        assert writer.num_free == 0
        writer.close()
        assert slab.look() == []
        assert slab.is_sealed


def test_a_seal_brings_what_came_before_it(writer: SlabWriter) -> None:
    with Slab.open(writer.path) as slab:
        entries = writer.add([record(1)])
        writer.close()
        assert slab.look() == entries
        assert slab.is_sealed
        assert slab.look() == []


@settings(max_examples=25, deadline=None)
@given(
    record_bytes=st.one_of(st.sampled_from([1, 8, 4095, 4096, 4097, 8192]), st.integers(1, 20_000)),
    count=st.integers(1, 5),
)
def test_records_of_any_size(
    record_bytes: int, count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shape = SlabShape(record_bytes, 5)
    rng = np.random.default_rng(record_bytes)
    data = [rng.integers(0, 256, record_bytes, np.uint8) for _ in range(count)]
    writer = SlabWriter.create(tmp_path_factory.mktemp("slab"), SlabHeader({}, shape))
    writer.add([NewRecord(block_hash(n), None, one) for n, one in enumerate(data)])
    writer.close()
    with Slab.open(writer.path) as slab:
        for one, expected in zip(slab.look(), data, strict=True):
            assert np.array_equal(read(slab, one), expected)


def test_records_of_any_shape(folder: Path) -> None:
    data = content(3).reshape(3, 7, -1)
    writer = SlabWriter.create(folder, header(1))
    (entry,) = writer.add([NewRecord(block_hash(3), None, data)])
    writer.close()
    with Slab.open(writer.path) as slab:
        buffer = np.empty_like(data)
        slab.read(entry, buffer)
    assert np.array_equal(buffer, data)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_slabs_are_the_owners_alone(folder: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        path = write_slab(folder, [1])
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_long_index_is_read_in_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slab that fills up is looked at often, and only where something may be new."""
    monkeypatch.setattr(slab_module, "_LOOK_RECORDS", 8)
    writer = SlabWriter.create(folder, header(40))
    parsed: list[int] = []
    real = parse_entries

    def parse(data: bytes, first: int, **how: bool) -> Any:
        parsed.append(len(data) // ENTRY_BYTES)
        return real(data, first, **how)

    monkeypatch.setattr(slab_module, "parse_entries", parse)
    with Slab.open(writer.path) as slab:
        assert (slab.look(), parsed) == ([], [8])
        for numbers in (range(5), range(5, 16), range(16, 37)):
            entries = writer.add([record(number) for number in numbers])
            assert slab.look() == entries
        del parsed[:]
        writer.close()
        assert slab.look() == []
        assert parsed == [3]
        assert slab.is_sealed
    with Slab.open(writer.path) as slab:
        assert len(slab.look()) == 37


def test_a_look_that_fails_loses_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_module, "_LOOK_RECORDS", 2)
    real, reads = files.read_at, iter(range(100))

    def read_at(fd: int, buffer: memoryview, offset: int) -> int:
        if next(reads) == 2:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffer, offset)

    with Slab.open(write_slab(folder, range(6))) as slab:
        monkeypatch.setattr(slab_module, "read_at", read_at)
        with pytest.raises(OSError, match="Input/output"):
            slab.look()
        assert not slab.is_sealed
        assert len(slab.look()) == 6


# ---------------------------------------------------------------- who writes

WRITER = """
import sys
from pathlib import Path
from slab_kit import header, record
from interlace.connectors.slab_store.slab_writer import SlabWriter
writer = SlabWriter.create(Path(sys.argv[1]), header(4))
writer.add([record(1)])
print(writer.path, flush=True)
sys.stdin.read()
"""


def test_a_writer_in_another_process_is_seen_until_it_dies(folder: Path) -> None:
    process = start(WRITER, folder)
    assert process.stdout is not None
    path = Path(process.stdout.readline().strip())
    with Slab.open(path) as slab, Slab.open(path) as other:
        assert len(slab.look()) == 1
        assert (slab.look(), slab.is_sealed) == ([], False)
        process.kill()
        process.communicate(timeout=PATIENCE_S)
        assert (slab.look(), slab.is_sealed) == ([], True)
        assert len(other.look()) == 1
        assert other.is_sealed


def forked(work: Callable[[], object]) -> tuple[int, int]:
    """A child of this process, which does that, says so, and then waits until what is returned
    second, a pipe, is closed."""
    said_read, said_write = os.pipe()
    end_read, end_write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads of pytest's
        pid = os.fork()
    if not pid:
        os.close(end_write)
        try:
            work()
        finally:
            os.write(said_write, b"x")
            os.read(end_read, 1)
            os._exit(0)
    assert os.read(said_read, 1) == b"x"
    for fd in (said_read, said_write, end_read):
        os.close(fd)
    return pid, end_write


@contextlib.contextmanager
def a_child(work: Callable[[], object] = lambda: None) -> Iterator[None]:
    pid, pipe = forked(work)
    try:
        yield
    finally:
        os.close(pipe)
        os.waitpid(pid, 0)


def test_a_forked_child_does_not_go_on_writing_for_its_parent(folder: Path) -> None:
    writer = SlabWriter.create(folder, header(4))
    with a_child():
        writer.close()
        assert not has_writer(writer.path)


PARENT = """
import os, sys
from pathlib import Path
from slab_kit import header, record
from interlace.connectors.slab_store.slab_writer import SlabWriter
writer = SlabWriter.create(Path(sys.argv[1]), header(4))
writer.add([record(1)])
if not os.fork():
    print(writer.path, os.getppid(), flush=True)
    sys.stdin.read()
    os._exit(0)
os.wait()
"""


def test_a_child_whose_parent_was_killed_holds_no_lock(folder: Path) -> None:
    process = start(PARENT, folder)
    assert process.stdout is not None
    path, pid = process.stdout.readline().split()
    assert int(pid) == process.pid
    assert has_writer(Path(path))
    process.kill()
    process.wait(PATIENCE_S)  # the child lives on, until its input ends
    assert not has_writer(Path(path))
    process.communicate(timeout=PATIENCE_S)


def test_what_a_forked_child_does_with_a_writer_is_nothing_to_its_parent(folder: Path) -> None:
    writer = SlabWriter.create(folder, header(4))

    def use() -> None:
        with contextlib.suppress(OSError):
            writer.add([record(1)])
        writer.discard()
        writer.close()

    with a_child(use):
        assert has_writer(writer.path)
        writer.add([record(2)])
    writer.close()
    with Slab.open(writer.path) as slab:
        assert [one.block_hash for one in slab.look()] == [block_hash(2)]


def test_readers_do_not_take_each_other_for_the_writer(folder: Path) -> None:
    with Slab.open(write_slab(folder, [1])) as slab, Slab.open(slab.path) as other:
        fcntl.flock(other._fd, fcntl.LOCK_SH)
        slab.look()
        assert slab.is_sealed
        fcntl.flock(other._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it has let go


def test_a_closed_writer_adds_nothing(writer: SlabWriter) -> None:
    writer.add([record(1)])
    writer.close()
    writer.close()
    with pytest.raises(OSError, match="descriptor"):
        writer.add([record(2)])
    with Slab.open(writer.path) as slab:
        assert len(slab.look()) == 1


# ---------------------------------------------------------------- cut off, removed, replaced

SHAPE = header(3).shape
BOUNDARIES = {
    "nothing": 0,
    "a byte": 1,
    "header -1": HEADER_BYTES - 1,
    "header": HEADER_BYTES,
    "in an entry": HEADER_BYTES + ENTRY_BYTES + 5,
    "after two entries": HEADER_BYTES + 2 * ENTRY_BYTES,
    "index": SHAPE.data_at,
    "in a record": SHAPE.record_at(1) + 100,
    "before the last record": SHAPE.record_at(2),
    "at the last record's end": SHAPE.record_at(2) + RECORD_BYTES,
    "the last byte": SHAPE.file_bytes - 1,
    "one too many": SHAPE.file_bytes + 1,
}


@pytest.mark.parametrize("size", BOUNDARIES.values(), ids=BOUNDARIES.keys())
def test_b65_a_slab_that_was_cut_off_is_not_opened(folder: Path, size: int) -> None:
    path = write_slab(folder, range(3))
    os.truncate(path, size)
    with pytest.raises(DamagedSlabError):
        Slab.open(path)


@pytest.mark.parametrize("size", BOUNDARIES.values(), ids=BOUNDARIES.keys())
def test_b65_a_slab_that_is_cut_off_while_it_is_open(folder: Path, size: int) -> None:
    path = write_slab(folder, range(3))
    with Slab.open(path) as slab, Slab.open(path) as late:
        entries = slab.look()
        os.truncate(path, size)
        assert not slab.is_whole
        for one in entries:
            if size >= SHAPE.record_at(one.record) + RECORD_BYTES:
                assert is_right(slab, one)
            else:
                with pytest.raises(DamagedSlabError, match="cut off"):
                    read(slab, one)
        assert late.look() == entries[: max(0, size - HEADER_BYTES) // ENTRY_BYTES]


def test_b65_a_removed_slab_is_read_while_it_is_open(folder: Path) -> None:
    with Slab.open(write_slab(folder, [1, 2])) as slab:
        slab.path.unlink()
        assert slab.is_removed
        assert slab.is_whole
        assert all(is_right(slab, one) for one in slab.look())
        slab.touch()


def a_link(path: Path) -> None:
    path.symlink_to(write_slab(path.parent, [1]))


@pytest.mark.parametrize(
    "make",
    [a_link, Path.mkdir, os.mkfifo, lambda path: path.symlink_to("nowhere"), Path.touch],
    ids=["link", "directory", "pipe", "dead link", "empty file"],
)
def test_b65_only_files_are_slabs(folder: Path, make: Callable[[Path], None]) -> None:
    """And nobody waits for a pipe."""
    path = folder / "0-0.slab"
    make(path)
    with pytest.raises((OSError, DamagedSlabError)):
        Slab.open(path)


def test_what_is_not_opened_is_not_kept_open(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    path = write_slab(folder, [1])
    os.truncate(path, 9000)
    for _ in range(3):
        with pytest.raises(DamagedSlabError):
            Slab.open(path)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


# ---------------------------------------------------------------- flipped


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, RECORD_BYTES - 1), bit=st.integers(0, 7), number=st.integers(0, 2))
def test_b62_a_flipped_record_is_refused_and_the_others_are_not(
    at: int, bit: int, number: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write_slab(tmp_path_factory.mktemp("slab"), range(3))
    with Slab.open(path) as slab:
        entries = slab.look()
        flip(path, SHAPE.record_at(number) + at, bit)
        with pytest.raises(DamagedSlabError, match=f"record {number} of .* another checksum"):
            read(slab, entries.pop(number))
        assert all(is_right(slab, one) for one in entries)


def test_b62_a_record_in_the_place_of_another_is_refused(folder: Path) -> None:
    path = write_slab(folder, range(3))
    data = bytearray(path.read_bytes())
    data[SHAPE.record_at(0) : SHAPE.record_at(1)] = data[SHAPE.record_at(1) : SHAPE.record_at(2)]
    path.write_bytes(data)
    with Slab.open(path) as slab:
        first, second, _ = slab.look()
        assert is_right(slab, second)
        with pytest.raises(DamagedSlabError):
            read(slab, first)


def test_a_record_that_no_slab_has_is_refused(folder: Path) -> None:
    with Slab.open(write_slab(folder, [1])) as slab:
        (entry,) = slab.look()
        for number in (1, 2**32 - 1):
            with pytest.raises(DamagedSlabError, match="cut off"):
                read(slab, entry._replace(record=number))


# ---------------------------------------------------------------- closed meanwhile


def test_b74_a_read_under_way_ends_well_when_its_slab_is_closed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slab = Slab.open(write_slab(folder, [1]))
    (entry,) = slab.look()
    fd, real = slab._fd, files.read_at
    has_begun, may_go_on = threading.Event(), threading.Event()
    outcome: list[bool] = []

    def slow(fd: int, buffer: memoryview, offset: int) -> int:
        has_begun.set()
        assert may_go_on.wait(PATIENCE_S)
        return real(fd, buffer, offset)

    monkeypatch.setattr(slab_module, "read_at", slow)
    thread = threading.Thread(target=lambda: outcome.append(is_right(slab, entry)))
    thread.start()
    assert has_begun.wait(PATIENCE_S)
    slab.close()
    os.fstat(fd)  # still open
    with pytest.raises(DamagedSlabError, match="is closed"):
        read(slab, entry)
    may_go_on.set()
    thread.join(PATIENCE_S)
    assert outcome == [True]
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(fd)


def test_a_closed_slab_never_touches_anybody_elses_file(folder: Path) -> None:
    slab = Slab.open(write_slab(folder, [1]))
    slab.close()
    slab.close()
    assert "seen=0 of 1" in repr(slab)
    with (folder / "other").open("wb") as other:
        os.utime(other.fileno(), (1, 1))
        slab.touch()
        assert slab.look() == []
        for question in ("is_whole", "is_removed"):
            with pytest.raises(OSError, match="descriptor"):
                getattr(slab, question)
        assert os.fstat(other.fileno()).st_mtime == 1


def test_many_threads_read_while_the_slab_is_closed(folder: Path) -> None:
    slab = Slab.open(write_slab(folder, range(8)))
    entries = slab.look()
    wrong: list[str] = []
    go = threading.Barrier(5)

    def read_all() -> None:
        go.wait()
        try:
            while True:
                wrong.extend("content" for one in entries if not is_right(slab, one))
        except DamagedSlabError as error:
            wrong.extend(["error"] * ("is closed" not in str(error)))

    threads = [threading.Thread(target=read_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    go.wait()
    threading.Event().wait(0.05)
    slab.close()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not wrong
    assert slab._fd == -1


def test_a_touch_is_written_down_now_and_then(folder: Path) -> None:
    with Slab.open(write_slab(folder, [1])) as slab:
        for now_s, is_written in ((0.0, True), (0.9, False), (1.0, True), (1.5, False)):
            os.utime(slab.path, (1, 1))
            slab.touch(lambda: now_s)  # noqa: B023
            assert (slab.path.stat().st_mtime != 1) is is_written


# ---------------------------------------------------------------- the file system refuses

ERRORS = [errno.EIO, errno.ENOSPC, errno.EACCES]


def failing(real: Callable[..., Any], code: int, when: int) -> Callable[..., Any]:
    """Fails at that call, and at every later one."""
    calls = iter(range(1_000_000))

    def call(*args: Any, **named: Any) -> Any:
        if next(calls) >= when:
            raise OSError(code, os.strerror(code))
        return real(*args, **named)

    return call


@pytest.mark.parametrize("code", ERRORS)
@pytest.mark.parametrize(
    "function",
    ["os.open", "os.posix_fallocate", "os.ftruncate", "os.pwrite", "os.rename", "fcntl.flock"],
)
def test_b69_a_slab_that_cannot_be_made_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, function: str, code: int
) -> None:
    module, name = function.split(".")
    real = getattr(__import__(module), name)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with monkeypatch.context() as patch:
        patch.setattr(function, failing(real, code, 0))
        with pytest.raises(OSError) as caught:
            SlabWriter.create(folder, header())
    assert caught.value.errno == code
    assert not list(folder.iterdir())
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


@pytest.mark.parametrize("code", ERRORS)
@pytest.mark.parametrize("when", range(4))
def test_b62_b69_half_a_write_publishes_no_half_record(
    writer: SlabWriter, monkeypatch: pytest.MonkeyPatch, when: int, code: int
) -> None:
    """Three records, and then their entries."""
    writer.add([record(1)])
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing(os.pwrite, code, when))
        with pytest.raises(OSError) as caught:
            writer.add([record(number) for number in (2, 3, 4)])
    assert caught.value.errno == code
    assert writer.num_free == 0, "what is on the disk is not known: nothing is written over it"
    with pytest.raises(AssertionError):
        writer.add([record(5)])
    writer.close()
    with Slab.open(writer.path) as slab:
        (entry,) = slab.look()
        assert is_right(slab, entry)


@pytest.mark.parametrize("length", [1, ENTRY_BYTES - 1, ENTRY_BYTES, 2 * ENTRY_BYTES + 1])
def test_an_index_that_was_written_in_part_has_whole_entries_only(
    writer: SlabWriter, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    real = os.pwrite

    def write_a_part(fd: int, data: memoryview, offset: int) -> int:
        if offset < SHAPE.data_at:
            real(fd, data[:length], offset)
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    with Slab.open(writer.path) as slab:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", write_a_part)
            with pytest.raises(OSError, match="No space"):
                writer.add([record(number) for number in (1, 2, 3)])
        live = slab.look()
        writer.close()
        assert live + slab.look() == live
        assert len(live) == length // ENTRY_BYTES
        assert all(is_right(slab, one) for one in live)


def test_short_reads_and_writes_go_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MOST_BYTES", 100)
    with Slab.open(write_slab(folder, [1, 2])) as slab:
        assert all(is_right(slab, one) for one in slab.look())


def test_a_system_that_writes_nothing_is_an_error(
    writer: SlabWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(OSError, match="Input/output"):
        writer.add([record(1)])


def test_a_read_that_fails_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Slab.open(write_slab(folder, [1])) as slab:
        (entry,) = slab.look()
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", failing(os.preadv, errno.EIO, 0))
            with pytest.raises(OSError, match="Input/output"):
                read(slab, entry)
        assert is_right(slab, entry)


def test_a_reader_of_what_may_not_be_touched_reads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Slab.open(write_slab(folder, [1])) as slab:
        monkeypatch.setattr(os, "utime", failing(os.utime, errno.EROFS, 0))
        slab.touch()
        assert all(is_right(slab, one) for one in slab.look())


def test_an_entry_is_a_plain_value(folder: Path) -> None:
    """Equal for whoever reads it."""
    path = write_slab(folder, [1])
    with Slab.open(path) as one, Slab.open(path) as other:
        assert one.look() == other.look()
        assert isinstance(one, Slab)
        assert Entry._fields[0] == "record"
