"""Records that are written on a lane: places, limits, a full queue, a full disk, the end."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slab_kit import PATIENCE_S, PITCH, RECORD_BYTES, SLAB_BYTES, WritingKit

from interlace.connectors.slab_store import slab_writer
from interlace.connectors.slab_store.directory import Limits
from interlace.connectors.slab_store.files import write_at
from interlace.connectors.slab_store.writing import StoredPlace
from interlace.layers.lanes import ThreadLanes
from interlace.layers.virtual_lanes import VirtualLanes


def drained(root: Path, **options: Any) -> tuple[WritingKit, VirtualLanes]:
    lanes = VirtualLanes(0, "lazy", polls_per_work=1_000_000)
    return WritingKit(root, lanes.lane("write"), **options), lanes


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(1, 8), max_size=8))
def test_what_was_written_is_found_where_it_was_said(
    sizes: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    kit, lanes = drained(tmp_path_factory.mktemp("kv"))
    numbers = iter(range(100))
    writes = [kit.write(*(next(numbers) for _ in range(size))) for size in sizes]
    lanes.drain()
    total = sum(sizes)
    assert all(write.is_done for write in writes)
    assert kit.found(*range(total)) == list(range(total))
    places = [place for write in writes for place in write.places]
    assert len(set(places)) == total
    assert kit.writer.counts.written == total
    assert kit.writer.num_queued_bytes == 0
    slabs = sorted({place.slab for place in places})
    assert len(slabs) == -(-total // 3)
    for place, number in zip(places, range(total), strict=True):
        assert isinstance(place, StoredPlace)
        assert place.record == number % 3, "slabs are filled one after the other"
    assert kit.writer.close(PATIENCE_S)


def test_a_full_queue_drops_and_counts_and_reads_nothing(tmp_path: Path) -> None:
    kit, lanes = drained(tmp_path, queue=2 * RECORD_BYTES)
    first, second = kit.write(0, 1), kit.write(2)
    assert (first.is_done, second.is_done) == (False, True)
    assert kit.writer.counts.dropped_queue_full == 1
    lanes.drain()
    third = kit.write(2)
    lanes.drain()
    assert kit.found(0, 1, 2) == [0, 1, 2]
    assert third.places
    assert not second.places
    kit.writer.close(PATIENCE_S)


def test_without_room_nothing_is_stored_until_it_is_tried_again(tmp_path: Path) -> None:
    kit, lanes = drained(tmp_path, limits=Limits(capacity_bytes=SLAB_BYTES // 2))
    kit.write(0, 1)
    kit.write(2)
    lanes.drain()
    assert kit.writer.counts == (0, 0, 3, 0)
    kit.directory._limits = Limits()
    kit.write(3)
    lanes.drain()
    assert kit.writer.counts.dropped_no_room == 4, "not yet"
    kit.now_s += 1.0
    kit.write(4)
    lanes.drain()
    assert kit.found(*range(5)) == [4]
    kit.writer.close(PATIENCE_S)


@pytest.mark.parametrize(
    ("code", "failing"),
    [
        *itertools.product([errno.EIO, errno.EACCES], [1, 2, 3, 4]),
        *itertools.product([errno.ENOSPC], [1, 3]),  # entries have room from creation
    ],
)
def test_an_error_of_the_file_system_ends_the_slab_and_nobody_else(
    code: int, failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each second write is data, the next one its entry."""
    kit, lanes = drained(tmp_path)
    kit.write(0)
    lanes.drain()
    count = iter(range(1, 100))

    def fail(*args: Any) -> None:
        if next(count) == failing:
            raise OSError(code, os.strerror(code))
        write_at(*args)

    monkeypatch.setattr(slab_writer, "write_at", fail)
    kit.write(1)
    kit.write(2)
    lanes.drain()
    monkeypatch.undo()
    kit.now_s += 1.0
    kit.write(3)
    lanes.drain()
    whole = kit.found(0, 1, 2, 3)
    assert whole[0] == 0
    assert whole[-1] == 3
    assert kit.writer.counts.written == len(whole)
    assert kit.writer.counts.dropped_error + kit.writer.counts.dropped_no_room == 4 - len(whole)
    kit.writer.close(PATIENCE_S)


class Quota:
    """Lets so many bytes lie in slabs, whatever `statvfs` says is free."""

    def __init__(self, kit: WritingKit, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._kit = kit

    def write_at(self, fd: int, buffers: Any, offset: int) -> None:
        held = sum(path.stat().st_blocks * 512 for path in self._kit.folder.glob("*.slab"))
        is_data = buffers[0].nbytes == RECORD_BYTES
        if is_data and held + PITCH > self.num_bytes:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        write_at(fd, buffers, offset)


def test_b69_a_disk_that_fills_up_within_a_slab_costs_what_did_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit, lanes = drained(tmp_path)
    quota = Quota(kit, 2 * SLAB_BYTES - PITCH)
    monkeypatch.setattr(slab_writer, "write_at", quota.write_at)
    write = kit.write(*range(8))
    lanes.drain()
    assert len(write.places) == 5
    assert kit.writer.counts == (5, 0, 3, 0)
    assert kit.found(*range(9)) == [0, 1, 2, 3, 4]
    assert {file.reserved_bytes for file in kit.directory.slabs()} == {0}, "it is sealed"
    kit.write(8)
    lanes.drain()
    assert kit.writer.counts.dropped_no_room == 4, "not yet"
    kit.now_s += 1.0
    kit.write(5, 6, 7, 8)
    lanes.drain()
    assert kit.found(*range(9)) == [3, 4, 5, 6, 7], "the oldest slab has gone for it"
    assert kit.writer.counts == (8, 0, 5, 0)
    assert kit.directory.num_evicted == 1
    assert kit.writer.close(PATIENCE_S)


def test_b69_where_nothing_fits_no_files_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit, lanes = drained(tmp_path)
    kit.write(0)
    lanes.drain()
    monkeypatch.setattr(slab_writer, "write_at", Quota(kit, 0).write_at)
    for number in range(1, 6):
        kit.now_s += 1.0
        kit.write(number)
        lanes.drain()
    assert kit.writer.counts == (1, 0, 5, 0)
    assert kit.found(*range(6)) == [0], "less than a slab goes for none"
    assert len(list(kit.folder.iterdir())) == 1
    assert kit.writer.close(PATIENCE_S)


def test_a_slab_whose_end_is_not_taken_well_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems say only then what did not fit."""
    kit, lanes = drained(tmp_path)
    kit.write(0, 1, 2)
    lanes.drain()
    real = os.close

    def close(fd: int) -> None:
        real(fd)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close)
        kit.writer._seal()
    kit.write(3)
    lanes.drain()
    assert kit.found(*range(4)) == [0, 1, 2, 3]
    assert kit.writer.close(PATIENCE_S)


def test_b68_the_limits_are_looked_after_while_nothing_is_written(tmp_path: Path) -> None:
    """Others fill the file system too."""
    kit, lanes = drained(tmp_path)
    kit.write(*range(9))
    lanes.drain()
    assert kit.writer.close(PATIENCE_S)
    kit, lanes = drained(tmp_path)
    kit.directory._limits = Limits(capacity_bytes=2 * SLAB_BYTES)
    kit.writer.tend()
    lanes.drain()
    assert len(kit.directory.slabs()) == 3, "not yet"
    kit.now_s += 10.0
    kit.writer.tend()
    kit.writer.tend()
    assert len(lanes.pending) == 1
    lanes.drain()
    assert len(kit.directory.slabs()) == 2
    assert len(kit.found(*range(9))) == 6, "those of two slabs"


def test_the_end_seals_the_slab_and_takes_nothing_more(tmp_path: Path) -> None:
    kit = WritingKit(tmp_path, ThreadLanes().lane("write"))
    kit.write(0, 1)
    assert kit.writer.close(PATIENCE_S)
    assert kit.found(0, 1) == [0, 1]
    (slab,) = kit.directory.slabs()
    assert not slab.is_new
    late = kit.write(2)
    assert late.is_done
    assert not late.places
    assert kit.writer.counts.dropped_queue_full == 1
    assert kit.writer.close(PATIENCE_S), "may be repeated"


def test_an_end_that_takes_too_long_leaves_whole_records_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = WritingKit(tmp_path, ThreadLanes().lane("write"))
    has_begun, may_go_on = threading.Event(), threading.Event()

    def hang(*args: Any) -> None:
        has_begun.set()
        assert may_go_on.wait(PATIENCE_S)
        write_at(*args)

    first = kit.write(0)
    while not first.is_done:
        pass
    monkeypatch.setattr(slab_writer, "write_at", hang)
    second, third = kit.write(1), kit.write(2)
    assert has_begun.wait(PATIENCE_S)
    assert not kit.writer.close(0.01)
    assert kit.found(0, 1, 2) == [0]
    assert not second.is_done, "it still reads its records"
    may_go_on.set()
    assert kit.writer.close(PATIENCE_S)
    assert third.is_done
    assert not third.places
    assert kit.found(0, 1, 2) in ([0], [0, 1])
