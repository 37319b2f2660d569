"""The queue of reads, driven by hand in any order: who takes what, and what becomes of the rest."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from interlace.connectors.slab_store.layout import DamagedSlabError
from interlace.connectors.slab_store.read_queue import Read, ReadCounts, Reader, ReadQueue
from interlace.connectors.slab_store.writing import StoredPlace
from interlace.engine.errors import LaneFullError
from interlace.layers.virtual_lanes import VirtualLanes

NUM_READERS = 3
DEADLINE_S = 5
BUFFER = np.zeros(1, np.uint8)


class Machine(RuleBasedStateMachine):
    """What lanes do is done here step by step, so that anything may come in between."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.queue = ReadQueue(NUM_READERS, lambda: self.now_s)
        self.lanes = VirtualLanes(0)
        self.readers = [self.reader() for _ in range(NUM_READERS)]
        self.pumps: list[Reader] = []
        """That take until nothing comes, those that were given up among them."""
        self.given_up: list[Reader] = []
        self.reads: list[Read] = []
        self.since_s: dict[Read, float] = {}
        self.taken: set[Read] = set()
        self.is_closed = False

    def reader(self) -> Reader:
        return Reader(self.lanes.lane("read"))

    def start(self) -> None:
        started = self.queue.start(self.readers)
        assert not {*started} & {*self.pumps}, "one pump each"
        self.pumps += started

    @rule(records=st.lists(st.integers(0, 9), min_size=1, max_size=12), most=st.integers(1, 4))
    def add(self, records: list[int], most: int) -> None:
        wanted = [(StoredPlace("slab", record, 0), BUFFER) for record in sorted(records)]
        reads = self.queue.add(wanted, most)
        self.reads += reads
        self.since_s |= dict.fromkeys(reads, self.now_s)
        self.start()
        assert self.is_closed == all(one.is_settled and one.error is not None for one in reads)

    @rule(data=st.data(), is_damaged=st.booleans())
    @precondition(lambda self: self.pumps)
    def take(self, data: st.DataObject, is_damaged: bool) -> None:
        reader = data.draw(st.sampled_from(self.pumps))
        before = [part.read for part in reader.taken]
        if is_damaged and before:
            before[0].fail(DamagedSlabError("damaged"))
        parts = self.queue.take(reader)
        assert all(one.is_settled for one in before)
        reads = [part.read for part in parts]
        assert not self.taken & {*reads}, "each is read once"
        assert not any(one.is_done for one in reads)
        first = reads[0].place.record if reads else 0
        assert [one.place.record for one in reads] == [first + i for i in range(len(reads))]
        assert len({part.order for part in parts}) <= 1
        assert all(len(parts) <= part.order.most for part in parts)
        self.taken |= {*reads}
        if reader in self.given_up:
            assert not reads, "a lane that hung takes nothing more"
        if not reads:
            self.pumps.remove(reader)

    @rule(data=st.data())
    @precondition(lambda self: self.reads)
    def cancel(self, data: st.DataObject) -> None:
        read = data.draw(st.sampled_from(self.reads))
        was_done = read.is_done
        read.cancel()
        assert read.is_done
        assert was_done or read.is_settled == (read not in self.taken)

    @rule(seconds=st.integers(1, 6))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds
        late = self.queue.give_up(self.readers, DEADLINE_S)
        for reader in late:
            assert reader.since_s <= self.now_s - DEADLINE_S
            assert all(part.read.error is not None for part in reader.taken)
            self.readers[self.readers.index(reader)] = self.reader()
        self.given_up += late
        if late:
            for read, since_s in self.since_s.items():
                assert since_s > self.now_s - DEADLINE_S or read.is_done or read in self.taken
            self.start()

    @rule(data=st.data())
    @precondition(lambda self: self.pumps)
    def refuse(self, data: st.DataObject) -> None:
        """Its lane did not take the work."""
        reader = data.draw(st.sampled_from(self.pumps))
        if not reader.taken and reader not in self.given_up:
            self.pumps.remove(reader)
            self.queue.refuse(reader, self.readers, LaneFullError("full"))

    @rule()
    @precondition(lambda self: len(self.reads) > 30)
    def close(self) -> None:
        self.is_closed = True
        self.queue.close()

    @invariant()
    def buffers_in_use_are_not_settled(self) -> None:
        for reader in self.pumps:
            assert not any(part.read.is_settled for part in reader.taken)

    @invariant()
    def what_waits_will_be_taken(self) -> None:
        waits = any(not one.is_settled and one not in self.taken for one in self.reads)
        assert not waits or any(reader in self.pumps for reader in self.readers)
        assert not waits or not self.is_closed

    @invariant()
    def each_is_counted_once(self) -> None:
        self.check_counts(may_be_under_way=True)

    def check_counts(self, *, may_be_under_way: bool) -> None:
        failed = [one for one in self.reads if one.error is not None and not one.is_cancelled]
        settled = [one for one in failed if one.is_settled]
        assert len(settled) <= sum(self.queue.counts) <= len(failed)
        assert may_be_under_way or len(settled) == len(failed)

    def teardown(self) -> None:
        while self.pumps:
            if not self.queue.take(self.pumps[0]):
                del self.pumps[0]
        assert self.queue.is_idle([*self.readers, *self.given_up])
        assert all(one.is_settled for one in self.reads)
        self.check_counts(may_be_under_way=False)


TestReadQueue = Machine.TestCase
TestReadQueue.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_what_is_counted() -> None:
    queue = ReadQueue(1, lambda: 0.0)
    reader = Reader(VirtualLanes(0).lane("read"))
    reads = queue.add([(StoredPlace("slab", i, 0), BUFFER) for i in range(4)], 1)
    assert queue.start([reader]) == [reader]
    assert queue.start([reader]) == []
    for error in (None, DamagedSlabError("damaged"), OSError("broken")):
        (part,) = queue.take(reader)
        if error is not None:
            part.read.fail(error)
    queue.close()
    assert not queue.take(reader)
    assert [one.error is None for one in reads] == [True, False, False, False]
    assert queue.counts == ReadCounts(late=0, damaged=1, failed=2)


class OpenLock:
    """A lock; `then` is done once, by the same thread, as soon as it is let go of."""

    def __init__(self, then: Callable[[], None]) -> None:
        self.then: Callable[[], None] | None = then

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        then, self.then = self.then, None
        if then is not None:
            then()


def test_what_comes_just_when_a_reader_goes_to_rest_wakes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = ReadQueue(1, lambda: 0.0)
    reader = Reader(VirtualLanes(0).lane("read"))
    wanted = [(StoredPlace("slab", 0, 0), BUFFER)]
    started: list[Reader] = []

    def ask() -> None:
        queue.add(wanted, 1)
        started.extend(queue.start([reader]))

    ask()
    assert len(queue.take(reader)) == 1
    started.clear()
    monkeypatch.setattr(queue, "_lock", OpenLock(ask))
    queue.take(reader)
    assert started == [reader]
    assert len(queue.take(reader)) == 1
