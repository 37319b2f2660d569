"""ExampleConnector's scheduler side: promises what the index holds, orders loads and saves.

Runs on the event loop and does no file I/O. What can be saved follows from each step's message and
the request's hashes, never from a count of its own, so preemption and truncation need no care.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from interlace.connectors.example_messages import (
    ExampleMetadata,
    ExampleWorkerMetadata,
    Load,
    LoadPiece,
)
from interlace.connectors.example_save_planner import SavePlanner, Tracked
from interlace.connectors.kv_folders.counters import Tally
from interlace.connectors.kv_folders.index import FolderIndex
from interlace.connectors.kv_folders.known import BlockPlace
from interlace.connectors.step_tables import computed_before, follow_blocks
from interlace.engine.kv_connector import KVCacheBlocks, KVConnectorOutput
from interlace.engine.kv_events import MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from interlace.engine.request import Request, RequestStatus
from interlace.engine.scheduler_output import SchedulerOutput

MAX_EVENTS = 4096
"""Events that nobody has taken; beyond it the oldest are dropped, and counted."""
_NOWHERE = BlockPlace("", 0)


class ExampleScheduler:
    """See the module's docstring. The methods are the protocol's, on the event loop."""

    def __init__(
        self,
        index: FolderIndex,
        tally: Tally,
        *,
        num_ranks: int,
        block_size: int,
        longest_run: int,
        load_async: bool,
        may_load: bool,
        may_save: bool,
    ) -> None:
        """`block_size` is in tokens, `longest_run` of saved blocks in blocks. A producer may not
        load, a consumer may not save."""
        self._index = index
        self._known = index.known
        self._num_ranks = num_ranks
        self._tally = tally
        self._block_size = block_size
        self._load_async = load_async
        self._may_load = may_load
        self._may_save = may_save
        self._planner = SavePlanner(
            index.known,
            tally,
            num_ranks=num_ranks,
            block_size=block_size,
            longest_run=longest_run,
            on_published=self._note_stored,
        )
        self._requests: dict[str, Tracked] = {}
        self._num_local: dict[str, int] = {}  # request id -> tokens it had at its latest query
        self._loads: list[Load] = []  # for the next metadata
        # Block -> ranks that have loaded their part of it, until all have.
        self._loaded: collections.Counter[int] = collections.Counter()
        self._events: collections.deque[KVCacheEvent] = collections.deque(maxlen=MAX_EVENTS)

    # ---------------------------------------------------------------- loads

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens in whole blocks that all ranks have stored, with at least one token left to
        compute."""
        tracked = self._requests.get(request.request_id)
        if not self._may_load or (tracked is not None and tracked.load_failed):
            return 0, False
        if not self._index.is_ready:
            return None, False
        first = num_computed_tokens // self._block_size
        last = (request.num_tokens - 1) // self._block_size
        end = first
        while end < last and request.block_hashes[end] in self._known:
            end += 1
        self._num_local[request.request_id] = num_computed_tokens
        if end == first:
            return 0, False
        return end * self._block_size - num_computed_tokens, self._load_async

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Note the request's blocks, and order the load of those that were promised."""
        (block_ids,) = blocks.get_block_ids()
        tracked = self._requests.setdefault(request.request_id, Tracked(request))
        tracked.block_ids = block_ids
        tracked.num_settled = 0
        if num_external_tokens == 0:
            return
        num_local = self._num_local.get(request.request_id, 0)
        first = num_local // self._block_size
        end = -(-(num_local + num_external_tokens) // self._block_size)
        hashes = request.block_hashes[first:end]
        pieces = tuple(
            tuple(self._pieces(rank, hashes, block_ids[first:end]))
            for rank in range(self._num_ranks)
        )
        self._loads.append(Load(request.request_id, pieces, self._load_async))
        self._planner.expect(hashes)
        self._forget_parts(block_ids[first:end])
        tracked.is_loading = self._load_async

    def _pieces(
        self, rank: int, hashes: Sequence[bytes], block_ids: Sequence[int]
    ) -> Iterator[LoadPiece]:
        """Neighbours in one folder together. Blocks that have gone since are in none."""
        places = [self._known.find(block_hash, rank) or _NOWHERE for block_hash in hashes]
        begin = 0
        for i in range(1, len(places) + 1):
            folder, first = places[begin]
            if i == len(places) or places[i] != (folder, first + i - begin):
                yield LoadPiece(folder, first, tuple(hashes[begin:i]), tuple(block_ids[begin:i]))
                begin = i

    # ---------------------------------------------------------------- steps

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ExampleMetadata:
        """The step's orders."""
        self._index.keep_fresh()
        follow_blocks(scheduler_output, self._requests)
        before = computed_before(scheduler_output)
        for request_id, num_new in scheduler_output.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            if tracked is not None and self._may_save:
                begin, end = before[request_id], before[request_id] + num_new
                self._planner.plan(tracked, begin // self._block_size, end // self._block_size)
        orders = self._planner.take_orders()
        loads, self._loads = self._loads, []
        return ExampleMetadata(
            loads=tuple(loads),
            saves=tuple(orders.saves),
            publish=frozenset(orders.publish),
            discard=frozenset(orders.discard),
            release=frozenset(orders.release),
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Bad blocks first, then what the worker side reports of loads and saves."""
        invalid = connector_output.invalid_block_ids
        if invalid:
            self._planner.distrust(invalid)
            self._look_again(invalid)
            self._forget_parts(invalid)
        for request_id in (connector_output.finished_recving or set()) & self._requests.keys():
            self._requests[request_id].is_loading = False
        report = connector_output.kv_connector_worker_meta
        if not isinstance(report, ExampleWorkerMetadata):
            return
        for lost in report.lost:
            self._known.drop(lost.folder, lost.signature, lost.retry_s)
            self._tally.add(damaged_folders=lost.was_removed)
        self._count_loaded(report.loaded, invalid)
        self._planner.allow(report.copied)
        for ended in report.ended:
            self._planner.end(ended)

    def _forget_parts(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self._loaded.pop(block_id, None)

    def _count_loaded(self, block_ids: Iterable[int], invalid: set[int]) -> None:
        """Ranks may report their parts of a block in different steps."""
        num_whole = 0
        for block_id in block_ids:
            if block_id in invalid:
                continue
            self._loaded[block_id] += 1
            if self._loaded[block_id] == self._num_ranks:
                del self._loaded[block_id]
                num_whole += 1
        self._tally.add(blocks_loaded=num_whole)

    def _note_stored(self, parent_hash: bytes | None, block_hashes: tuple[bytes, ...]) -> None:
        self._note_lost()
        if block_hashes:
            self._note(BlockStored(block_hashes, parent_hash, (), 0, medium=MEDIUM_STORAGE))

    def _note_lost(self) -> None:
        """Before what is stored after that: a block may come back."""
        for block_hashes in self._known.take_lost():
            self._note(BlockRemoved(block_hashes, MEDIUM_STORAGE))

    def _note(self, event: KVCacheEvent) -> None:
        self._tally.add(events_dropped=len(self._events) == MAX_EVENTS)
        self._events.append(event)

    def take_events(self) -> list[KVCacheEvent]:
        """Runs that were published, and lost, since the last call."""
        self._note_lost()
        taken = list(self._events)
        self._events.clear()
        return taken

    def _look_again(self, invalid: set[int]) -> None:
        """Blocks that were stored are so no longer. Who lost some does not try them again: a
        load that fails each time would be promised for ever."""
        for tracked in self._requests.values():
            tracked.num_settled = 0
            tracked.load_failed |= not invalid.isdisjoint(tracked.block_ids)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hold the request while a save of it is open; plan what was gathered, or is known to be
        full only now: it is copied in the next step.

        Plan nothing of a request that failed. Hold none that still loads: the end of its load
        frees its blocks, and no second report may come.
        """
        self._num_local.pop(request.request_id, None)
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None or tracked.is_loading:
            return False, None
        failed = request.status is RequestStatus.FINISHED_ERROR
        if self._may_save and tracked.block_ids and not failed:
            tracked.block_ids = list(block_ids)
            num_filled = request.num_computed_tokens // self._block_size
            self._planner.plan(tracked, num_filled, num_filled, is_last=True)
        tracked.is_held = bool(tracked.open_saves)
        return tracked.is_held, None

    def __repr__(self) -> str:
        return f"<ExampleScheduler requests={len(self._requests)} {self._planner!r}>"
