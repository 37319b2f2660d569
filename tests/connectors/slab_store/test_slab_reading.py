"""Records that are read on lanes: right bytes, damage, lanes that hang, buffers, the end."""

from __future__ import annotations

import dataclasses
import os
import random
import threading
from pathlib import Path

import numpy as np
import pytest
from slab_kit import (
    PATIENCE_S,
    RECORD_BYTES,
    SPACE,
    WritingKit,
    block_hash,
    header,
    record,
)

from interlace.connectors.slab_store import slab as slab_module
from interlace.connectors.slab_store.files import read_at
from interlace.connectors.slab_store.layout import DamagedSlabError
from interlace.connectors.slab_store.reading import KnownSlabs, Read, ReadCounts, Reads
from interlace.connectors.slab_store.slab import Slab
from interlace.connectors.slab_store.slab_writer import NewRecord, SlabWriter
from interlace.connectors.slab_store.space import Space
from interlace.connectors.slab_store.writing import StoredPlace
from interlace.engine.errors import ConnectorError
from interlace.layers.lanes import ThreadLanes
from interlace.layers.virtual_lanes import VirtualLanes

Buffer = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Stored:
    """Records on the disk, and who reads them."""

    def __init__(self, root: Path, count: int = 7, *, num_lanes: int = 2) -> None:
        kit = WritingKit(root, ThreadLanes().lane("write"))
        self.write = kit.write(*range(count))
        assert kit.writer.close(PATIENCE_S)
        self.places = list(self.write.places)
        self.folder = kit.folder
        self.now_s = 0.0
        self.slabs = KnownSlabs(kit.folder)
        self.reads = Reads(
            self.slabs, ThreadLanes(), num_lanes=num_lanes, deadline_s=5, clock=lambda: self.now_s
        )

    def read(self, place: StoredPlace) -> tuple[Read, Buffer]:
        buffer = np.full(RECORD_BYTES, 0xEE, np.uint8)
        return self.reads.read(place, buffer), buffer

    def ended(self, place: StoredPlace) -> tuple[Read, Buffer]:
        one, buffer = self.read(place)
        assert one._gate is not None
        assert one._gate.wait(PATIENCE_S)
        assert one.is_done
        assert one.is_settled
        return one, buffer

    @property
    def path(self) -> Path:
        return self.folder / self.places[0].slab


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path)


def test_all_come_back(stored: Stored) -> None:
    taken = [stored.read(place) for place in stored.places]
    for number, (one, buffer) in enumerate(taken):
        assert one._gate is not None
        assert one._gate.wait(PATIENCE_S)
        assert one.error is None
        assert np.array_equal(buffer, record(number).data)
    assert stored.reads.is_idle
    assert stored.reads.close(PATIENCE_S)


@pytest.mark.parametrize("seed", range(10))
def test_in_any_order(seed: int, tmp_path: Path) -> None:
    stored = Stored(tmp_path)
    lanes = VirtualLanes(seed)
    reads = Reads(stored.slabs, lanes, num_lanes=3, deadline_s=5, clock=lambda: 0.0)
    buffers = [np.empty(RECORD_BYTES, np.uint8) for _ in stored.places]
    taken = [reads.read(*pair) for pair in zip(stored.places, buffers, strict=True)]
    lanes.drain()
    assert [one.error for one in taken] == [None] * 7
    for number, buffer in enumerate(buffers):
        assert np.array_equal(buffer, record(number).data)
    assert reads.is_idle


def test_what_is_not_what_it_was_fails(stored: Stored) -> None:
    first, second = stored.places[:2]
    cases = {
        "another checksum": first._replace(checksum=first.checksum ^ 1),
        "another record": first._replace(record=second.record),
        "behind the end": first._replace(record=99),
        "no such slab": first._replace(slab="0000-00.slab"),
    }
    for what, place in cases.items():
        one, _ = stored.ended(place)
        assert isinstance(one.error, DamagedSlabError | OSError), what
    one, buffer = stored.ended(second)
    assert one.error is None
    assert np.array_equal(buffer, record(1).data)


def test_records_of_another_size_are_not_read(stored: Stored) -> None:
    one = stored.reads.read(stored.places[0], np.empty(RECORD_BYTES + 1, np.uint8))
    assert one._gate is not None
    assert one._gate.wait(PATIENCE_S)
    assert isinstance(one.error, DamagedSlabError)
    assert "another size" in str(one.error)


def test_a_slab_that_others_removed_cannot_be_read_and_is_kept_by_nobody(stored: Stored) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    assert stored.ended(stored.places[0])[0].error is None
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    stored.path.unlink()
    one, _ = stored.ended(stored.places[1])
    assert isinstance(one.error, FileNotFoundError)
    assert stored.reads.counts == ReadCounts(late=0, damaged=0, failed=1)


def test_a_lane_that_hangs_is_given_up_and_its_buffers_stay_out_of_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = Stored(tmp_path, num_lanes=1)
    has_begun, may_go_on = threading.Event(), threading.Event()

    def hang(fd: int, buffer: memoryview, offset: int) -> int:
        if len(buffer) == RECORD_BYTES:
            has_begun.set()
            assert may_go_on.wait(PATIENCE_S)
        return read_at(fd, buffer, offset)

    monkeypatch.setattr(slab_module, "read_at", hang)
    first, first_buffer = stored.read(stored.places[0])
    second, second_buffer = stored.read(stored.places[1])
    assert has_begun.wait(PATIENCE_S)
    stored.now_s = 4.9
    stored.reads.poll()
    assert not first.is_done
    stored.now_s = 5.0
    stored.reads.poll()
    for one in (first, second):
        assert isinstance(one.error, ConnectorError)
        assert "nothing was read for 5 s" in str(one.error)
    assert (first.is_settled, second.is_settled) == (False, True)
    assert not stored.reads.is_idle
    monkeypatch.setattr(slab_module, "read_at", read_at)
    third, buffer = stored.ended(stored.places[2])
    assert third.error is None, "on a fresh lane"
    assert np.array_equal(buffer, record(2).data)
    assert not stored.reads.close(0.0)
    may_go_on.set()
    assert first._gate is not None
    assert first._gate.wait(PATIENCE_S)
    assert first.is_settled
    assert first.error is not None, "late is late"
    assert stored.reads.counts == ReadCounts(late=2, damaged=0, failed=0), "and counts once"
    assert np.array_equal(first_buffer, record(0).data), "and that is why it had to stay"
    assert set(second_buffer.tolist()) == {0xEE}
    assert stored.reads.close(PATIENCE_S)


def test_after_the_end_nothing_is_read(stored: Stored) -> None:
    assert stored.reads.close(PATIENCE_S)
    one, buffer = stored.read(stored.places[0])
    assert one.is_done
    assert one.error is not None
    assert set(buffer.tolist()) == {0xEE}


# ---------------------------------------------------------------- many at once


PAGED = dataclasses.replace(SPACE, page_bytes=4096)
"""Records of whole pages lie one behind the other."""


@pytest.mark.parametrize("space", [SPACE, PAGED])
@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_all_of_many_come_back_whatever_their_order(
    seed: int, checks: bool, space: Space, tmp_path: Path
) -> None:
    draw, generator = random.Random(seed), np.random.default_rng(seed)
    shape = (40, space.record_bytes)
    content = generator.integers(0, 256, shape, np.uint8)
    places: list[StoredPlace] = []
    for part in np.array_split(np.arange(40), 3):
        writer = SlabWriter.create(tmp_path, header(14, space))
        entries = writer.add([NewRecord(block_hash(i), None, content[i]) for i in part.tolist()])
        writer.close()
        places += [StoredPlace(writer.path.name, one.record, one.checksum) for one in entries]
    order = list(range(40))
    if seed:
        draw.shuffle(order)
    buffers = np.full(shape, 0xEE, np.uint8)
    lanes = VirtualLanes(seed)
    reads = Reads(KnownSlabs(tmp_path), lanes, num_lanes=3, deadline_s=5, checks=checks)
    taken = reads.read_all([(places[i], buffers[i]) for i in order])
    lanes.drain()
    assert [one.error for one in taken] == [None] * 40
    assert np.array_equal(buffers, content)


@pytest.mark.parametrize("checks", [True, False])
def test_of_many_the_damaged_ones_fail(checks: bool, tmp_path: Path) -> None:
    """A file that was cut off within a record, and one that has gone."""
    content = np.random.default_rng(1).integers(0, 256, (12, PAGED.record_bytes), np.uint8)
    places: list[StoredPlace] = []
    paths: list[Path] = []
    for first in (0, 4, 8):
        writer = SlabWriter.create(tmp_path, header(4, PAGED))
        new = [NewRecord(block_hash(first + i), None, content[first + i]) for i in range(4)]
        places += [
            StoredPlace(writer.path.name, one.record, one.checksum) for one in writer.add(new)
        ]
        paths.append(writer.path)
        writer.close()
    slabs = KnownSlabs(tmp_path)
    for place in places:
        slabs.get(place.slab)
    with Slab.open(paths[1]) as slab:
        os.truncate(paths[1], slab.header.shape.record_at(2) + 100)
    paths[2].unlink()
    buffers = np.full(content.shape, 0xEE, np.uint8)
    lanes = VirtualLanes(0)
    reads = Reads(slabs, lanes, num_lanes=2, deadline_s=5, checks=checks)
    taken = reads.read_all(list(zip(places, buffers, strict=True)))
    lanes.drain()
    kinds = [type(one.error) for one in taken]
    assert kinds == [type(None)] * 6 + [DamagedSlabError] * 2 + [FileNotFoundError] * 4
    assert np.array_equal(buffers[:6], content[:6])


def test_nothing_is_read_of_nothing(stored: Stored) -> None:
    assert stored.reads.read_all([]) == []
    assert stored.reads.is_idle
