"""The scheduler side of a store of files: what is fetched, and what is written there. Event loop.

Host memory stands in between. What is fetched goes to records of its own, and is stored in memory
when its load has ended. What a save has brought to memory is written from there; its records are
pinned until then.

If nothing is to stay in memory, what was fetched is forgotten when its load has ended, and what was
saved when it is found in its file, or is not written. Until then it is found in memory.
"""

from __future__ import annotations

import itertools
import operator
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from interlace.connectors.pipeline.host_index import HostIndex
from interlace.connectors.pipeline.messages import (
    Fetch,
    MappedRecords,
    PipelineReport,
    StoreOrder,
    StorePart,
)
from interlace.connectors.pipeline.sched_stats import Counter
from interlace.connectors.pipeline.sched_tier import (
    NOTHING_AT_HAND,
    AtHand,
    Mapped,
    MemoryTier,
    Stored,
    Taken,
    drops_of,
)
from interlace.connectors.slab_store.catalog import Place
from interlace.connectors.slab_store.lookup import StoredBlocks
from interlace.connectors.slab_store.writing import StoredPlace
from interlace.engine.transfer_picture import TierPicture

_SLAB = operator.attrgetter("slab")
_RECORD = operator.attrgetter("entry.record")
"""Of a place."""
_SHARE_OF_RECORDS = 4
"""No more than this part of all records waits to be written, and no load fetches more."""
_LONGEST_ORDER = 64
"""Blocks of one order."""
_DROPS = {
    "stores_dropped": "too many wait",
    "writes_dropped_queue_full": "queue full",
    "writes_dropped_no_room": "no room",
    "writes_dropped_error": "write failed",
    "fetches_missed": "gone",
    "reads_late": "read late",
    "reads_damaged": "damaged",
    "reads_failed": "read failed",
}
"""`PipelineStats`' names -> reasons, for people."""
_MOST_PROMPTS = 4096
"""Whose first tokens are remembered until they are written."""


class FileTier(MemoryTier):
    """See the module's docstring, and `MemoryTier` for what the methods are for."""

    def __init__(
        self,
        stored: StoredBlocks,
        index: HostIndex,
        counter: Counter,
        *,
        keeps_in_memory: bool = True,
    ) -> None:
        """Takes records from `index`, and puts blocks into it; `keeps_in_memory`: to stay."""
        super().__init__(index)
        self._stored = stored
        self._keeps_in_memory = keeps_in_memory
        self._counter = counter
        self._most_of_load = self._most_open = max(1, index.num_records // _SHARE_OF_RECORDS)
        self._mapped: dict[str, MappedRecords] = {}  # by slab
        self._closed: set[str] = set()
        self._open_fetches: dict[int, tuple[bytes, Place]] = {}
        """Records that blocks are being read into -> the block, and where it lies."""
        self._void: set[int] = set()  # records of those that are not to be stored in memory
        self._orders: list[StoreOrder] = []
        self._open: dict[int, StoreOrder] = {}
        self._being_written: set[int] = set()
        """Records of these; a block has one, and is written once."""
        self._leaving: set[bytes] = set()
        """Blocks that were written, and stay in memory until they are found in their file."""
        self._first_tokens: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        """Of prompts, by their first block's hash: for people who look at the files."""
        self._last_store_id = 0

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether the block lies in a file, as far as is known."""
        return block_hash in self._stored

    # ---------------------------------------------------------------- registered slabs

    def note_mapped(self, mapped: Iterable[MappedRecords], closing: Iterable[str] = ()) -> None:
        """The worker side has registered slabs; nothing more is ordered from `closing` ones."""
        self._mapped |= {one.slab: one for one in mapped}
        for name in closing:
            self._mapped.pop(name, None)
            self._closed.add(name)

    def take_closed(self) -> frozenset[str]:
        """See `MemoryTier`."""
        closed, self._closed = frozenset(self._closed), set()
        return closed

    def look_up(self, block_hashes: Sequence[bytes]) -> Stored:
        """How many of these, from the first on, are stored: in memory or in files. As far as is
        known, until the next report of the worker side."""
        if self._mapped and self._index.records.keys().isdisjoint(block_hashes):
            stored = self._look_up_mapped(block_hashes)
            if stored is not None:
                return stored
        return self._look_up_anywhere(block_hashes)

    def _look_up_mapped(self, block_hashes: Sequence[bytes]) -> Stored | None:
        """If all that is stored of these lies in registered slabs, as after a restart: much sooner
        than block by block. Else None."""
        places: list[Place] = []
        for place in map(self._stored.finder, block_hashes):
            if place is None:
                break
            places.append(place)
        records: list[int] = []
        for slab, of_it in itertools.groupby(places, _SLAB):
            of_slab = self._mapped.get(slab.name)
            numbers = list(map(_RECORD, of_it))
            if of_slab is None or max(numbers) >= of_slab.num_records:
                return None
            records += map(of_slab.first.__add__, numbers)
        mapped = dict(zip(records, places, strict=True))
        return Stored(
            len(places), 0, AtHand(dict(zip(block_hashes, records, strict=False)), mapped)
        )

    def _look_up_anywhere(self, block_hashes: Sequence[bytes]) -> Stored:
        most_fetched = self.most_fetched
        in_memory, find, slabs = self._index.records, self._stored.finder, self._mapped
        num_fetched = 0
        records: dict[bytes, int] = {}
        mapped: dict[int, Place] = {}
        at_hand = AtHand(records, mapped)
        for count, block_hash in enumerate(block_hashes):
            if block_hash in in_memory:
                continue
            place = find(block_hash)
            if place is None:
                return Stored(count, num_fetched, at_hand)
            slab, entry = place
            of_slab, record = slabs.get(slab.name), entry.record
            if of_slab is not None and record < of_slab.num_records:
                number = records[block_hash] = of_slab.first + record
                mapped[number] = place
            elif num_fetched == most_fetched:
                return Stored(count, num_fetched, at_hand)
            else:
                num_fetched += 1
        return Stored(len(block_hashes), num_fetched, at_hand)

    def settle_mapped(self, mapped: Mapped, damaged: Container[int]) -> None:
        """See `MemoryTier`."""
        for record, place in mapped.items():
            if record in damaged:
                self._stored.lose(place.entry.block_hash, place)
        self._counter.add("blocks_loaded_from_files", len(mapped))

    def refresh(self) -> None:
        """See `MemoryTier`."""
        self._stored.refresh()
        self._let_go_of_found()

    # ---------------------------------------------------------------- loads

    @property
    def most_fetched(self) -> int:
        """Blocks that one load may fetch now: a quarter of all records, and no more than half are
        fetched into at a time, so that others find some."""
        half = 2 * self._most_of_load - len(self._open_fetches)
        return max(0, min(self._most_of_load, half))

    def take(self, block_hashes: Sequence[bytes], at_hand: AtHand = NOTHING_AT_HAND) -> Taken:
        """See `MemoryTier`."""
        known = self._index.records
        are_all = len(at_hand.records) == len(block_hashes)  # mostly none or all, and sooner told
        if (
            are_all
            and at_hand.records.keys() == set(block_hashes)
            and known.keys().isdisjoint(block_hashes)
        ):
            self._stored.use_places(at_hand.mapped.values())
            return Taken(dict(at_hand.records), mapped=at_hand.mapped)
        in_memory = [block_hash for block_hash in block_hashes if block_hash in known]
        records = dict(zip(in_memory, self._index.pin(in_memory), strict=True))
        others = [one for one in block_hashes if one not in records]
        found = {one: at_hand.records[one] for one in others if one in at_hand.records}
        mapped = {record: at_hand.mapped[record] for record in found.values()}
        self._stored.use_places(mapped.values())
        records |= found
        wanted = [block_hash for block_hash in block_hashes if block_hash not in records]
        if not wanted:
            return Taken(records, mapped=mapped)
        places = self._stored.places(wanted)
        fresh = None if places is None else self._index.allocate(len(wanted))
        if fresh is None or places is None:
            self._counter.add("fetches_missed", len(wanted))
            return Taken(records, missing=tuple(wanted), mapped=mapped)
        records |= zip(wanted, fresh, strict=True)
        self._open_fetches.update(zip(fresh, zip(wanted, places, strict=True), strict=True))
        fetches = (
            Fetch(record, StoredPlace(slab.name, entry.record, entry.checksum))
            for record, (slab, entry) in zip(fresh, places, strict=True)
        )
        return Taken(records, tuple(fetches), tuple(wanted), mapped=mapped)

    def avoid(self, records: Iterable[int], mapped: Mapped) -> None:
        """See `MemoryTier`."""
        for record in records:
            if record in mapped:
                self._stored.avoid(mapped[record].entry.block_hash)
            elif (opened := self._open_fetches.get(record)) is not None:
                self._stored.avoid(opened[0])

    def settle(
        self,
        records: Iterable[int],
        unfetched: frozenset[int],
        damaged: frozenset[int],
        parents: Mapping[bytes, bytes],
        unneeded: Container[int] = (),
    ) -> None:
        """See `MemoryTier`."""
        num_failed = num_fetched = 0
        good: list[tuple[int, bytes]] = []
        for record in records:
            block_hash, place = self._open_fetches.pop(record)
            if record in damaged:
                self._stored.lose(block_hash, place)
            failed = record in unfetched
            if record not in unneeded:
                num_failed, num_fetched = num_failed + failed, num_fetched + (not failed)
            if failed or record in self._void or not self._keeps_in_memory:
                self._index.give_up([record])
            else:
                good.append((record, block_hash))
            self._void.discard(record)
        self._counter.add("blocks_failed_to_fetch", num_failed)
        self._counter.add("blocks_fetched", num_fetched)
        for run in _chains(good, parents):
            stored_in, hashes = zip(*run, strict=True)
            self._index.store(stored_in, hashes, parents.get(hashes[0]))

    def note_load(self, first_hash: bytes) -> None:
        """See `MemoryTier`."""
        self._stored.note_load(first_hash)

    # ---------------------------------------------------------------- stores

    def note_prompt(self, first_hash: bytes, first_tokens: tuple[int, ...]) -> None:
        """See `MemoryTier`."""
        if first_hash not in self._first_tokens:
            self._first_tokens[first_hash] = first_tokens
            if len(self._first_tokens) > _MOST_PROMPTS:
                self._first_tokens.popitem(last=False)

    def offer(self, block_hashes: Sequence[bytes], parent_hash: bytes | None) -> None:
        """See `MemoryTier`."""
        parts: list[StorePart] = []
        for block_hash in block_hashes:
            record = self._index.find(block_hash)
            if record is not None and self._stored.wants(block_hash):
                if len(self._being_written) + len(parts) < self._most_open:
                    tokens = self._first_tokens.get(block_hash, ()) if parent_hash is None else ()
                    parts.append(StorePart(record, block_hash, parent_hash, tokens))
                else:
                    self._counter.add("stores_dropped", 1)
            parent_hash = block_hash
        for first in range(0, len(parts), _LONGEST_ORDER):
            self._order(tuple(parts[first : first + _LONGEST_ORDER]))
        if not self._keeps_in_memory:
            self._let_go_of_found()
            self._let_go(block_hashes)

    def _let_go(self, block_hashes: Iterable[bytes]) -> None:
        """These are not to be found in memory any more, unless they are being written, or were and
        are not found yet."""
        for block_hash in block_hashes:
            record = self._index.find(block_hash)
            stays = record in self._being_written or block_hash in self._leaving
            if record is not None and not stays:
                self._index.forget(record)

    def _let_go_of_found(self) -> None:
        if not self._leaving:
            return
        found = [one for one in self._leaving if not self._stored.is_unseen(one)]
        self._leaving.difference_update(found)
        self._let_go(found)

    def needs_no_save(self, block_hash: bytes) -> bool:
        """See `MemoryTier`."""
        if not self._keeps_in_memory:
            return block_hash in self
        place = self._stored.find(block_hash) if self._mapped else None
        return place is not None and place.slab.name in self._mapped

    def _order(self, parts: tuple[StorePart, ...]) -> None:
        hashes = [part.block_hash for part in parts]
        self._index.pin(hashes)
        self._last_store_id += 1
        order = StoreOrder(self._last_store_id, parts, self._stored.begin_store(hashes))
        self._open[order.store_id] = order
        self._being_written.update(part.record for part in parts)
        self._orders.append(order)

    def take_orders(self) -> tuple[StoreOrder, ...]:
        """See `MemoryTier`."""
        orders, self._orders = self._orders, []
        return tuple(orders)

    def follow(self, report: PipelineReport) -> None:
        """See `MemoryTier`."""
        self.end_stores(report.stored, report.unstored)
        self.note_mapped(report.mapped, report.closing)

    def end_stores(self, store_ids: frozenset[int], unstored: frozenset[int]) -> None:
        """The worker side has done with these. Records in `unstored` were not written."""
        for store_id in sorted(store_ids & self._open.keys()):
            order = self._open.pop(store_id)
            records = [part.record for part in order.parts]
            self._being_written.difference_update(records)
            self._index.unpin(records)
            hashes = [part.block_hash for part in order.parts]
            dropped = {part.block_hash for part in order.parts if part.record in unstored}
            self._stored.end_store(hashes, dropped)
            if not self._keeps_in_memory:
                self._leaving.update(hashes)
                self._leaving -= dropped
                self._let_go(dropped)

    @property
    def has_orders(self) -> bool:
        """See `MemoryTier`."""
        return bool(self._open or self._closed)

    def forget(self) -> None:
        """See `MemoryTier`."""
        self._stored.forget_all()
        self._void.update(self._open_fetches)

    def tiers_seen(self, counter: Counter, block_bytes: int) -> tuple[TierPicture, ...]:
        """See `MemoryTier`. How many blocks fit into files depends on others who use them."""
        files = TierPicture(
            name="files",
            num_blocks=len(self._stored),
            num_room=None,
            block_bytes=block_bytes,
            num_hits=counter.total("blocks_fetched") + counter.total("blocks_loaded_from_files"),
            num_stored=counter.total("blocks_written"),
            num_evicted=counter.total("slabs_evicted"),
            evicted_unit="files",
            drops=drops_of(counter, _DROPS),
        )
        return (*super().tiers_seen(counter, block_bytes), files)

    def close(self, timeout_s: float) -> bool:
        """See `MemoryTier`."""
        return self._stored.close(timeout_s)


def _chains(
    pairs: Iterable[tuple[int, bytes]], parents: Mapping[bytes, bytes]
) -> Iterator[list[tuple[int, bytes]]]:
    """The same records and blocks, in order, cut where a block does not follow the one before."""
    chain: list[tuple[int, bytes]] = []
    for pair in pairs:
        if chain and parents.get(pair[1]) != chain[-1][1]:
            yield chain
            chain = []
        chain.append(pair)
    if chain:
        yield chain
