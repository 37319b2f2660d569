"""Records: who gets which, which go first, and that neighbours stay together while they can."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from interlace.connectors.pipeline.host_index import HostIndex
from interlace.connectors.pipeline.messages import RecordRun
from interlace.connectors.pipeline.sched_extents import FreeExtents
from interlace.connectors.pipeline.sched_recency import Recency
from interlace.connectors.pipeline.sched_runs import record_runs


def named(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def prefix(name: str, length: int) -> list[bytes]:
    return [f"{name}{i}".encode() for i in range(length)]


def store(index: HostIndex, hashes: list[bytes], parent: bytes | None = None) -> list[int]:
    """Save a run behind `parent`."""
    records = index.allocate(
        len(hashes), after=None if parent is None else index.find(parent), keep=frozenset(hashes)
    )
    assert records is not None
    index.store(records, hashes, parent)
    return records


class TestNeighbours:
    def test_an_empty_index_gives_runs_of_neighbours(self) -> None:
        index = HostIndex(1000)
        assert index.allocate(100) == list(range(100))

    def test_each_prefix_grows_in_an_extent_of_its_own(self) -> None:
        index = HostIndex(1024)
        first = store(index, prefix("a", 3))
        second = store(index, prefix("b", 3))
        assert second[0] == 64
        more = index.allocate(80, after=first[-1])
        assert more is not None
        assert more[:61] == list(range(3, 64))  # the rest of its extent
        assert more[61:] == list(range(128, 147))  # then the next free one

    def test_growing_goes_on_into_the_next_extent(self) -> None:
        index = HostIndex(1024)
        first = store(index, prefix("a", 64))
        assert index.allocate(2, after=first[-1]) == [64, 65]

    def test_when_whole_extents_have_gone_parts_of_others_are_used(self) -> None:
        index = HostIndex(256)
        for name in "abcdefgh":
            store(index, prefix(name, 2))
        assert index.num_free == 256 - 16
        assert index.allocate(31) == [*range(2, 32), 34]

    def test_extents_that_were_let_go_from_the_tail_on_are_one_run(self) -> None:
        """As a prefix lets go of them. Only as many as are wanted: the others stay together."""
        index = HostIndex(640)
        for name in "abcdefghij":
            store(index, prefix(name, 64))
        for name in "fedcb":
            for block_hash in prefix(name, 64):
                record = index.find(block_hash)
                assert record is not None
                index.forget(record)
        assert index.allocate(100) == list(range(256, 356))
        assert index.allocate(192) == [*range(64, 256)]
        assert index.allocate(28) == list(range(356, 384))

    @pytest.mark.parametrize(
        ("num_records", "size"), [(1, 1), (7, 1), (100, 8), (256, 32), (512, 64)]
    )
    def test_a_small_memory_has_smaller_extents(self, num_records: int, size: int) -> None:
        extents = FreeExtents(num_records)
        assert extents.extent_size == size
        assert sorted(extents.take(num_records, None)) == list(range(num_records))
        assert len(extents) == 0


class TestEviction:
    def test_the_least_recently_used_go_first(self) -> None:
        index = HostIndex(3)
        for name in "abc":
            store(index, named(name))
        index.touch(named("a"))
        store(index, named("d"))
        assert [name in index for name in named("a", "b", "c", "d")] == [True, False, True, True]
        assert index.num_evicted == 1

    def test_the_tail_of_a_prefix_goes_before_its_head(self) -> None:
        index = HostIndex(6)
        store(index, prefix("a", 2))
        store(index, prefix("a", 6)[2:], parent=b"a1")  # stored later, and used later
        for length in range(6, 0, -1):
            assert [name in index for name in prefix("a", 6)] == [i < length for i in range(6)]
            assert index.allocate(1) is not None

    def test_a_touched_prefix_loses_its_tail_first(self) -> None:
        index = HostIndex(6)
        store(index, prefix("a", 3))
        store(index, prefix("b", 3))
        index.touch(prefix("a", 3))
        index.allocate(4)
        assert [name in index for name in prefix("a", 3)] == [True, True, False]

    def test_extents_go_as_wholes_if_all_of_them_is_old(self) -> None:
        index = HostIndex(320)
        for name in "abcdefghij":
            store(index, prefix(name, 32))
        index.touch(prefix("b", 32))
        records = index.allocate(40)
        assert records == [*range(32), *range(64, 72)]
        assert index.num_free == 24

    def test_a_record_that_is_used_keeps_its_extent(self) -> None:
        index = HostIndex(256)
        for name in "abcdefgh":
            store(index, prefix(name, 32))
        index.touch(prefix("a", 1))
        assert index.allocate(32) == list(range(32, 64))
        assert b"a0" in index

    def test_what_is_kept_does_not_go(self) -> None:
        index = HostIndex(4)
        store(index, prefix("a", 2))
        store(index, prefix("b", 2))
        assert index.allocate(2, keep=frozenset(prefix("a", 2))) is not None
        assert [name in index for name in named("a0", "a1", "b0", "b1")] == [True, True] + [
            False
        ] * 2

    def test_without_room_nothing_changes(self) -> None:
        index = HostIndex(4)
        assert index.allocate(2) is not None
        store(index, prefix("a", 2))
        index.pin(named("a0"))
        assert index.allocate(2) is None
        assert index.allocate(5) is None
        assert all(name in index for name in prefix("a", 2))
        assert index.num_evicted == 0


class TestPins:
    def test_a_pinned_record_stays_until_the_last_load_lets_go(self) -> None:
        index = HostIndex(1)
        store(index, named("a"))
        index.pin(named("a"))
        records = index.pin(named("a"))
        index.unpin(records)
        assert index.allocate(1) is None
        index.unpin(records)
        assert index.allocate(1) == [0]

    def test_a_forgotten_pinned_record_is_free_only_then(self) -> None:
        index = HostIndex(2)
        store(index, named("a", "b"))
        records = index.pin(named("a"))
        index.clear()
        assert index.num_stored == 0
        assert index.num_free == 1
        index.forget(records[0])
        index.unpin(records)
        assert index.num_free == 2

    def test_given_up_records_are_free(self) -> None:
        index = HostIndex(3)
        records = index.allocate(3)
        assert records is not None
        index.give_up(records)
        assert index.num_free == 3


class Machine(RuleBasedStateMachine):
    """Against sets. The order is checked as far as it is promised."""

    @property
    def bound(self) -> int:
        return 2 * FreeExtents(self.size).extent_size

    def __init__(self) -> None:
        super().__init__()
        self.size = 24
        self.index = HostIndex(self.size)
        self.pending: list[list[int]] = []
        self.stored: dict[bytes, int] = {}
        self.pins: list[tuple[list[bytes], list[int]]] = []
        self.num_made = 0

    def _pinned(self) -> set[int]:
        return {record for _, records in self.pins for record in records}

    @rule(num=st.integers(1, 8), data=st.data())
    def allocate(self, num: int, data: st.DataObject) -> None:
        after = data.draw(st.sampled_from([None, *self.stored.values()]))
        may_go = set(self.stored.values()) - self._pinned()
        free = self.index.num_free
        before = dict(self.stored)
        records = self.index.allocate(num, after=after)
        self.stored = {name: r for name, r in self.stored.items() if name in self.index}
        gone = before.keys() - self.stored.keys()
        if records is None:
            assert num > free + len(may_go)
            assert not gone
            return
        assert num <= free + len(may_go)
        assert {before[name] for name in gone} <= may_go
        assert len(set(records)) == num
        assert not gone if num <= free else len(gone) < num - free + self.bound
        self.pending.append(records)

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), is_copied=st.booleans())
    def end_save(self, data: st.DataObject, is_copied: bool) -> None:
        records = self.pending.pop(data.draw(st.integers(0, len(self.pending) - 1)))
        if not is_copied:
            self.index.give_up(records)
            return
        names = [f"{self.num_made}.{i}".encode() for i in range(len(records))]
        self.num_made += 1
        parent = data.draw(st.sampled_from([None, *self.stored]))
        self.index.store(records, names, parent)
        self.stored.update(zip(names, records, strict=True))

    @precondition(lambda self: self.stored)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.stored)), min_size=1, unique=True))
        self.pins.append((names, self.index.pin(names)))
        assert self.pins[-1][1] == [self.stored[name] for name in names]

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        _, records = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.index.unpin(records)

    @precondition(lambda self: self.stored)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        self.index.touch(data.draw(st.lists(st.sampled_from(sorted(self.stored)), unique=True)))

    @precondition(lambda self: self.stored)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.stored)))
        self.index.forget(self.stored.pop(name))

    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.stored.clear()

    @invariant()
    def every_record_is_in_one_state(self) -> None:
        pending = [record for records in self.pending for record in records]
        held = {*pending, *self.stored.values(), *self._pinned()}
        assert self.index.num_free == self.size - len(held)
        assert self.index.num_stored == len(self.stored)
        assert len(pending) == len(set(pending))
        assert not set(pending) & (set(self.stored.values()) | self._pinned())
        assert all(self.index.find(name) == record for name, record in self.stored.items())


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class TestRecency:
    def test_its_order(self) -> None:
        order = Recency(5)
        for number in (3, 1):
            order.add_run([number])
        order.add_run([4], than=1)
        order.add_run([0], than=3)
        assert list(order) == [0, 3, 4, 1]
        assert len(order) == 4
        assert [number in order for number in (2, 4)] == [False, True]
        order.remove(3)
        order.remove(1)
        assert list(order) == [0, 4]
        order.add_run([1, 3], than=0)
        assert list(order) == [3, 1, 0, 4]
        order.add_run([])
        order.remove(3)
        order.add_run([2, 3])
        assert list(order) == [1, 0, 4, 3, 2]
        assert len(order) == 5


def test_runs_are_neighbours_on_both_sides() -> None:
    assert record_runs([5, 6, 7, 9, 10, 11], [1, 2, 4, 5, 6, 8]) == (
        RecordRun(5, 1, 2),
        RecordRun(7, 4, 1),
        RecordRun(9, 5, 2),
        RecordRun(11, 8, 1),
    )
    assert record_runs([], []) == ()


def test_an_index_of_many_records_is_no_crowd_of_objects() -> None:
    """Who looks through all that a connector holds, as `interlace check` does, enters lists."""
    index = HostIndex(100_000)
    for part in (index, index._order, index._free):
        for held in vars(part).values():
            assert not isinstance(held, list | dict) or len(held) < 10_000
