"""Loads that were ordered, until the worker side has done with their records. Event loop."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from interlace.connectors.pipeline.host_index import HostIndex
from interlace.connectors.pipeline.messages import Load, PipelineReport, ShareReport
from interlace.connectors.pipeline.sched_runs import record_runs
from interlace.connectors.pipeline.sched_split import Split
from interlace.connectors.pipeline.sched_stats import Counter
from interlace.connectors.pipeline.sched_tier import AtHand, Mapped, MemoryTier, Taken

_CHECKSUM = operator.attrgetter("entry.checksum")
"""Of a place."""


class Wanted(NamedTuple):
    """A load that is to be ordered."""

    request_id: str
    prefix: Sequence[bytes]
    """Hashes from the request's first block to the last one that is loaded."""
    first: int
    """Blocks of these that are there already."""
    block_ids: Sequence[int]
    """Of the others."""
    at_hand: AtHand
    """Of the others, what was found in registered slabs."""
    is_async: bool
    may_store: bool
    """Whether what is loaded may be written to files."""


class _OpenLoad(NamedTuple):
    """A load that was ordered."""

    prefix: tuple[bytes, ...]
    """See `Wanted`."""
    records: dict[int, int]
    """Block id -> the record that it is loaded from, or may be, in order of position."""
    is_async: bool
    split: Split | None
    """Of a load from the back."""
    fetched: tuple[int, ...]
    """The records among these into which blocks are read from files."""
    mapped: Mapped
    """Those that lie in registered slabs."""
    offers_from: int | None
    """Blocks of the prefix from there on may be written to files; None: nothing."""
    failed: frozenset[int] = frozenset()
    """Block ids that were not filled, once that was reported: a read or a copy that is late goes on
    for a while, and the load with it."""

    @property
    def num_open_blocks(self) -> int:
        """Blocks that are still to be loaded, as far as is known."""
        return len(self.records) if self.split is None else self.split.num_open_blocks

    @property
    def num_blocks(self) -> int:
        """Blocks that are loaded in all."""
        return len(self.records) if self.split is None else self.split.num_blocks


class OpenLoads:
    """See the module's docstring."""

    def __init__(self, tier: MemoryTier, index: HostIndex, counter: Counter) -> None:
        """What is loaded lies in `tier`, and what lies in memory of it in `index`."""
        self._tier = tier
        self._index = index
        self._counter = counter
        self._orders: list[Load] = []
        self._open: dict[int, _OpenLoad] = {}
        self._last_load_id = 0

    def __bool__(self) -> bool:
        """Whether there is one."""
        return bool(self._open)

    @property
    def num_open(self) -> int:
        """Loads that have not ended."""
        return len(self._open)

    def __contains__(self, load_id: int) -> bool:
        """Whether that one is."""
        return load_id in self._open

    # ---------------------------------------------------------------- orders

    def next_id(self) -> int:
        """Of the load that is ordered next."""
        return self._last_load_id + 1

    def order(self, wanted: Wanted, split: Split | None) -> None:
        """Order a load, which takes `next_id`; `split`: of one from the back."""
        hashes, block_ids = wanted.prefix[wanted.first :], wanted.block_ids
        taken = self._tier.take(hashes, wanted.at_hand)
        if taken.missing and split is not None:
            # What is loaded from the back has no holes.
            taken = self._give_back(taken, hashes)
        missing: tuple[int, ...] = ()
        if taken.missing:
            blocks = dict[bytes, int](zip(hashes, block_ids, strict=True))
            missing = tuple(blocks[one] for one in taken.missing)
            hashes = [one for one in hashes if one in taken.records]
            block_ids = [blocks[one] for one in hashes]
        records = list(map(taken.records.__getitem__, hashes))
        self._last_load_id += 1
        self._orders.append(
            Load(
                self._last_load_id,
                wanted.request_id,
                record_runs(records, block_ids),
                wanted.is_async,
                None if split is None else split.num_blocks,
                taken.fetches,
                missing,
                dict(zip(taken.mapped, map(_CHECKSUM, taken.mapped.values()), strict=True)),
            )
        )
        self._open[self._last_load_id] = _OpenLoad(
            tuple(wanted.prefix),
            dict(zip(block_ids, records, strict=True)),
            wanted.is_async,
            split,
            tuple(taken.records[one] for one in taken.fetched),
            taken.mapped,
            wanted.first if wanted.may_store else None,
        )

    def _give_back(self, taken: Taken, block_hashes: Sequence[bytes]) -> Taken:
        """Nothing is loaded of what was taken for these blocks."""
        fetched = [taken.records[block_hash] for block_hash in taken.fetched]
        self._unpin(taken.records.values(), fetched, taken.mapped)
        self._tier.settle(fetched, frozenset(fetched), frozenset(), {}, fetched)
        return Taken({}, missing=tuple(block_hashes))

    def _unpin(self, records: Iterable[int], fetched: Iterable[int], mapped: Mapped) -> None:
        """A load reads these no more: what is fetched, or mapped, is not pinned."""
        others = {*fetched, *mapped}
        self._index.unpin([record for record in records if record not in others])

    def take_orders(self) -> tuple[Load, ...]:
        """What the worker side is to be told, once."""
        orders, self._orders = self._orders, []
        return tuple(orders)

    @property
    def has_orders_within(self) -> bool:
        """Whether the next step is to load within itself."""
        return any(not load.is_async for load in self._orders)

    def blocks_ahead(self) -> tuple[int, int]:
        """Blocks that go before a further load of the next step: (within the step, beside it)."""
        in_step = sum(r.num_blocks for one in self._orders if not one.is_async for r in one.runs)
        beside = sum(one.num_open_blocks for one in self._open.values() if one.is_async)
        # Of a load from the back much is under way at a time.
        hurried = sum(one.num_open_blocks for one in self._open.values() if one.split)
        return in_step + hurried, in_step + beside

    # ---------------------------------------------------------------- reports

    def distrust(self, invalid: set[int]) -> None:
        """Records from which these blocks were to come are not promised again."""
        for load_id, opened in self._open.items():
            failed = frozenset(opened.records.keys() & invalid)
            if opened.failed or not failed:  # what is said later is about others' loads
                continue
            self._open[load_id] = opened._replace(failed=failed)
            records = [opened.records[block_id] for block_id in failed]
            for record in records:
                self._index.forget(record)
            self._tier.avoid(records, opened.mapped)

    def follow(self, shares: Iterable[ShareReport]) -> None:
        """How far loads from the back have come."""
        for share in shares:
            opened = self._open.get(share.load_id)
            if opened is not None and opened.split is not None:
                opened.split.follow(share)

    def end(self, report: PipelineReport) -> None:
        """Loads that read no record any more. What they loaded was used last of all only now, and
        its head still goes last."""
        for load_id in report.loaded:
            opened = self._open.pop(load_id, None)
            if opened is not None:
                self._end(opened, report)

    def _end(self, opened: _OpenLoad, report: PipelineReport) -> None:
        first = opened.offers_from
        if first is not None:  # before it is unpinned, and may go
            self._tier.offer(opened.prefix[first:], opened.prefix[first - 1] if first else None)
        self._unpin(opened.records.values(), opened.fetched, opened.mapped)
        if opened.fetched or opened.mapped:
            parents = dict(zip(opened.prefix[1:], opened.prefix, strict=False))
            self._tier.settle(
                opened.fetched, report.unfetched, report.damaged, parents, report.unneeded
            )
            self._tier.settle_mapped(opened.mapped, report.damaged)
            self._tier.note_load(opened.prefix[0])
        self._index.touch(opened.prefix)
        num_failed = len(opened.failed)
        self._counter.add("blocks_loaded", max(0, opened.num_blocks - num_failed))
        self._counter.add("blocks_failed_to_load", num_failed)
