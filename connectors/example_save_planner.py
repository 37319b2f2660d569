"""Which blocks ExampleConnector saves, and what becomes of each save. Scheduler side.

A save lives through four messages: planned in a step's metadata and copied in that step; reported
as copied with the step's output; allowed in a later step's metadata, unless a block at or beneath
it turned out bad; and reported as ended. Until then its request's blocks are kept, not because
they are still read, but so that the engine runs the steps that carry the messages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from interlace.connectors.example_messages import Save
from interlace.connectors.kv_folders.counters import Tally
from interlace.connectors.kv_folders.index import FolderIndex
from interlace.connectors.kv_folders.writer import EndedSave, SaveEnd
from interlace.engine.request import Request

MAX_RUN_BLOCKS = 64
"""A longer run becomes several folders, so that no single save fills the writer's queue."""


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
    is_kept: bool = False
    """It has ended, and its blocks are kept until no save is open."""


@dataclasses.dataclass(slots=True, eq=False)
class _OpenSave:
    """A save that was planned and has not ended."""

    save: Save
    owner: Tracked
    beneath: frozenset[int]
    """Ids of the request's blocks up to the end of the run."""
    is_decided: bool = False


@dataclasses.dataclass(slots=True)
class SaveOrders:
    """For the next metadata; the fields are those of `ExampleMetadata`."""

    saves: list[Save] = dataclasses.field(default_factory=list)
    publish: set[int] = dataclasses.field(default_factory=set)
    discard: set[int] = dataclasses.field(default_factory=set)
    release: set[str] = dataclasses.field(default_factory=set)


class SavePlanner:
    """Every save that is planned ends exactly once. Event loop only."""

    def __init__(self, index: FolderIndex, tally: Tally) -> None:
        self._index = index
        self._tally = tally
        self._open: dict[int, _OpenSave] = {}
        self._being_saved: dict[bytes, int] = {}  # block hash -> save
        self._last_save_id = 0
        self._orders = SaveOrders()

    def take_orders(self) -> SaveOrders:
        """What the worker side is to be told, once."""
        orders, self._orders = self._orders, SaveOrders()
        return orders

    def plan(self, tracked: Tracked, num_filled_before: int, num_filled: int) -> None:
        """Plan saves of a request's blocks that are neither stored nor being saved.

        `num_filled` blocks are full when the step ends, `num_filled_before` when it begins. A
        block whose last token is still being sampled has no hash yet: a later plan finds it.
        """
        hashes = tracked.request.block_hashes
        end = min(num_filled, len(hashes), len(tracked.block_ids))
        begin = None
        for i in range(tracked.num_settled, end + 1):
            wanted = i < end and not self._is_known(hashes[i])
            if begin is not None and (not wanted or i - begin == MAX_RUN_BLOCKS):
                self._save(tracked, begin, i, is_filled=i <= num_filled_before)
                begin = None
            if wanted and begin is None:
                begin = i
        tracked.num_settled = end

    def _is_known(self, block_hash: bytes) -> bool:
        return block_hash in self._index or block_hash in self._being_saved

    def _save(self, tracked: Tracked, begin: int, end: int, *, is_filled: bool) -> None:
        """Plan one save of the request's blocks [begin, end)."""
        self._last_save_id += 1
        save = Save(
            save_id=self._last_save_id,
            parent_hash=tracked.request.hash_before(begin),
            block_hashes=tuple(tracked.request.block_hashes[begin:end]),
            block_ids=tuple(tracked.block_ids[begin:end]),
            is_filled=is_filled,
        )
        self._orders.saves.append(save)
        self._open[save.save_id] = _OpenSave(save, tracked, frozenset(tracked.block_ids[:end]))
        self._being_saved.update(dict.fromkeys(save.block_hashes, save.save_id))
        tracked.open_saves.add(save.save_id)

    # ---------------------------------------------------------------- what the worker reports

    def distrust(self, invalid: set[int]) -> None:
        """Undo saves that stand on bad blocks; the blocks become saveable again.

        Not only saves of the step that reports: one that was planned since may stand on them too.
        """
        for save_id, opened in list(self._open.items()):
            if opened.is_decided or invalid.isdisjoint(opened.beneath):
                continue
            opened.is_decided = True
            self._unmark(opened.save)
            if opened.save in self._orders.saves:  # the worker never heard of it
                self._orders.saves.remove(opened.save)
                self.end(EndedSave(save_id, SaveEnd.DISCARDED))
            else:
                self._orders.discard.add(save_id)

    def allow(self, copied: Iterable[int]) -> None:
        """The step that copied these was applied: what is not undone by now may be published."""
        for save_id in copied:
            opened = self._open.get(save_id)
            if opened is not None and not opened.is_decided:
                opened.is_decided = True
                self._orders.publish.add(save_id)

    def end(self, ended: EndedSave) -> None:
        """A save has ended, in whatever way. The last one of an ended request lets it go."""
        opened = self._open.pop(ended.save_id, None)
        if opened is None:
            return
        self._unmark(opened.save)
        ended.end.count(self._tally, len(opened.save.block_hashes))
        if ended.end is SaveEnd.PUBLISHED:
            self._index.add(ended.folder, ended.block_hashes)
        opened.owner.open_saves.discard(ended.save_id)
        if opened.owner.is_kept and not opened.owner.open_saves:
            self._orders.release.add(opened.owner.request.request_id)

    def _unmark(self, save: Save) -> None:
        for block_hash in save.block_hashes:
            if self._being_saved.get(block_hash) == save.save_id:
                del self._being_saved[block_hash]

    def __repr__(self) -> str:
        return f"<SavePlanner open={sorted(self._open)} hashes={len(self._being_saved)}>"
