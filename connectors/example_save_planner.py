"""Which blocks ExampleConnector saves, and what becomes of each save. Scheduler side.

Blocks of a prompt are saved in the step that fills them. Blocks beyond it, with tokens that were
generated, fill one by one, and a folder for each would cost more than it holds: they are gathered
until a run of `GATHERED_BLOCKS` is there, or the request ends. Gathering only means not to look
yet: the blocks are the request's own and hold still, and what a preemption takes is computed, and
gathered, again.

A save lives through four messages: planned in a step's metadata and copied in that step; reported
as copied with the step's output, or on a GPU with a later one's; allowed in a later step's
metadata, unless a block at or beneath it turned out bad; and reported as ended. A request that ends
before is held until then: in part because its last blocks are copied in the next step, and for the
rest so that the engine runs the steps that carry the messages.

Of several workers each saves its part, in a folder of its own. A save counts as copied, or as
ended, when all of them have said so. If one cannot write its part before the save was allowed, the
others are told to discard theirs; if one fails after that, theirs stay, and are found when the
blocks are saved again, since nothing is promised that a worker lacks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from interlace.connectors.example_messages import CopiedSave, Save
from interlace.connectors.kv_folders.counters import Tally
from interlace.connectors.kv_folders.known import KnownFolders
from interlace.connectors.kv_folders.writer import EndedSave, SaveEnd
from interlace.engine.request import Request

MAX_RUN_BLOCKS = 64
"""A longer run becomes several folders."""
QUEUE_SHARE = 4
"""No run takes more than this part of the writer's queue, unless one block does."""
GATHERED_BLOCKS = 8
"""Length of a run of blocks beyond the prompt."""


def max_run_blocks(block_bytes: int, queue_bytes: int) -> int:
    """Most blocks of a run; `block_bytes` is one block of all layers."""
    return max(1, min(MAX_RUN_BLOCKS, queue_bytes // QUEUE_SHARE // block_bytes))


@dataclasses.dataclass(slots=True, eq=False)
class Tracked:
    """A request that was admitted at least once."""

    request: Request
    block_ids: list[int] = dataclasses.field(default_factory=list)
    """All of its blocks in order of position; empty while it is preempted."""
    num_settled: int = 0
    """Blocks at the front that need no look: stored, being saved, or given up. Blocks that are
    being gathered are not among them."""
    is_loading: bool = False
    """An asynchronous load is under way."""
    load_failed: bool = False
    open_saves: set[int] = dataclasses.field(default_factory=set)
    is_held: bool = False
    """It has ended, and its blocks stay until no save is open."""


@dataclasses.dataclass(slots=True, eq=False)
class _OpenSave:
    """A save that was planned and has not ended."""

    save: Save
    owner: Tracked
    beneath: frozenset[int]
    """Ids of the request's blocks up to the end of the run."""
    is_decided: bool = False
    copied: set[int] = dataclasses.field(default_factory=set)
    """Ranks that have copied their part."""
    ended: dict[int, EndedSave] = dataclasses.field(default_factory=dict)
    """Rank -> its last word."""


@dataclasses.dataclass(slots=True)
class SaveOrders:
    """For the next metadata; the fields are those of `ExampleMetadata`."""

    saves: list[Save] = dataclasses.field(default_factory=list)
    publish: set[int] = dataclasses.field(default_factory=set)
    discard: set[int] = dataclasses.field(default_factory=set)
    release: set[str] = dataclasses.field(default_factory=set)


class SavePlanner:
    """Every save that is planned ends exactly once. Event loop only."""

    def __init__(
        self,
        known: KnownFolders,
        tally: Tally,
        *,
        num_ranks: int,
        block_size: int,
        longest_run: int,
        on_published: Callable[[bytes | None, tuple[bytes, ...]], None],
    ) -> None:
        """`block_size` is in tokens, `longest_run` in blocks. `on_published` is called with the
        hash before a run, None if there is no block, and those of its blocks that are stored on
        all ranks now."""
        self._known = known
        self._tally = tally
        self._num_ranks = num_ranks
        self._on_published = on_published
        self._block_size = block_size
        self._longest_run = longest_run
        self._open: dict[int, _OpenSave] = {}
        self._being_saved: dict[bytes, int] = {}  # block hash -> save
        self._arriving: set[bytes] = set()  # hashes of blocks that the next step is to load
        self._last_save_id = 0
        self._orders = SaveOrders()

    def take_orders(self) -> SaveOrders:
        """What the worker side is to be told, once."""
        orders, self._orders = self._orders, SaveOrders()
        self._arriving.clear()
        return orders

    def expect(self, block_hashes: Iterable[bytes]) -> None:
        """The next step loads these blocks: until it is over they hold nothing to save, even if
        the index should forget meanwhile that they are stored."""
        self._arriving.update(block_hashes)

    def plan(
        self, tracked: Tracked, num_filled_before: int, num_filled: int, *, is_last: bool = False
    ) -> None:
        """Plan saves of a request's blocks that are neither stored nor being saved.

        `num_filled` blocks are full when the step ends, `num_filled_before` when it begins. A
        block whose last token is still being sampled has no hash yet: a later plan finds it.
        `is_last`: there is no later plan, so what was gathered is saved.
        """
        end = min(num_filled, len(tracked.request.block_hashes), len(tracked.block_ids))
        settled = end
        for begin, stop in self._runs(tracked, end):
            if stop == end and not is_last and self._may_grow(tracked, begin, stop):
                settled = begin
            else:
                self._save(tracked, begin, stop, is_filled=stop <= num_filled_before)
        tracked.num_settled = settled

    def _runs(self, tracked: Tracked, end: int) -> Iterator[tuple[int, int]]:
        """[begin, stop) of neighbours to save, before block `end`; none is longer than a run may
        be, and none reaches over the end of the prompt."""
        hashes = tracked.request.block_hashes
        begin = tracked.num_settled
        for i in range(begin, end + 1):
            is_known = i < end and self._is_known(hashes[i])
            is_full = i - begin == self._longest(tracked, begin)
            if begin < i and (is_known or is_full or i in (end, self._prompt_end(tracked))):
                yield begin, i
                begin = i
            if is_known:
                begin = i + 1

    def _prompt_end(self, tracked: Tracked) -> int:
        """Blocks that are full of prompt."""
        return tracked.request.num_prompt_tokens // self._block_size

    def _longest(self, tracked: Tracked, begin: int) -> int:
        """Most blocks of a run that begins there."""
        if begin < self._prompt_end(tracked):
            return self._longest_run
        return min(self._longest_run, GATHERED_BLOCKS)

    def _may_grow(self, tracked: Tracked, begin: int, stop: int) -> bool:
        """Whether the run lies beyond the prompt, and has room for more."""
        is_generated = begin >= self._prompt_end(tracked)
        return is_generated and stop - begin < self._longest(tracked, begin)

    def _is_known(self, block_hash: bytes) -> bool:
        return (
            block_hash in self._known
            or block_hash in self._being_saved
            or block_hash in self._arriving
        )

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
                for rank in range(self._num_ranks):
                    self.end(EndedSave(save_id, SaveEnd.DISCARDED, rank))
            else:
                self._orders.discard.add(save_id)

    def allow(self, copied: Iterable[CopiedSave]) -> None:
        """The step that copied these was applied: what all ranks have copied, and is not undone by
        now, may be published."""
        for save_id, rank in copied:
            opened = self._open.get(save_id)
            if opened is None:
                continue
            opened.copied.add(rank)
            if len(opened.copied) == self._num_ranks and not opened.is_decided:
                opened.is_decided = True
                self._orders.publish.add(save_id)

    def end(self, ended: EndedSave) -> None:
        """A rank's part of a save has ended, in whatever way. A request is held until the last
        part of its last save has."""
        opened = self._open.get(ended.save_id)
        if opened is None or ended.rank in opened.ended:
            return
        opened.ended[ended.rank] = ended
        if ended.end is SaveEnd.PUBLISHED:
            self._known.add(ended.rank, ended.folder, ended.block_hashes)
        if len(opened.ended) == self._num_ranks:
            self._close(opened)
        elif not opened.is_decided and ended.end is not SaveEnd.PUBLISHED:
            opened.is_decided = True
            self._orders.discard.add(ended.save_id)

    def _close(self, opened: _OpenSave) -> None:
        """All ranks have spoken. A save that was dropped counts under its first reason."""
        save = opened.save
        del self._open[save.save_id]
        self._unmark(save)
        parts = list(opened.ended.values())
        dropped = [part for part in parts if part.end is not SaveEnd.PUBLISHED]
        (dropped or parts)[0].count(self._tally)
        if not dropped:
            is_first = len(opened.beneath) == len(save.block_ids)
            stored = tuple(one for one in parts[0].block_hashes if one in self._known)
            self._on_published(None if is_first else save.parent_hash, stored)
        opened.owner.open_saves.discard(save.save_id)
        if opened.owner.is_held and not opened.owner.open_saves:
            self._orders.release.add(opened.owner.request.request_id)

    def _unmark(self, save: Save) -> None:
        for block_hash in save.block_hashes:
            if self._being_saved.get(block_hash) == save.save_id:
                del self._being_saved[block_hash]

    def __repr__(self) -> str:
        return f"<SavePlanner open={sorted(self._open)} hashes={len(self._being_saved)}>"
