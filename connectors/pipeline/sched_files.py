"""The scheduler side of a store of files: what is fetched, and what is written there. Event loop.

Host memory stands in between. What is fetched goes to records of its own, and is stored in memory
when its load has ended. What a save has brought to memory is written from there; its records are
pinned until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from interlace.connectors.pipeline.host_index import HostIndex
from interlace.connectors.pipeline.messages import Fetch, StoreOrder, StorePart
from interlace.connectors.pipeline.sched_stats import Counter
from interlace.connectors.slab_store.lookup import StoredBlocks

_SHARE_OF_RECORDS = 4
"""No more than this part of all records waits to be written, and no load fetches more."""
_LONGEST_ORDER = 64
"""Blocks of one order."""


class Taken(NamedTuple):
    """Records for a load of some blocks."""

    records: dict[bytes, int]
    """Block hash -> where it is loaded from. Of those that are stored in memory pinned ones."""
    fetches: tuple[Fetch, ...]
    """Into the others."""
    fetched: tuple[bytes, ...]
    """The blocks of these, in the same order."""
    missing: tuple[bytes, ...]
    """What has no record: its file has gone since it was promised, or memory is full."""


class FileTier:
    """See the module's docstring."""

    def __init__(self, stored: StoredBlocks, index: HostIndex, counter: Counter) -> None:
        """Takes records from `index`, and puts blocks into it."""
        self._stored = stored
        self._index = index
        self._counter = counter
        self.most_fetched = max(1, index.num_records // _SHARE_OF_RECORDS)
        """Blocks of one load."""
        self._most_open = self.most_fetched
        self._orders: list[StoreOrder] = []
        self._open: dict[int, StoreOrder] = {}
        self._num_open_parts = 0
        self._last_store_id = 0

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether the block lies in a file, as far as is known."""
        return block_hash in self._stored

    def refresh(self) -> None:
        """Somebody asks: see what others have stored, if it is time for that."""
        self._stored.refresh()

    # ---------------------------------------------------------------- loads

    def take(self, block_hashes: Sequence[bytes]) -> Taken:
        """For a load of these. `settle` is owed for what is fetched, and `HostIndex.unpin` for the
        rest."""
        in_memory = [block_hash for block_hash in block_hashes if block_hash in self._index]
        records = dict(zip(in_memory, self._index.pin(in_memory), strict=True))
        wanted = [block_hash for block_hash in block_hashes if block_hash not in records]
        if not wanted:
            return Taken(records, (), (), ())
        fresh = self._index.allocate(len(wanted))
        places = None if fresh is None else self._stored.places(wanted)
        if fresh is None or places is None:
            self._index.give_up(fresh or ())
            self._stored.end_load(wanted)
            self._counter.add("fetches_missed", len(wanted))
            return Taken(records, (), (), tuple(wanted))
        records |= zip(wanted, fresh, strict=True)
        fetches = tuple(map(Fetch, fresh, places))
        return Taken(records, fetches, tuple(wanted), ())

    def settle(
        self, fetched: dict[bytes, int], unfetched: frozenset[int], parents: dict[bytes, bytes]
    ) -> None:
        """A load has ended, and nothing writes into its records any more. `fetched`: block hash ->
        record, in order; `unfetched`: records that could not be read. `parents`: the block before
        each, if it is not the first."""
        failed = [block_hash for block_hash, record in fetched.items() if record in unfetched]
        self._stored.end_load(tuple(fetched), failed=failed)
        self._counter.add("blocks_fetched", len(fetched) - len(failed))
        self._counter.add("blocks_failed_to_fetch", len(failed))
        for block_hash, record in fetched.items():
            if record in unfetched or block_hash in self._index:
                self._index.give_up([record])
            else:
                self._index.store([record], [block_hash], parents.get(block_hash))

    # ---------------------------------------------------------------- stores

    def offer(self, block_hashes: Sequence[bytes], parent_hash: bytes | None) -> None:
        """These blocks, neighbours behind `parent_hash`, were put into memory, or used there: write
        those that are worth it."""
        parts: list[StorePart] = []
        for block_hash in block_hashes:
            record = self._index.find(block_hash)
            if record is not None and self._stored.wants(block_hash):
                if self._num_open_parts + len(parts) < self._most_open:
                    parts.append(StorePart(record, block_hash, parent_hash))
                else:
                    self._counter.add("stores_dropped", 1)
            parent_hash = block_hash
        for first in range(0, len(parts), _LONGEST_ORDER):
            self._order(tuple(parts[first : first + _LONGEST_ORDER]))

    def _order(self, parts: tuple[StorePart, ...]) -> None:
        hashes = [part.block_hash for part in parts]
        self._index.pin(hashes)
        self._stored.begin_store(hashes)
        self._last_store_id += 1
        order = StoreOrder(self._last_store_id, parts)
        self._open[order.store_id] = order
        self._num_open_parts += len(parts)
        self._orders.append(order)

    def take_orders(self) -> tuple[StoreOrder, ...]:
        """What the worker side is to be told, once."""
        orders, self._orders = self._orders, []
        return tuple(orders)

    def end_stores(self, store_ids: frozenset[int]) -> None:
        """The worker side has done with these."""
        for store_id in sorted(store_ids & self._open.keys()):
            order = self._open.pop(store_id)
            self._num_open_parts -= len(order.parts)
            self._index.unpin([part.record for part in order.parts])
            self._stored.end_store([part.block_hash for part in order.parts])

    @property
    def has_orders(self) -> bool:
        """Whether there is something to tell the worker side, or to hear from it."""
        return bool(self._open)

    def forget(self) -> None:
        """Nothing that is stored by now is found again by this engine."""
        self._stored.forget_all()

    def close(self, timeout_s: float) -> bool:
        """Look no more."""
        return self._stored.close(timeout_s)
