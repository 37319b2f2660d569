"""The scheduler side of a `ScriptedConnector`: answers, block tables, what to load and to save.

Event loop, no I/O. A copy is stored when the step that made it was applied, unless the engine
knows of a bad block beneath it by then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

from interlace.connectors.conformance.script import Async, Pages, Script, Sync
from interlace.connectors.conformance.scripted_metadata import (
    LoadBlock,
    LoadJob,
    ScriptedMetadata,
    ScriptedWorkerMetadata,
)
from interlace.connectors.step_tables import added_blocks, computed_before
from interlace.engine.block_hash import BlockHash
from interlace.engine.config import KVTransferConfig
from interlace.engine.kv_connector import KVCacheBlocks, KVConnectorOutput
from interlace.engine.request import Request
from interlace.engine.scheduler_output import SchedulerOutput


@dataclasses.dataclass(slots=True)
class _Tracked:
    """One request that has been asked about or admitted, and has not ended."""

    request: Request
    block_ids: list[int] = dataclasses.field(default_factory=list)
    num_queries: int = 0
    num_loads: int = 0
    num_computed_tokens: int = 0
    """When the last match query came: where a load begins."""
    is_async: bool = False
    """What that query was answered."""
    num_end_queries: int = 0
    """Of `get_compute_end`, since then."""


@dataclasses.dataclass(frozen=True, slots=True)
class _SavingStep:
    """A step that copies blocks and has not been applied yet."""

    saves: dict[BlockHash, int]
    tables: list[list[int]]
    """Of all requests in the step."""
    bad: set[int] = dataclasses.field(default_factory=set)
    """Blocks reported as invalid since the step was planned."""


class ScriptedScheduler:
    """Follows the script and the scheduler's messages."""

    def __init__(self, script: Script, config: KVTransferConfig, block_size: int) -> None:
        self._script = script
        self._config = config
        self._block_size = block_size
        self._tracked: dict[str, _Tracked] = {}
        self._new_loads: list[LoadJob] = []  # since the last message
        self._loading: set[str] = set()  # asynchronously, and not reported yet
        self._not_brought: dict[str, int] = {}  # see `ScriptedMetadata`; by loads of `_loading`
        self._held: set[str] = set()  # and the workers do not know yet
        self._saving: dict[int, _SavingStep] = {}  # by step id

    def match(self, request: Request, num_computed_tokens: int) -> tuple[Any, Any]:
        """The answer to the request's next match query."""
        tracked = self._tracked.setdefault(request.request_id, _Tracked(request))
        answer = self._script.rule(request.request_id).answer(tracked.num_queries)
        tracked.num_queries += 1
        tracked.num_end_queries = 0
        self._not_brought.pop(request.request_id, None)
        tracked.num_computed_tokens = num_computed_tokens
        told: tuple[Any, Any]
        match answer:
            case _ if not self._config.is_kv_consumer:
                told = (0, False)
            case None:
                told = (None, False)
            case Sync(num_tokens):
                told = (self._amount(request, num_computed_tokens, num_tokens), False)
            case Async(num_tokens):
                amount = self._amount(request, num_computed_tokens, num_tokens)
                told = (amount, amount > 0)
            case _:
                told = answer
        tracked.is_async = told[1:] == (True,)
        return told

    def compute_end(self, request: Request) -> Any:
        """The answer to the next query about the request's load."""
        tracked = self._tracked[request.request_id]
        end = self._script.rule(request.request_id).compute_end(tracked.num_end_queries)
        is_asked_on = tracked.num_end_queries > 0
        tracked.num_end_queries += 1
        if isinstance(end, int) and (request.request_id in self._loading or not is_asked_on):
            num_tokens = max(0, end - tracked.num_computed_tokens)
            self._not_brought[request.request_id] = num_tokens // self._block_size
        return end

    def _amount(self, request: Request, num_computed: int, num_tokens: int | None) -> int:
        """So many tokens, but no more than the request lacks; None: what the store has."""
        if num_tokens is not None:
            return max(0, min(num_tokens, request.num_tokens - num_computed))
        index = num_computed // self._block_size
        hashes = request.block_hashes
        while index < len(hashes) and hashes[index] in self._script.store:
            index += 1
        return max(0, index * self._block_size - num_computed)

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_tokens: int) -> None:
        """Plan the load of `num_tokens`, if there are any."""
        tracked = self._tracked.setdefault(request.request_id, _Tracked(request))
        (tracked.block_ids,) = blocks.get_block_ids()
        if num_tokens == 0:
            return
        first = tracked.num_computed_tokens // self._block_size
        end = -(-(tracked.num_computed_tokens + num_tokens) // self._block_size)
        to_load = tuple(
            LoadBlock(tracked.block_ids[index], self._find(tracked, index))
            for index in range(first, end)
        )
        self._new_loads.append(LoadJob(request.request_id, tracked.is_async, to_load))
        tracked.num_loads += 1
        if tracked.is_async:
            self._loading.add(request.request_id)

    def _find(self, tracked: _Tracked, index: int) -> Pages | None:
        """What is to be loaded at that position; None if that fails."""
        request = tracked.request
        if self._script.rule(request.request_id).fails(tracked.num_loads, index):
            return None
        if index >= len(request.block_hashes):
            return None
        return self._script.store.get(request.block_hashes[index])

    def build(self, output: SchedulerOutput) -> ScriptedMetadata:
        """The step's message."""
        self._follow_tables(output)
        saves = self._choose_saves(output)
        if saves:
            tables = [list(self._tracked[i].block_ids) for i in output.num_scheduled_tokens]
            self._saving[output.step_id] = _SavingStep(saves, tables)
        loads, self._new_loads = tuple(self._new_loads), []
        held = frozenset(self._held & output.finished_req_ids)
        self._held -= held
        lost_loads = frozenset(self._loading & output.preempted_req_ids)
        self._end_loads(lost_loads)
        not_brought = {i: self._not_brought[i] for i in self._loading & self._not_brought.keys()}
        return ScriptedMetadata(output.step_id, loads, saves, held, not_brought, lost_loads)

    def _follow_tables(self, output: SchedulerOutput) -> None:
        for new in output.scheduled_new_reqs:
            self._tracked[new.req_id].block_ids = list(new.block_ids[0])
        for req_id, added, resumed in added_blocks(output):
            table = self._tracked[req_id].block_ids
            if resumed:
                table.clear()
            table += added

    def _choose_saves(self, output: SchedulerOutput) -> dict[BlockHash, int]:
        """Blocks that are full when the step ends, and that nobody stores or has copied yet."""
        saves: dict[BlockHash, int] = {}
        if not self._config.is_kv_producer:
            return saves
        owed = {block_hash for step in self._saving.values() for block_hash in step.saves}
        for req_id, num_computed in computed_before(output).items():
            if not self._script.rule(req_id).save:
                continue
            tracked = self._tracked[req_id]
            num_tokens = num_computed + output.num_scheduled_tokens[req_id]
            hashes = tracked.request.block_hashes[: num_tokens // self._block_size]
            # A token that a step in flight samples is not known yet: its block has no hash.
            for block_hash, block_id in zip(hashes, tracked.block_ids, strict=False):
                if block_hash not in self._script.store and block_hash not in owed:
                    saves.setdefault(block_hash, block_id)
        return saves

    def applied(self, output: KVConnectorOutput) -> None:
        """A step was applied: note what went wrong, then store its good copies."""
        self._end_loads(output.finished_recving or ())
        for step in self._saving.values():
            step.bad.update(output.invalid_block_ids)
        meta = output.kv_connector_worker_meta
        if isinstance(meta, ScriptedWorkerMetadata):
            for step_id, by_rank in meta.copies.items():
                in_order = [by_rank[rank] for rank in sorted(by_rank)]
                self._publish(self._saving.pop(step_id), in_order)

    def _end_loads(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._loading.discard(request_id)
            self._not_brought.pop(request_id, None)

    def _publish(self, step: _SavingStep, copies: list[dict[BlockHash, Pages]]) -> None:
        """Store what all ranks have copied, rank by rank."""
        bad = _on_bad_ground(step.tables, step.bad)
        for block_hash, block_id in step.saves.items():
            if block_id not in bad and all(block_hash in of_rank for of_rank in copies):
                pages = [page for of_rank in copies for page in of_rank[block_hash]]
                self._script.store[block_hash] = pages

    def finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks stay, and the answer's parameters."""
        self._tracked.pop(request.request_id, None)
        rule = self._script.rule(request.request_id)
        # The end of a load frees the blocks by itself, and only one report may.
        holds = rule.hold and bool(block_ids) and request.request_id not in self._loading
        if holds:
            self._held.add(request.request_id)
        params = rule.response_params
        return holds, None if params is None else dict(params)

    @property
    def is_idle(self) -> bool:
        """Whether no request is remembered, and nothing is on its way to or from a worker."""
        of_loads = (self._new_loads, self._loading, self._not_brought)
        left = (self._tracked, *of_loads, self._held, self._saving)
        return not any(left)


def _on_bad_ground(tables: Collection[list[int]], bad: set[int]) -> set[int]:
    """`bad`, and all blocks that stand behind one of them in any table, and so on."""
    while True:
        more = set(bad)
        for table in tables:
            first = next((i for i, block_id in enumerate(table) if block_id in bad), len(table))
            more.update(table[first:])
        if more == bad:
            return bad
        bad = more
