"""Records that are read on lanes: right bytes, damage, lanes that hang, buffers, the end."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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
    until,
)

from interlace.connectors.slab_store import slab as slab_module
from interlace.connectors.slab_store.files import read_at
from interlace.connectors.slab_store.layout import DamagedSlabError
from interlace.connectors.slab_store.read_queue import Part, Read, ReadCounts
from interlace.connectors.slab_store.reading import KnownSlabs, Reads
from interlace.connectors.slab_store.slab import Slab
from interlace.connectors.slab_store.slab_writer import NewRecord, SlabWriter
from interlace.connectors.slab_store.space import Space
from interlace.connectors.slab_store.writing import StoredPlace
from interlace.engine.errors import ConnectorError, LaneClosedError, LaneFullError
from interlace.engine.ports import Lanes
from interlace.layers.lanes import ThreadLanes
from interlace.layers.virtual_lanes import VirtualGate, VirtualLane, VirtualLanes

Buffer = np.ndarray[tuple[int], np.dtype[np.uint8]]


def settled(*reads: Read, pause_s: float = 0.0002) -> None:
    """Wait for them, without asking who reads."""
    until(lambda: all(one.is_settled for one in reads), pause_s)


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
        settled(one)
        assert one.is_done
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
        settled(one)
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
    settled(one)
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
    settled(first)
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
    assert [one.error for one in taken[:6]] == [None] * 6
    assert all(isinstance(one.error, DamagedSlabError) for one in taken[6:8])
    assert all(isinstance(one.error, FileNotFoundError) for one in taken[8:])
    assert np.array_equal(buffers[:6], content[:6])


def test_nothing_is_read_of_nothing(stored: Stored) -> None:
    assert stored.reads.read_all([]) == []
    assert stored.reads.is_idle


# ---------------------------------------------------------------- lanes that share the work


class Shelf:
    """Many records of whole pages in one slab, and reads of it that a test may hold up. Nobody
    checks what is read, so that neighbours are read by one call."""

    def __init__(
        self,
        folder: Path,
        count: int,
        *,
        num_lanes: int,
        lanes: Lanes | None = None,
        checks: bool = False,
    ) -> None:
        shape = (count, PAGED.record_bytes)
        self.content = np.random.default_rng(count).integers(0, 256, shape, np.uint8)
        writer = SlabWriter.create(folder, header(count, PAGED))
        new = [NewRecord(block_hash(i), None, self.content[i]) for i in range(count)]
        name = writer.path.name
        self.places = [StoredPlace(name, e.record, e.checksum) for e in writer.add(new)]
        writer.close()
        self.buffers = np.full(shape, 0xEE, np.uint8)
        self.now_s = 0.0
        self.runs: list[list[int]] = []
        """Records of each call, as they began."""
        self.threads: list[threading.Thread] = []
        """Who made it."""
        self.held: dict[int, threading.Event] = {}
        """Calls for these records wait."""
        self.polls = True
        self.reads = HeldReads(
            KnownSlabs(folder),
            lanes or ThreadLanes(),
            num_lanes=num_lanes,
            deadline_s=5,
            checks=checks,
            clock=lambda: self.now_s,
        )
        self.reads.shelf = self

    def read(self, *records: int) -> list[Read]:
        return self.reads.read_all([(self.places[i], self.buffers[i]) for i in records])

    def hold(self, record: int) -> threading.Event:
        return self.held.setdefault(record, threading.Event())

    def begun(self, record: int) -> None:
        until(lambda: any(record in run for run in self.runs))

    def is_right(self, *records: int) -> bool:
        some = list(records)
        return np.array_equal(self.buffers[some], self.content[some])


class HeldReads(Reads):
    shelf: Shelf

    def poll(self) -> None:
        if self.shelf.polls:
            super().poll()

    def _read(self, run: Sequence[Part]) -> None:
        records = [part.read.place.record for part in run]
        self.shelf.threads.append(threading.current_thread())
        self.shelf.runs.append(records)
        for event in [self.shelf.held[i] for i in records if i in self.shelf.held]:
            assert event.wait(PATIENCE_S)
        super()._read(run)


@pytest.mark.parametrize("checks", [True, False])
def test_a_slow_call_holds_up_nobody_else(checks: bool, tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, 60, num_lanes=3, checks=checks)
    hold = shelf.hold(0)
    reads = shelf.read(*range(60))
    until(lambda: sum(not one.is_settled for one in reads) <= 8)
    (slow,) = (run for run in shelf.runs if 0 in run)
    others = [i for i in range(60) if i not in slow]
    settled(*(reads[i] for i in others))
    assert shelf.is_right(*others)
    assert [reads[i].is_done for i in slow] == [False] * len(slow)
    assert len(slow) == (1 if checks else 8)
    assert not shelf.reads.is_idle
    hold.set()
    until(lambda: shelf.reads.is_idle)
    assert all(one.is_settled for one in reads)
    assert shelf.is_right(*range(60))


def test_calls_become_small_towards_the_end(tmp_path: Path) -> None:
    lanes = VirtualLanes(0, "lazy")
    shelf = Shelf(tmp_path, 60, num_lanes=3, lanes=lanes)
    shelf.read(*range(60))
    lanes.drain()
    assert [len(run) for run in shelf.runs] == [8, 8, 8, 6, 5, 5, 4, 3, 3, 2, 2, *[1] * 6]
    assert [i for run in shelf.runs for i in run] == list(range(60)), "the first ones first"


def test_neighbours_may_come_backwards(tmp_path: Path) -> None:
    """As for a load from the back. What goes to and fro is several runs."""
    lanes = VirtualLanes(0, "lazy")
    shelf = Shelf(tmp_path, 30, num_lanes=1, lanes=lanes)
    reads = shelf.read(*reversed(range(20)), 25, 26, 25, 27, 29)
    lanes.drain()
    assert shelf.runs[0] == [19, 18, 17, 16, 15, 14, 13, 12]
    assert [i for run in shelf.runs for i in run] == [*reversed(range(20)), 25, 26, 25, 27, 29]
    assert all(abs(a - b) == 1 for run in shelf.runs for a, b in itertools.pairwise(run))
    assert [one.error for one in reads] == [None] * 25
    assert shelf.is_right(*range(20), 25, 26, 27, 29)


def test_a_slab_that_is_cut_off_fails_what_is_not_there_backwards_too(tmp_path: Path) -> None:
    lanes = VirtualLanes(0, "lazy")
    shelf = Shelf(tmp_path, 16, num_lanes=1, lanes=lanes)
    with Slab.open(tmp_path / shelf.places[0].slab) as slab:
        size = slab.header.shape.record_at(13)
    reads = shelf.read(*reversed(range(16)))
    shelf.reads._slabs.get(shelf.places[0].slab)  # before it is cut off: else it is not opened
    os.truncate(tmp_path / shelf.places[0].slab, size)
    lanes.drain()
    assert [one.error is None for one in reversed(reads)] == [True] * 13 + [False] * 3
    assert shelf.is_right(*range(13))


def test_no_call_reads_more_than_was_said(tmp_path: Path) -> None:
    lanes = VirtualLanes(0, "lazy")
    shelf = Shelf(tmp_path, 30, num_lanes=1, lanes=lanes)
    wanted = list(zip(shelf.places, shelf.buffers, strict=True))
    shelf.reads.read_all(wanted[:20], work_bytes=3 * PAGED.record_bytes + 1)
    shelf.reads.read_all(wanted[20:])
    lanes.drain()
    assert max(len(run) for run in shelf.runs if run[0] < 20) == 3
    assert not any({19, 20} <= set(run) for run in shelf.runs), "they were asked for apart"
    assert shelf.is_right(*range(30))


def test_no_more_lanes_are_woken_than_there_is_work(tmp_path: Path) -> None:
    lanes = VirtualLanes(0, "lazy")
    shelf = Shelf(tmp_path, 9, num_lanes=4, lanes=lanes)
    shelf.read(0, 1)
    assert lanes.pending == ["read#1", "read-2#1"]
    shelf.read(*range(2, 9))
    assert len(lanes.pending) == 4, "those that read already go on with it"
    lanes.drain()
    assert shelf.is_right(*range(9))


def test_polling_is_enough(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, 9, num_lanes=2, lanes=VirtualLanes(1))
    reads = shelf.read(*range(9))
    until(lambda: shelf.reads.is_idle)
    assert all(one.is_settled for one in reads)
    assert shelf.is_right(*range(9))


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns at any moment, and not after milliseconds."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before_s)


@pytest.mark.usefixtures("restless")
@pytest.mark.soak(quick=4, full=100)
def test_no_read_is_forgotten(seed: int, tmp_path: Path) -> None:
    """Lanes rest and start all the time. Nobody polls, which might start them again."""
    draw, shelf = random.Random(seed), Shelf(tmp_path, 6, num_lanes=draw_lanes(seed))
    shelf.polls = False
    for number in range(300):
        reads = shelf.read(*draw.sample(range(6), draw.randint(1, 6)))
        if draw.random() < 0.7:
            settled(*reads, pause_s=0.0)  # so the next ones come while the lanes go to rest
        elif draw.random() < 0.5:
            time.sleep(draw.random() * 1e-4)
        assert all(one.error is None for one in reads), number
    settled(*reads)
    shelf.polls = True
    until(lambda: shelf.reads.is_idle)
    assert shelf.reads.counts == ReadCounts(0, 0, 0)


def draw_lanes(seed: int) -> int:
    return 1 + seed % 4


@pytest.mark.usefixtures("restless")
@pytest.mark.soak(quick=4, full=100)
def test_the_buffer_of_a_cancelled_read_is_left_alone_once_it_is_settled(
    seed: int, tmp_path: Path
) -> None:
    draw, shelf = random.Random(seed), Shelf(tmp_path, 40, num_lanes=draw_lanes(seed))
    for _ in range(30):
        shelf.buffers[:] = 0xEE
        reads = shelf.read(*range(40))
        cancelled, ours = draw.sample(range(40), 20), list[int]()
        for i in cancelled:
            reads[i].cancel()
            if reads[i].is_settled:
                shelf.buffers[i] = 0x77
                ours.append(i)
        settled(*reads)
        until(lambda: shelf.reads.is_idle)
        assert (shelf.buffers[ours] == 0x77).all()
        assert shelf.is_right(*(set(range(40)) - set(cancelled)))
    assert shelf.reads.counts == ReadCounts(0, 0, 0), "nobody wanted them"


def test_what_is_cancelled_while_it_waits_is_settled_at_once_and_never_read(
    tmp_path: Path,
) -> None:
    shelf = Shelf(tmp_path, 6, num_lanes=1, checks=True)
    hold = shelf.hold(0)
    first, *others = shelf.read(*range(6))
    shelf.begun(0)
    for one in (first, others[0], others[2]):
        one.cancel()
        assert one.is_cancelled
        assert one.is_done
    assert [one.is_settled for one in (first, *others)] == [False, True, False, True, False, False]
    hold.set()
    settled(first, *others)
    until(lambda: shelf.reads.is_idle)
    assert [i for run in shelf.runs for i in run] == [0, 2, 4, 5]
    assert [one.error is None for one in others] == [False, True, False, True, True]
    assert (shelf.buffers[[1, 3]] == 0xEE).all()
    assert shelf.reads.counts == ReadCounts(0, 0, 0)


# ---------------------------------------------------------------- lanes that hang


def test_what_waited_as_long_is_late_too_and_what_came_later_is_read(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, 8, num_lanes=2)
    holds = [shelf.hold(0), shelf.hold(1)]
    early = shelf.read(0, 1, 2, 3)
    shelf.begun(0)
    shelf.begun(1)
    shelf.now_s = 1.0
    later = shelf.read(4, 5, 6)
    later[1].cancel()
    shelf.now_s = 4.9
    shelf.reads.poll()
    assert not any(one.is_done for one in (*early, later[0], later[2]))
    shelf.now_s = 5.0
    shelf.reads.poll()
    assert all("nothing was read for 5 s" in str(one.error) for one in early)
    assert [one.is_settled for one in early] == [False, False, True, True]
    settled(*later)
    assert [one.error is None for one in later] == [True, False, True]
    assert shelf.is_right(4, 6)
    assert not shelf.reads.is_idle, "two calls have not returned"
    assert shelf.reads.counts == ReadCounts(late=4, damaged=0, failed=0)
    for hold in holds:
        hold.set()
    settled(*early)
    until(lambda: shelf.reads.is_idle)
    assert all(one.error is not None for one in early), "late is late"
    assert shelf.reads.counts == ReadCounts(late=4, damaged=0, failed=0), "and counts once"


def test_each_call_has_its_own_deadline(tmp_path: Path) -> None:
    """A lane that gets on is not given up, however long it has been at it."""
    shelf = Shelf(tmp_path, 4, num_lanes=1, checks=True)
    holds = [shelf.hold(i) for i in range(4)]
    reads = shelf.read(*range(4))
    for number, hold in enumerate(holds):
        shelf.begun(number)
        shelf.now_s += 4.0
        shelf.reads.poll()
        hold.set()
    settled(*reads)
    assert [one.error for one in reads] == [None] * 4


def test_a_call_that_returns_late_is_its_lanes_last_one(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, 4, num_lanes=1)
    first_hold, second_hold = shelf.hold(0), shelf.hold(1)
    (first,) = shelf.read(0)
    shelf.begun(0)
    shelf.now_s = 5.0
    shelf.reads.poll()
    second, third = shelf.read(1, 2)
    shelf.begun(1)
    first_hold.set()
    settled(first)
    shelf.threads[0].join(PATIENCE_S)
    assert not shelf.threads[0].is_alive()
    assert shelf.runs == [[0], [1]], "it left alone what waits"
    second_hold.set()
    settled(second, third)
    assert (second.error, third.error) == (None, None)
    assert shelf.threads[1] is shelf.threads[2]


def test_a_lane_that_never_begins_is_given_up(tmp_path: Path) -> None:
    lanes = VirtualLanes(0, "lazy", polls_per_work=1_000)
    shelf = Shelf(tmp_path, 3, num_lanes=1, lanes=lanes)
    reads = shelf.read(*range(3))
    shelf.now_s = 5.0
    shelf.reads.poll()
    assert all(one.is_settled for one in reads)
    lanes.drain()
    assert shelf.runs == []
    assert shelf.reads.counts == ReadCounts(late=3, damaged=0, failed=0)


def test_closing_begins_nothing_more(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, 6, num_lanes=2)
    hold = shelf.hold(0)
    reads = shelf.read(0, 0, 1, 2, 3)
    until(lambda: len(shelf.runs) == 2)
    assert not shelf.reads.close(0.0)
    assert [one.is_settled for one in reads] == [False] * 2 + [True] * 3
    assert all(isinstance(one.error, LaneClosedError) for one in reads[2:])
    (after,) = shelf.read(4)
    assert isinstance(after.error, LaneClosedError)
    assert after.is_settled
    hold.set()
    settled(*reads)
    assert shelf.reads.close(PATIENCE_S)
    assert [one.error for one in reads[:2]] == [None] * 2
    assert shelf.runs == [[0], [0]]
    assert shelf.reads.counts == ReadCounts(late=0, damaged=0, failed=4)


# ---------------------------------------------------------------- lanes that take nothing


class RefusingLanes:
    """The first ones of them do not take work."""

    def __init__(
        self, num_refusing: int, error: Exception, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.lanes = VirtualLanes(0, "lazy")
        self.num_refusing = num_refusing
        self.error = error
        self.monkeypatch = monkeypatch

    def lane(self, name: str, *, max_pending: int = 1024) -> VirtualLane:
        lane = self.lanes.lane(name, max_pending=max_pending)
        if self.num_refusing:
            self.num_refusing -= 1
            self.monkeypatch.setattr(lane, "submit", self.refuse)
        return lane

    def refuse(self, work: Callable[[], None]) -> VirtualGate:
        raise self.error


ERRORS = [LaneFullError("full"), LaneClosedError("closed"), RuntimeError("can't start new thread")]


@pytest.mark.parametrize("error", ERRORS)
def test_where_no_lane_takes_work_reads_fail(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf(tmp_path, 5, num_lanes=2, lanes=RefusingLanes(2, error, monkeypatch))
    reads = shelf.read(*range(5))
    assert [one.error for one in reads] == [error] * 5
    assert all(one.is_settled for one in reads)
    assert shelf.reads.is_idle
    assert shelf.reads.counts == ReadCounts(late=0, damaged=0, failed=5)


@pytest.mark.parametrize("error", ERRORS)
def test_a_lane_that_takes_work_reads_it_all(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = RefusingLanes(1, error, monkeypatch)
    shelf = Shelf(tmp_path, 5, num_lanes=2, lanes=lanes)
    for _ in range(2):
        reads = shelf.read(*range(5))
        lanes.lanes.drain()
        assert [one.error for one in reads] == [None] * 5
        assert shelf.reads.is_idle
