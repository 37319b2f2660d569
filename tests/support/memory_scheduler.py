"""The scheduler side of `MemoryConnector`: what is promised, loaded, saved, published.

On the event loop, from memory. It keeps one thing across steps that the engine does not tell: the
saves that are on their way. Everything else follows from the step's message and the request, so a
preemption, a truncation or an end needs no care.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from memory_messages import (
    LoadBlock,
    LoadOrder,
    MemoryMetadata,
    MemoryReport,
    MemoryStats,
    SaveOrder,
)
from memory_store import MemoryStore, Record

from interlace.connectors.base import KVConnectorBase_V1
from interlace.connectors.step_tables import added_blocks, computed_before
from interlace.engine.kv_connector import KVCacheBlocks, KVConnectorOutput
from interlace.engine.kv_events import (
    MEDIUM_CPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from interlace.engine.request import Request
from interlace.engine.scheduler_output import SchedulerOutput


@dataclasses.dataclass(slots=True)
class Tracked:
    """A request that was admitted and has not ended."""

    request: Request
    block_ids: list[int]
    """All of its blocks, in order of position."""


@dataclasses.dataclass(slots=True)
class OpenSave:
    """A block that is to be copied, or was and is not published yet."""

    req_id: str
    key: bytes
    parent_key: bytes | None
    beneath: frozenset[int]
    """The block, and the request's blocks before it."""
    is_bad: bool = False
    """KV beneath it did not come, or it is not wanted any more."""
    copies: dict[int, Record | None] = dataclasses.field(default_factory=dict)
    """By rank, as they are reported."""


class MemorySchedulerSide(KVConnectorBase_V1):
    """The methods of the role SCHEDULER."""

    store: MemoryStore
    load_async: bool
    _stats: MemoryStats

    def _begin_scheduler_side(self) -> None:
        self._block_size = self._vllm_config.block_size
        self._num_ranks = self._vllm_config.parallel_config.world_size
        self._asked_at: dict[str, int] = {}  # request id -> tokens computed at its latest query
        self._tracked: dict[str, Tracked] = {}
        self._loads: list[LoadOrder] = []  # for the next message
        self._loading: set[str] = set()  # asynchronously, and not reported yet
        self._open_saves: dict[int, OpenSave] = {}
        self._last_save_id = 0
        self._held: set[str] = set()  # ended, and no worker knows yet
        self._events: list[KVCacheEvent] = []

    # ---------------------------------------------------------------- matching

    def key_of(self, request: Request, index: int) -> bytes:
        """What block number `index` is filed under: a hash of salt and of all tokens up to it."""
        return request.block_hashes[index]

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Whole stored blocks, without a gap; all of the prompt, if it is stored."""
        if not self._kv_transfer_config.is_kv_consumer:
            return 0, False
        self._asked_at[request.request_id] = num_computed_tokens
        end = self.end_of_stored(request, num_computed_tokens // self._block_size)
        return self.promise(request, num_computed_tokens, end)

    def end_of_stored(self, request: Request, first: int) -> int:
        """The first block from `first` on that is not stored."""
        end = first
        while end < len(request.block_hashes) and self.key_of(request, end) in self.store:
            end += 1
        return end

    def promise(self, request: Request, num_computed_tokens: int, end: int) -> tuple[int, bool]:
        """The answer, if blocks up to `end` are stored."""
        num_tokens = end * self._block_size - num_computed_tokens
        return num_tokens, self.load_async and num_tokens > 0

    # ---------------------------------------------------------------- loads

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Order the load of what was promised."""
        (block_ids,) = blocks.get_block_ids()
        self._tracked[request.request_id] = Tracked(request, block_ids)
        if num_external_tokens == 0:
            return
        start = self._asked_at[request.request_id]
        blocks_to_load = self.blocks_to_load(request, block_ids, start, start + num_external_tokens)
        self._loads.append(LoadOrder(request.request_id, self.load_async, tuple(blocks_to_load)))
        if self.load_async:
            self._loading.add(request.request_id)

    def blocks_to_load(
        self, request: Request, block_ids: list[int], start: int, end: int
    ) -> Iterator[LoadBlock]:
        """The blocks of the tokens [start, end)."""
        for index in range(start // self._block_size, end // self._block_size):
            yield LoadBlock(self.key_of(request, index), block_ids[index])

    # ---------------------------------------------------------------- a step's message

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MemoryMetadata:
        """What the workers have to do in the step."""
        self._follow_tables(scheduler_output)
        return MemoryMetadata(
            loads=self.take_loads(),
            saves=tuple(self._order_saves(scheduler_output)),
            preempted=scheduler_output.preempted_req_ids,
            held=self.take_held(scheduler_output),
        )

    def take_loads(self) -> tuple[LoadOrder, ...]:
        """The step's loads; the next message begins without any."""
        loads, self._loads = tuple(self._loads), []
        return loads

    def take_held(self, output: SchedulerOutput) -> frozenset[str]:
        """Held requests of whose end the step tells."""
        held = frozenset(self._held & output.finished_req_ids)
        self._held -= held
        return held

    def _follow_tables(self, output: SchedulerOutput) -> None:
        for req_id, added, resumed in added_blocks(output):
            table = self._tracked[req_id].block_ids
            if resumed:
                table.clear()
            table += added

    # ---------------------------------------------------------------- saves

    def _order_saves(self, output: SchedulerOutput) -> Iterator[SaveOrder]:
        """A save for each block that is full when the step ends and that nobody has yet."""
        if not self._kv_transfer_config.is_kv_producer:
            return
        owed = {save.key for save in self._open_saves.values() if not save.is_bad}
        for req_id, num_tokens in self.num_tokens_after(output).items():
            tracked = self._tracked[req_id]
            for index in self.full_blocks(tracked, num_tokens):
                key = self.key_of(tracked.request, index)
                if key not in self.store and key not in owed:
                    owed.add(key)
                    yield self._open_save(tracked, index, key)

    def num_tokens_after(self, output: SchedulerOutput) -> dict[str, int]:
        """Request id -> tokens whose KV is there when the step ends."""
        new = output.num_scheduled_tokens
        return {i: n + new[i] for i, n in computed_before(output).items()}

    def full_blocks(self, tracked: Tracked, num_tokens: int) -> range:
        """Blocks full of `num_tokens` tokens. One with a token that is still being sampled has no
        hash yet: a later step finds it."""
        return range(min(num_tokens // self._block_size, len(tracked.request.block_hashes)))

    def _open_save(self, tracked: Tracked, index: int, key: bytes) -> SaveOrder:
        self._last_save_id += 1
        req_id, block_ids = tracked.request.request_id, tracked.block_ids
        parent = self.key_of(tracked.request, index - 1) if index else None
        save = OpenSave(req_id, key, parent, frozenset(block_ids[: index + 1]))
        self._open_saves[self._last_save_id] = save
        return SaveOrder(self._last_save_id, req_id, key, block_ids[index])

    # ---------------------------------------------------------------- a step was applied

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Bad blocks first; then what is copied may be published."""
        self._loading -= connector_output.finished_recving or set()
        self.distrust(connector_output.invalid_block_ids)
        if connector_output.kv_cache_events is not None:
            self._forget_lost(connector_output.kv_cache_events.get_all_events())
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, MemoryReport):
            for save_id, copies in report.copies.items():
                self._take_copies(save_id, copies)

    def distrust(self, invalid: set[int]) -> None:
        """Nothing that stands on these blocks may be published."""
        for save in self._open_saves.values():
            save.is_bad |= not save.beneath.isdisjoint(invalid)

    def _forget_lost(self, events: Iterable[KVCacheEvent]) -> None:
        """The workers found these blocks damaged: they may be saved again."""
        for event in events:
            if isinstance(event, BlockRemoved):
                lost = [key for key in event.block_hashes if self.store.forget(key)]
                if lost:
                    self._events.append(BlockRemoved(lost, MEDIUM_CPU))

    def _take_copies(self, save_id: int, copies: dict[int, Record | None]) -> None:
        """Publish the block when each rank has copied it."""
        save = self._open_saves[save_id]
        save.copies.update(copies)
        if len(save.copies) < self._num_ranks:
            return
        del self._open_saves[save_id]
        records = {rank: one for rank, one in save.copies.items() if one is not None}
        if len(records) == self._num_ranks and not save.is_bad:
            self.publish(save, records)

    def publish(self, save: OpenSave, records: dict[int, Record]) -> None:
        """From now on the block can be found."""
        self.store.put(save.key, records)
        self._stats.count(published=1)
        self._events.append(BlockStored([save.key], save.parent_key, [], 0, medium=MEDIUM_CPU))

    # ---------------------------------------------------------------- the end of a request

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hold the request while a save of it is open, which may still read its blocks.

        Hold none that still loads: the end of its load frees its blocks, and no second report may
        come.
        """
        req_id = request.request_id
        self.forget(req_id)
        saves = any(save.req_id == req_id for save in self._open_saves.values())
        holds = saves and bool(block_ids) and req_id not in self._loading
        if holds:
            self._held.add(req_id)
        return holds, None

    def forget(self, req_id: str) -> None:
        """Remember nothing of a request that has ended, but its open saves."""
        self._asked_at.pop(req_id, None)
        self._tracked.pop(req_id, None)

    # ---------------------------------------------------------------- the rest

    def take_events(self) -> Iterable[KVCacheEvent]:
        """What was stored and removed since the last call."""
        events, self._events = self._events, []
        return events

    def reset_cache(self) -> bool:
        """Forget all that is stored, and publish nothing that is on its way."""
        self.store.clear()
        for save in self._open_saves.values():
            save.is_bad = True
        self._events.append(AllBlocksCleared())
        return True

    def what_is_left_of_scheduler_side(self) -> list[object]:
        """Whatever is remembered of any request."""
        maps = (self._asked_at, self._tracked, self._loads, self._loading, self._open_saves)
        return [some for some in (*maps, self._held) if some]
