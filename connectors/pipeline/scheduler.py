"""PipelineConnector's scheduler side: promises what host records hold, orders loads and saves.

Runs on the event loop and never waits. What can be saved follows from each step's message and the
request's hashes, never from a count of its own, so preemption and truncation need no care.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

from interlace.connectors.pipeline.host_index import HostIndex
from interlace.connectors.pipeline.messages import (
    Load,
    PipelineHandshake,
    PipelineMetadata,
    PipelineReport,
)
from interlace.connectors.pipeline.options import LoadMode
from interlace.connectors.pipeline.planner import SavePlanner, Tracked
from interlace.connectors.pipeline.rates import Forecast, LoadRate, StepTimes, Way, choose_way
from interlace.connectors.pipeline.sched_runs import record_runs
from interlace.connectors.pipeline.sched_stats import Counter, PipelineStats
from interlace.connectors.step_tables import computed_before, follow_blocks
from interlace.engine.kv_connector import KVCacheBlocks, KVConnectorOutput
from interlace.engine.request import Request, RequestStatus
from interlace.engine.scheduler_output import SchedulerOutput


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """What the configuration says to the scheduler side."""

    block_size: int
    """Tokens."""
    max_step_tokens: int
    """That a step computes at most."""
    load_mode: LoadMode
    max_stall_s: float
    """See `choose_way`."""
    may_load: bool
    """A producer may not."""
    may_save: bool
    """A consumer may not."""


class _Offer(NamedTuple):
    """The answer to a request's latest match query; void unless blocks are allocated for it."""

    num_local: int
    """Tokens that were cached on the device."""
    way: Way | None
    """None: nothing is stored."""


class _OpenLoad(NamedTuple):
    """A load that was ordered, until the worker side has done with its records."""

    prefix: tuple[bytes, ...]
    """Hashes from the request's first block to the last one that is loaded."""
    records: dict[int, int]
    """Block id -> the record that it is loaded from, in order of position."""
    is_async: bool


class PipelineScheduler:
    """See the module's docstring. The methods are the protocol's, on the event loop."""

    def __init__(self, handshake: PipelineHandshake, settings: SchedulerSettings) -> None:
        """`handshake` is the worker side's, which has made the records."""
        self.index = HostIndex(handshake.num_records)
        self._settings = settings
        self._block_size = settings.block_size
        self._record_bytes = handshake.record_bytes
        self._load_rate = LoadRate(handshake.load_bytes_per_s)
        self._step_times = StepTimes()
        self._counter = Counter()
        self._planner = SavePlanner(self.index, self._counter)
        self._requests: dict[str, Tracked] = {}
        self._offers: dict[str, _Offer] = {}
        self._loads: list[Load] = []  # for the next metadata
        # Request id -> its loads, oldest first: an id may come again before a report.
        self._open_loads: dict[str, collections.deque[_OpenLoad]] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no request, load or save is remembered."""
        return not (
            self._requests
            or self._offers
            or self._loads
            or self._open_loads
            or self._planner.num_open
        )

    # ---------------------------------------------------------------- loads

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Tokens in whole stored blocks, with at least one token left to compute, if loading them
        is the best way. Changes nothing but which answer is the latest."""
        tracked = self._requests.get(request.request_id)
        if not self._settings.may_load or (tracked is not None and tracked.load_failed):
            return 0, False
        first = num_computed_tokens // self._block_size
        end = self._end_of_stored(request, first)
        way = self._choose(request, num_computed_tokens, end - first) if end > first else None
        self._offers[request.request_id] = _Offer(num_computed_tokens, way)
        if way is None or way is Way.RECOMPUTE:
            return 0, False
        return end * self._block_size - num_computed_tokens, way is Way.BULK

    def _end_of_stored(self, request: Request, first: int) -> int:
        """The first block from `first` on that is not stored, or holds the last token."""
        last = (request.num_tokens - 1) // self._block_size
        end = first
        while end < last and request.block_hashes[end] in self.index:
            end += 1
        return end

    def _choose(self, request: Request, num_local: int, num_blocks: int) -> Way:
        num_loaded = num_blocks * self._block_size
        num_rest = request.num_tokens - num_local - num_loaded
        num_running = self._num_running()
        num_first = min(num_rest + num_running, self._settings.max_step_tokens)
        step_bytes, beside_bytes = self._bytes_ahead()
        num_bytes = num_blocks * self._record_bytes
        forecast = Forecast(
            load_s=self._load_rate.seconds(step_bytes + num_bytes),
            bulk_load_s=self._load_rate.seconds(beside_bytes + num_bytes),
            recompute_s=self._step_times.seconds(num_loaded + num_rest, num_local),
            rest_s=self._step_times.seconds(num_rest, num_local + num_loaded),
            first_step_s=self._step_times.seconds(num_first, num_local + num_loaded),
            num_running=num_running,
        )
        return choose_way(self._settings.load_mode, forecast, self._settings.max_stall_s)

    def _num_running(self) -> int:
        running = RequestStatus.RUNNING
        return sum(one.request.status is running for one in self._requests.values())

    def _bytes_ahead(self) -> tuple[int, int]:
        """Bytes that go before a further load of the next step: (within the step, beside it)."""
        in_step = sum(run.num_blocks for one in self._loads if not one.is_async for run in one.runs)
        beside = sum(
            len(one.records) for loads in self._open_loads.values() for one in loads if one.is_async
        )
        return in_step * self._record_bytes, (in_step + beside) * self._record_bytes

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Note the request's blocks, and order the load of those that were promised."""
        (block_ids,) = blocks.get_block_ids()
        tracked = self._requests.setdefault(request.request_id, Tracked(request))
        tracked.block_ids = block_ids
        tracked.num_settled = 0
        self.index.touch(request.block_hashes[: len(block_ids)])
        offer = self._offers.pop(request.request_id, None)
        if offer is not None and offer.way is not None:
            self._count_choice(offer.way, num_external_tokens)
        if num_external_tokens == 0:
            return
        assert offer is not None, "blocks are loaded that were not promised"
        self._order_load(tracked, offer, num_external_tokens)

    def _count_choice(self, way: Way, num_external_tokens: int) -> None:
        """Another connector, or a part of a block, may have been taken in place of ours."""
        if way is Way.RECOMPUTE or num_external_tokens:
            self._counter.add(f"chose_{way.name.lower()}")

    def _order_load(self, tracked: Tracked, offer: _Offer, num_tokens: int) -> None:
        request = tracked.request
        first = offer.num_local // self._block_size
        end = (offer.num_local + num_tokens) // self._block_size
        records = self.index.pin(request.block_hashes[first:end])
        block_ids = tracked.block_ids[first:end]
        is_async = offer.way is Way.BULK
        self._loads.append(Load(request.request_id, record_runs(records, block_ids), is_async))
        opened = _OpenLoad(
            tuple(request.block_hashes[:end]),
            dict(zip(block_ids, records, strict=True)),
            is_async,
        )
        self._open_loads.setdefault(request.request_id, collections.deque()).append(opened)
        tracked.is_loading = is_async

    # ---------------------------------------------------------------- steps

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PipelineMetadata:
        """The step's orders."""
        follow_blocks(scheduler_output, self._requests)
        for request_id in scheduler_output.preempted_req_ids & self._requests.keys():
            self._planner.fence(self._requests[request_id])
        before = computed_before(scheduler_output)
        for request_id, num_new in scheduler_output.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            if tracked is not None and self._settings.may_save:
                num_computed = before[request_id] + num_new
                self._planner.plan(tracked, num_computed // self._block_size)
        orders = self._planner.take_orders()
        loads, self._loads = self._loads, []
        return PipelineMetadata(
            step_id=scheduler_output.step_id,
            loads=tuple(loads),
            saves=tuple(orders.saves),
            fences=frozenset(orders.fences),
            release=frozenset(orders.release),
            num_tokens=scheduler_output.total_num_scheduled_tokens,
            num_context_tokens=sum(before.values()),
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Bad blocks first, then what the worker side reports of loads and saves."""
        invalid = connector_output.invalid_block_ids
        if invalid:
            self._planner.distrust(invalid)
            self._distrust_loads(invalid)
        for request_id in (connector_output.finished_recving or set()) & self._requests.keys():
            self._requests[request_id].is_loading = False
        report = connector_output.kv_connector_worker_meta
        if not isinstance(report, PipelineReport):
            return
        for request_id in report.loaded:
            self._end_load(request_id, invalid)
        self._planner.allow(report.copied)
        self._planner.fail(report.failed)
        self._load_rate.add(report.loads)
        self._step_times.add(report.steps)

    def _distrust_loads(self, invalid: set[int]) -> None:
        """Records that could not be loaded are not promised again, and who lost some is promised
        nothing more: a load that fails each time would be promised for ever."""
        for loads in self._open_loads.values():
            for opened in loads:
                for block_id in opened.records.keys() & invalid:
                    self.index.forget(opened.records[block_id])
        for tracked in self._requests.values():
            tracked.num_settled = 0
            tracked.load_failed |= not invalid.isdisjoint(tracked.block_ids)

    def _end_load(self, request_id: str, invalid: set[int]) -> None:
        """A request's oldest load reads no record any more. What it loaded was used last of all
        only now, and its head still goes last."""
        loads = self._open_loads.get(request_id)
        if loads is None:
            return
        opened = loads.popleft()
        if not loads:
            del self._open_loads[request_id]
        self.index.unpin(list(opened.records.values()))
        self.index.touch(opened.prefix)
        num_failed = len(opened.records.keys() & invalid)
        self._counter.add("blocks_loaded", len(opened.records) - num_failed)
        self._counter.add("blocks_failed_to_load", num_failed)

    # ---------------------------------------------------------------- ends

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hold the request while a save of it is open; plan what is known to be full only now: it
        is copied in the next step.

        Plan nothing of a request that failed. Hold none that still loads: the end of its load
        frees its blocks, and no second report may come. Nor one without blocks: the next step may
        hand on what a preemption took, so its saves are fenced.
        """
        self._offers.pop(request.request_id, None)
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None or tracked.is_loading:
            return False, None
        if not block_ids:
            self._planner.fence(tracked)
            return False, None
        self.index.touch(request.block_hashes[: len(block_ids)])
        if self._settings.may_save and request.status is not RequestStatus.FINISHED_ERROR:
            tracked.block_ids = list(block_ids)
            self._planner.plan(tracked, request.num_computed_tokens // self._block_size)
        return self._planner.hold(tracked), None

    def reset_cache(self) -> None:
        """Forget all that is stored or being saved. Records are free when nothing reads or fills
        them any more."""
        self.index.clear()
        self._planner.distrust_all()

    def take_stats(self) -> PipelineStats | None:
        """What was counted since the last call; None if it is nothing."""
        return self._counter.take()

    def __repr__(self) -> str:
        return (
            f"<PipelineScheduler requests={len(self._requests)} {self.index!r} {self._planner!r}>"
        )
