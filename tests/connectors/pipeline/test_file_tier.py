"""What the scheduler side orders to be written to files, and to be read from there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from slab_kit import SPACE, block_hash

from interlace.connectors.pipeline.host_index import HostIndex
from interlace.connectors.pipeline.messages import MappedRecords, StoreOrder
from interlace.connectors.pipeline.sched_files import FileTier
from interlace.connectors.pipeline.sched_stats import Counter
from interlace.connectors.slab_store.catalog import Catalog, Place
from interlace.connectors.slab_store.layout import NO_PARENT, Entry
from interlace.connectors.slab_store.lookup import StoredBlocks
from interlace.layers.virtual_lanes import VirtualLanes


@dataclasses.dataclass
class World:
    index: HostIndex
    counter: Counter
    files: FileTier
    looking: VirtualLanes

    def save(self, *numbers: int) -> None:
        """A save has brought these to memory."""
        hashes = [block_hash(number) for number in numbers]
        records = self.index.allocate(len(hashes))
        assert records is not None
        self.index.store(records, hashes, None)
        self.offer(*numbers)

    def offer(self, *numbers: int) -> None:
        self.files.offer([block_hash(number) for number in numbers], None)

    def orders(self) -> list[tuple[StoreOrder, list[int]]]:
        """New ones, and the numbers of their blocks."""
        return [
            (order, [int.from_bytes(part.block_hash, "big") for part in order.parts])
            for order in self.files.take_orders()
        ]

    def end(self, order: StoreOrder, *, is_written: bool) -> None:
        records = frozenset(part.record for part in order.parts)
        self.files.end_stores(frozenset([order.store_id]), frozenset() if is_written else records)


def world(
    root: Path, *, num_records: int = 8, threshold: int = 1, keeps_in_memory: bool = True
) -> World:
    index, counter, looking = HostIndex(num_records), Counter(), VirtualLanes(0, "lazy")
    stored = StoredBlocks(Catalog(root, SPACE), looking.lane("look"), threshold=threshold)
    files = FileTier(stored, index, counter, keeps_in_memory=keeps_in_memory)
    return World(index, counter, files, looking)


def test_an_order_that_was_dropped_is_made_again_at_the_next_use(tmp_path: Path) -> None:
    one = world(tmp_path, threshold=2)
    one.save(0)
    assert one.orders() == []
    one.offer(0)
    ((order, numbers),) = one.orders()
    assert numbers == [0]
    one.end(order, is_written=False)
    one.offer(0)
    ((order, numbers),) = one.orders()
    assert numbers == [0]
    one.end(order, is_written=True)
    one.offer(0)
    assert one.orders() == [], "no look has found it yet, and its uses are counted anew"


def test_what_waits_too_long_a_queue_is_ordered_at_the_next_use(tmp_path: Path) -> None:
    """A quarter of all records may wait to be written."""
    one = world(tmp_path, threshold=2)
    one.save(0, 1, 2)
    one.offer(0, 1, 2)
    ((order, numbers),) = one.orders()
    assert numbers == [0, 1]
    stats = one.counter.take()
    assert stats is not None
    assert stats.data == {"stores_dropped": 1}
    one.end(order, is_written=True)
    one.offer(2)
    ((_, numbers),) = one.orders()
    assert numbers == [2]


# -------------------------------------------------------------------- files alone


def test_what_was_saved_stays_in_memory_until_it_is_found_in_its_file(tmp_path: Path) -> None:
    one = world(tmp_path, keeps_in_memory=False)
    one.save(0, 1)
    ((order, numbers),) = one.orders()
    assert numbers == [0, 1]
    one.end(order, is_written=True)
    assert one.index.num_stored == 2
    one.looking.drain()
    one.files.refresh()  # a look that was begun before may not find it, so another one is begun
    one.looking.drain()
    one.files.refresh()
    assert (one.index.num_stored, one.index.num_free) == (0, 8)


def test_what_is_dropped_stays_nowhere(tmp_path: Path) -> None:
    """By the disk, and by the queue."""
    one = world(tmp_path, keeps_in_memory=False)
    one.save(0, 1, 2)
    ((order, numbers),) = one.orders()
    assert numbers == [0, 1]
    assert one.index.num_stored == 2
    one.end(order, is_written=False)
    assert (one.index.num_stored, one.index.num_free) == (0, 8)


def test_where_nothing_stays_in_memory_uses_are_computations(tmp_path: Path) -> None:
    one = world(tmp_path, keeps_in_memory=False, threshold=2)
    one.save(0)
    assert one.orders() == []
    assert one.index.num_stored == 0
    one.save(0)
    ((_, numbers),) = one.orders()
    assert numbers == [0]


def test_a_load_reads_what_is_being_written_to_the_end(tmp_path: Path) -> None:
    one = world(tmp_path, keeps_in_memory=False)
    one.save(0)
    ((order, _),) = one.orders()
    taken = one.files.take([block_hash(0)])
    one.end(order, is_written=False)
    assert one.index.num_stored == 0
    assert one.index.num_free == 7, "the load has it"
    one.index.unpin(list(taken.records.values()))
    assert one.index.num_free == 8


def test_a_reset_while_something_is_written(tmp_path: Path) -> None:
    one = world(tmp_path, keeps_in_memory=False)
    one.save(0)
    ((order, _),) = one.orders()
    one.index.clear()
    one.files.forget()
    one.save(0)
    assert one.orders() == [], "it is being written still"
    one.end(order, is_written=True)
    for _ in range(3):
        one.looking.drain()
        one.files.refresh()
    assert (one.index.num_stored, one.index.num_free) == (0, 8)


# -------------------------------------------------------------------- registered slabs


class Stub:
    """Places of blocks, for a tier that asks and uses."""

    def __init__(self, places: dict[bytes, Place]) -> None:
        self.finder = places.get
        self.used: list[Place] = []

    def use_places(self, places: Iterable[Place]) -> None:
        self.used += places

    def places(self, block_hashes: Sequence[bytes]) -> list[Place]:
        found = [place for place in map(self.finder, block_hashes) if place is not None]
        assert len(found) == len(block_hashes)
        return found


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_what_is_found_at_once_is_what_is_found_one_by_one(data: st.DataObject) -> None:
    """And a load of it, of all or of the first ones, takes the same."""
    slabs: list[Any] = [SimpleNamespace(name=f"slab{n}") for n in range(3)]
    wheres = data.draw(st.lists(st.sampled_from([0, 0, 0, 1, 2, None]), max_size=12))
    places = {
        block_hash(n): Place(slabs[where], Entry(n, block_hash(n), NO_PARENT, 7 * n, 1))
        for n, where in enumerate(wheres)
        if where is not None
    }
    index, stub = HostIndex(8), Stub(places)
    stored: Any = stub
    tier = FileTier(stored, index, Counter())
    num_mapped = data.draw(st.integers(0, 3))
    tier.note_mapped(
        MappedRecords(slab.name, 100 * (n + 1), data.draw(st.integers(0, 12)))
        for n, slab in enumerate(slabs[:num_mapped])
    )
    in_memory = data.draw(st.sets(st.integers(0, 11), max_size=2))
    hashes = [block_hash(n) for n in range(len(wheres) + 1)]
    if in_memory:
        records = index.allocate(len(in_memory))
        assert records is not None
        index.store(records, [block_hash(n) for n in sorted(in_memory)], None)
    found = tier.look_up(hashes)
    one_by_one = tier._look_up_anywhere(hashes)
    assert found == one_by_one
    wanted = hashes[: data.draw(st.integers(0, found.num_blocks))]
    taken = tier.take(wanted, found.at_hand)
    assert set(taken.records) | set(taken.missing) == set(wanted)
    assert taken.mapped == {
        record: places[one] for one, record in found.at_hand.records.items() if one in wanted
    }
    assert all(place in stub.used for place in taken.mapped.values())
    pinned = {one for one in wanted if one in index.records}
    assert pinned.isdisjoint(taken.fetched)
    assert set(taken.records) == pinned | set(taken.fetched) | (
        found.at_hand.records.keys() & set(wanted)
    )
