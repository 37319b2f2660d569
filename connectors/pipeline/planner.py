"""Which blocks PipelineConnector saves, and what becomes of each save. Scheduler side.

A request's blocks are saved in the step that fills them, prompt and answer alike; those whose last
token is still being sampled then, in a later step, or the one behind the request's end.

A save lives through three messages: ordered in a step's metadata; reported as copied or failed,
with that step's output or a later one's; and, if its request has ended meanwhile, the order to let
the request go. It becomes visible when it is reported as copied and no block beneath it was
reported bad by then. Until it has ended, its blocks stay what they are: the request runs or is
held; or its blocks were taken by a preemption, and the step that hands them on is told to fence the
save. A save that stands on bad blocks is distrusted: its blocks may be saved again at once, its
records are free when it has ended.

Where no record is to be had, blocks are not saved, and counted.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from interlace.connectors.pipeline.host_index import HostIndex
from interlace.connectors.pipeline.messages import Save
from interlace.connectors.pipeline.sched_runs import record_runs
from interlace.connectors.pipeline.sched_stats import Counter
from interlace.connectors.pipeline.sched_tier import MemoryTier
from interlace.engine.request import Request

LONGEST_SAVE = 256
"""Blocks of one save."""
SHARE_OF_RECORDS = 4
"""No save takes more than this part of all records, unless one block does: of a prompt that is
longer than the memory, the beginning is kept."""


@dataclasses.dataclass(slots=True, eq=False)
class Tracked:
    """A request that was admitted at least once."""

    request: Request
    block_ids: list[int] = dataclasses.field(default_factory=list)
    """All of its blocks in order of position; empty while it is preempted."""
    num_settled: int = 0
    """Blocks at the front that need no look: stored, being saved, or given up."""
    is_loading: bool = False
    """An asynchronous load is under way."""
    load_failed: bool = False
    open_saves: set[int] = dataclasses.field(default_factory=set)
    """Those that read its blocks. Not the fenced ones."""
    skips_save: bool = False
    """It has asked for that: nothing is saved for it."""
    is_held: bool = False
    """It has ended, and its blocks stay until no save is open."""
    _known_hashes: set[bytes] = dataclasses.field(default_factory=set)

    def all_hashes(self) -> set[bytes]:
        """Of all of its full blocks; not to be changed. Only what is new since the last call costs
        time."""
        hashes = self.request.block_hashes
        self._known_hashes.update(itertools.islice(hashes, len(self._known_hashes), None))
        return self._known_hashes


@dataclasses.dataclass(slots=True, eq=False)
class _OpenSave:
    """A save that was planned and has not ended."""

    save: Save
    owner: Tracked
    block_hashes: tuple[bytes, ...]
    parent_hash: bytes | None
    records: list[int]
    beneath: list[int]
    """Ids of the request's blocks up to the end of the run."""
    is_distrusted: bool = False


class _BeingSaved(NamedTuple):
    """Where a block will be found."""

    save_id: int
    record: int


@dataclasses.dataclass(slots=True)
class SaveOrders:
    """For the next metadata; the fields are those of `PipelineMetadata`."""

    saves: list[Save] = dataclasses.field(default_factory=list)
    fences: set[int] = dataclasses.field(default_factory=set)
    release: set[str] = dataclasses.field(default_factory=set)


class SavePlanner:
    """Every save that is planned ends exactly once. Event loop only."""

    def __init__(self, index: HostIndex, counter: Counter, tier: MemoryTier) -> None:
        """Takes records from `index`, and puts blocks into it. `tier` is offered those too."""
        self._tier = tier
        self._index = index
        self._counter = counter
        self._longest = max(1, min(LONGEST_SAVE, index.num_records // SHARE_OF_RECORDS))
        self._open: dict[int, _OpenSave] = {}
        self._being_saved: dict[bytes, _BeingSaved] = {}
        self._last_save_id = 0
        self._orders = SaveOrders()

    def take_orders(self) -> SaveOrders:
        """What the worker side is to be told, once."""
        orders, self._orders = self._orders, SaveOrders()
        return orders

    @property
    def has_orders(self) -> bool:
        """Whether there is something to tell the worker side, or to hear from it."""
        return bool(self._open or self._orders.release or self._orders.fences)

    # ---------------------------------------------------------------- planning

    def plan(self, tracked: Tracked, num_filled: int) -> None:
        """Plan saves of a request's blocks that are neither stored nor being saved.

        `num_filled` blocks are full when the step ends. A block whose last token is still being
        sampled has no hash yet: a later plan finds it.
        """
        if num_filled <= tracked.num_settled or tracked.skips_save:
            return  # as in most steps
        end = min(num_filled, len(tracked.request.block_hashes), len(tracked.block_ids))
        for begin, stop in list(self._runs(tracked, end)):
            self._save(tracked, begin, stop)
        tracked.num_settled = max(tracked.num_settled, end)

    def _runs(self, tracked: Tracked, end: int) -> Iterator[tuple[int, int]]:
        """[begin, stop) of blocks to save, before block `end`, each short enough for a save."""
        hashes = tracked.request.block_hashes
        begin = tracked.num_settled
        for i in range(begin, end + 1):
            is_known = i < end and self._is_known(hashes[i])
            if begin < i and (is_known or i == end or i - begin == self._longest):
                yield begin, i
                begin = i
            if is_known:
                begin = i + 1

    def _is_known(self, block_hash: bytes) -> bool:
        if block_hash in self._index or block_hash in self._being_saved:
            return True
        return self._tier.needs_no_save(block_hash)

    def _save(self, tracked: Tracked, begin: int, end: int) -> None:
        """Plan one save of the request's blocks [begin, end), if there is room."""
        hashes = tracked.request.block_hashes
        records = self._allocate(tracked, begin, end)
        if records is None:
            self._counter.add("blocks_dropped", end - begin)
            return
        self._last_save_id += 1
        save_id = self._last_save_id
        save = Save(save_id, record_runs(records, tracked.block_ids[begin:end]))
        opened = _OpenSave(
            save,
            tracked,
            tuple(hashes[begin:end]),
            hashes[begin - 1] if begin else None,
            records,
            tracked.block_ids[:end],
        )
        self._orders.saves.append(save)
        self._open[save_id] = opened
        for block_hash, record in zip(opened.block_hashes, records, strict=True):
            self._being_saved[block_hash] = _BeingSaved(save_id, record)
        tracked.open_saves.add(save_id)

    def _allocate(self, tracked: Tracked, begin: int, end: int) -> list[int] | None:
        """Behind the record of the block before, if possible. What the request has stored stays."""
        num_evicted = self._index.num_evicted
        must_evict = end - begin > self._index.num_free
        records = self._index.allocate(
            end - begin,
            after=self._record_of(tracked.request.block_hashes[begin - 1]) if begin else None,
            keep=tracked.all_hashes() if must_evict else (),
        )
        self._counter.add("records_evicted", self._index.num_evicted - num_evicted)
        return records

    def _record_of(self, block_hash: bytes) -> int | None:
        being_saved = self._being_saved.get(block_hash)
        return self._index.find(block_hash) if being_saved is None else being_saved.record

    # ---------------------------------------------------------------- ends of requests

    def fence(self, tracked: Tracked) -> None:
        """The request has lost its blocks: the next step hands them on."""
        self._orders.fences |= tracked.open_saves
        tracked.open_saves.clear()

    def hold(self, tracked: Tracked) -> bool:
        """The request has ended: whether its blocks must stay until `release` names it."""
        tracked.is_held = bool(tracked.open_saves)
        return tracked.is_held

    # ---------------------------------------------------------------- what the worker reports

    def distrust(self, invalid: set[int]) -> None:
        """Undo saves that stand on bad blocks; the blocks become saveable again.

        Not only saves of the step that reports: one that was planned since may stand on them too.
        """
        for opened in list(self._open.values()):
            if not invalid.isdisjoint(opened.beneath):
                self._undo(opened)

    def distrust_all(self) -> None:
        """Nothing that is being saved becomes visible any more."""
        for opened in list(self._open.values()):
            self._undo(opened)

    def _undo(self, opened: _OpenSave) -> None:
        if opened.is_distrusted:
            return
        opened.is_distrusted = True
        self._unmark(opened)
        if opened.save in self._orders.saves:  # the worker has never heard of it
            self._orders.saves.remove(opened.save)
            self._end(opened.save.save_id, is_copied=False)

    def allow(self, copied: Iterable[int]) -> None:
        """These were copied. Unless one was distrusted by now, its blocks are stored."""
        for save_id in sorted(copied):
            self._end(save_id, is_copied=True)

    def fail(self, failed: Iterable[int]) -> None:
        """Nothing comes of these."""
        for save_id in sorted(failed):
            self._end(save_id, is_copied=False)

    def _end(self, save_id: int, *, is_copied: bool) -> None:
        opened = self._open.pop(save_id, None)
        if opened is None:
            return
        self._unmark(opened)
        num_blocks = len(opened.records)
        if is_copied and not opened.is_distrusted:
            self._index.store(opened.records, opened.block_hashes, opened.parent_hash)
            self._counter.add("blocks_saved", num_blocks)
            self._tier.offer(opened.block_hashes, opened.parent_hash)
        else:
            self._index.give_up(opened.records)
            self._counter.add("blocks_not_saved", num_blocks)
        owner = opened.owner
        owner.open_saves.discard(save_id)
        if owner.is_held and not owner.open_saves:
            owner.is_held = False
            self._orders.release.add(owner.request.request_id)

    def _unmark(self, opened: _OpenSave) -> None:
        for block_hash in opened.block_hashes:
            being_saved = self._being_saved.get(block_hash)
            if being_saved is not None and being_saved.save_id == opened.save.save_id:
                del self._being_saved[block_hash]

    @property
    def num_open(self) -> int:
        """Saves that have not ended."""
        return len(self._open)

    def __repr__(self) -> str:
        return f"<SavePlanner open={sorted(self._open)} hashes={len(self._being_saved)}>"
