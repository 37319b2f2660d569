"""Decides which tokens of which requests the next step computes, and applies what came back.

There are no prefill and decode phases, only tokens to catch up. Plain synchronous code on the
loop thread: it never awaits, does no I/O and reads no clock but the injected one. Knows nothing
of text, tokenizers or the device.

A KV connector may bring a part of a prompt. In the step itself (the request runs, and no further
step is planned until this one is applied), or asynchronously (the request holds its blocks, in
the state WAITING_FOR_REMOTE_KVS, until the connector reports), or from the back, while the steps
compute the request from the front; where the two have met, it goes on behind the load. Requests
that wait with blocks are served before those without, and the blocks that they still need are left
to them, so none of them ever waits for one that waits for it.

Preemption: when a running request cannot get its next block, the request that is last in
scheduling order gives up all of its blocks and is computed again later. That happens only while
no step is in flight; with steps in flight the scheduler first lets them drain, so a victim never
has a token under way and its blocks are free at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, NamedTuple

from interlace.engine.admission import NotNow, Start, find_start
from interlace.engine.bad_kv import Lost, set_back
from interlace.engine.block_pool import KVCacheBlock
from interlace.engine.config import CacheConfig, SchedulerConfig
from interlace.engine.connector_calls import ConnectorCalls
from interlace.engine.connector_events import publish
from interlace.engine.errors import ConnectorError
from interlace.engine.events import (
    EventBus,
    RequestPreempted,
    RequestQueued,
    RequestScheduled,
    StepDone,
    StepScheduled,
)
from interlace.engine.kv_cache_manager import KVCacheManager
from interlace.engine.kv_connector import KVConnectorOutput
from interlace.engine.outputs import ModelRunnerOutput, TokenLogprobs
from interlace.engine.ports import Clock, SchedulerConnector, StepRunner
from interlace.engine.request import Request, RequestStatus
from interlace.engine.request_queue import RequestQueue
from interlace.engine.scheduler_output import SchedulerOutput
from interlace.engine.scheduler_stats import SchedulerStats
from interlace.engine.step_plan import ScheduledRequest, StepPlan, build_output
from interlace.engine.transfer_ledger import TransferLedger

if TYPE_CHECKING:
    from interlace.engine.connector_metrics import ConnectorMetrics

logger = logging.getLogger(__name__)

MAX_DEFERRED = 32
"""After so many answers of "ask again" in one `schedule()`, the next one goes on behind them: each
question takes a walk through the request's hashes."""
MAX_BEGUN_LOADS = 32
"""Asynchronous loads that begin with one step: they take no budget and no place."""


@dataclasses.dataclass(frozen=True, slots=True)
class RequestUpdate:
    """What one applied step brought for one request."""

    request: Request
    new_token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None


class _Unsettled(NamedTuple):
    """A step whose tokens were taken, and nothing else yet."""

    step_id: int
    reports: KVConnectorOutput | None
    num_stray_reports: int
    num_sampled: int
    sampled_req_ids: tuple[str, ...] = ()
    tokens_s: float | None = None


class Scheduler:
    """Continuous batching over one block pool. See the module's docstring."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache_config: CacheConfig,
        eos_token_ids: Iterable[int],
        clock: Clock,
        events: EventBus,
        connector: SchedulerConnector | None = None,
        kv_load_failure_policy: Literal["fail", "recompute"] = "fail",
        metrics: ConnectorMetrics | None = None,
    ) -> None:
        """Shows the pool to the `connector`; `metrics` takes its statistics.

        Raises: `ConnectorError`.
        """
        self.config = config
        self.kv_cache = KVCacheManager(cache_config, clock, events)
        self.requests: dict[str, Request] = {}
        """Every request that has not ended, by id."""
        self.waiting = RequestQueue(config.policy)
        """Those that hold no blocks."""
        self.parked = RequestQueue(config.policy)
        """Those that hold blocks and do not run: KV is being loaded, or was and they wait for a
        place."""
        self.running = RequestQueue(config.policy)
        self.stats = SchedulerStats()
        pool_tokens = self.kv_cache.pool.num_usable_blocks * cache_config.block_size
        self.max_total_tokens = min(config.max_model_len, pool_tokens)
        """A request ends with `length` when prompt and output reach this."""
        self._eos_token_ids = frozenset(eos_token_ids)
        self._clock = clock
        self._events = events
        self._connector = None if connector is None else ConnectorCalls(connector, clock)
        self._metrics = metrics
        if self._connector is not None:
            self._connector.bind_pool(self.kv_cache.pool)
        self._recomputes = kv_load_failure_policy == "recompute"
        self._transfers = TransferLedger()
        self._preempted: list[Request] = []  # since the last schedule()
        self._failed: list[Request] = []  # ended by schedule(), their callers not told yet
        self._some_deferred = False  # whether the connector asked to be asked again
        self._ask_from = 0  # the place in the waiting queue where the next schedule() begins
        self._finished_req_ids: set[str] = set()  # since the last schedule()
        self._unoffered: list[ScheduledRequest] = []  # of the newest step
        self._inflight: deque[StepPlan] = deque()
        self._last_step_id = 0
        self._last_applied_step = 0
        self._unsettled: _Unsettled | None = None
        self._settle_error: Exception | None = None
        self._must_drain = False

    def connect(self, runner: StepRunner) -> None:
        """Let the connector's two sides learn of each other. Device thread, before the first step.

        Raises: `ConnectorError`.
        """
        if self._connector is not None:
            runner.set_finished_count(self._connector.finished_count())
            self._connector.shake_hands(runner.get_handshake_metadata())

    # ---------------------------------------------------------------- requests come and go

    def add_request(self, request: Request) -> None:
        """Queue a request whose prompt was checked to fit (`max_total_tokens`)."""
        assert not self.knows(request.request_id)
        assert request.num_prompt_tokens < self.max_total_tokens
        self.requests[request.request_id] = request
        self.waiting.add(request)
        if self._events.active:
            self._events.emit(
                RequestQueued(
                    self._clock.monotonic(),
                    request.request_id,
                    request.num_prompt_tokens,
                    request.priority,
                )
            )

    def knows(self, request_id: str) -> bool:
        """Whether the id is in use: by an unfinished request, or by one whose blocks must stay."""
        return request_id in self.requests or request_id in self._transfers

    def finish_request(
        self,
        request: Request,
        status: RequestStatus,
        *,
        stop_reason: str | int | None = None,
        error: str | None = None,
    ) -> None:
        """End a request in whatever state it is; does nothing if it has ended.

        Its blocks return to the pool when no step in flight touches them any more; if the
        connector reads or fills them, when it reports that it does no longer.
        """
        if request.is_finished:
            return
        assert status.is_finished
        self.offer_blocks()
        was_loading = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        is_loading = self._transfers.is_loading(request)
        self._transfers.forget_load(request)
        self._queue_of(request).remove(request)
        request.status = status
        request.stop_reason = stop_reason
        request.error = error
        stays = self._ask_whether_blocks_stay(request)
        if was_loading:
            request.num_computed_tokens = 0  # nobody has checked what arrived
        del self.requests[request.request_id]
        self._finished_req_ids.add(request.request_id)
        if stays or is_loading:
            self._transfers.hold(request, is_loading=is_loading, stays=stays)
        else:
            self.kv_cache.free(request, self._last_applied_step)
        self._count(num_finished_requests=1)
        if request.response_kv_transfer_params:
            self.settle_unheard()  # what is reported may change them before they are delivered

    def count_unqueued_end(self) -> None:
        """A request has ended that was never added."""
        self._count(num_finished_requests=1)

    def _queue_of(self, request: Request) -> RequestQueue:
        if request.status is RequestStatus.RUNNING:
            return self.running
        return self.parked if request in self.parked else self.waiting

    def _ask_whether_blocks_stay(self, request: Request) -> bool:
        """Tell the connector of the end. What it raises is this request's own error."""
        if self._connector is None:
            return False
        try:
            stays, request.response_kv_transfer_params = self._connector.finished(request)
        except ConnectorError as error:
            logger.exception("request %s: the connector failed at its end", request.request_id)
            request.status = RequestStatus.FINISHED_ERROR
            request.error = str(error)
            return False
        return stays

    def take_failed(self) -> list[RequestUpdate]:
        """Requests that `schedule()` has ended, since a connector hook called for them failed."""
        failed, self._failed = self._failed, []
        return [RequestUpdate(request, (), None) for request in failed]

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        """Forget all cached content; False while a request or a step in flight needs any block.

        A step in flight that touches blocks holds them, be it for a request that has ended; so
        does a connector that reads or fills them. With `reset_connector` the connector forgets
        too, if it can: else False, though the pool has forgotten. Raises: `ConnectorError`.
        """
        self.settle()
        if not self.kv_cache.pool.reset_prefix_cache():
            return False
        if not reset_connector or self._connector is None:
            return True
        return self._connector.reset_cache()

    def close(self) -> None:
        """End the connector's scheduler side. Any thread, after the last step."""
        if self._connector is not None:
            self._connector.shutdown()

    @property
    def num_inflight_steps(self) -> int:
        """Steps scheduled and not yet applied, all of them."""
        return len(self._inflight) + (self._unsettled is not None)

    @property
    def has_requests(self) -> bool:
        """Whether any has not ended."""
        return len(self.requests) > 0

    @property
    def num_waiting_requests(self) -> int:
        """Unfinished requests that do not run."""
        return len(self.waiting) + len(self.parked)

    @property
    def num_held_requests(self) -> int:
        """Ended requests whose blocks stay until the connector reports."""
        return len(self._transfers)

    @property
    def owes_connector(self) -> bool:
        """Whether the connector has to hear of an end, or holds blocks of an ended request."""
        if self._connector is None:
            return False
        return len(self._transfers) > 0 or len(self._finished_req_ids) > 0

    @property
    def awaits_connector(self) -> bool:
        """Whether an empty step may bring news: of a load, a held request, or a match query."""
        return (
            len(self._transfers) > 0
            or self._some_deferred
            or any(r.awaits_load for r in (*self.parked, *self.running))
        )

    # ---------------------------------------------------------------- planning a step

    def schedule(
        self, *, poll: bool = False, may_poll_behind: bool = False
    ) -> SchedulerOutput | None:
        """Plan one step, or return None if there is nothing to do now.

        Runs to the end without awaiting. Every request in the plan has its blocks; its
        `num_computed_tokens` already counts the step, so that the next step can be planned
        before this one is applied. A plan without tokens delivers `finished_req_ids`, lets loads
        begin, or, with `poll`, asks the connector for news: while nothing is in flight, or, with
        `may_poll_behind`, behind the only step that is. Raises: `ConnectorError`, fatal.
        """
        self.settle()
        if self._inflight and (self._must_drain or self._inflight[-1].is_barrier):
            return None
        self.offer_blocks()
        self._must_drain = self._some_deferred = False
        plan = StepPlan(self._last_step_id + 1, self.config.max_num_batched_tokens)
        plan.preempted, self._preempted = self._preempted, []
        self._schedule_running(plan)
        if not plan.preempted and not self._must_drain:
            self._schedule_parked(plan)
            self._schedule_waiting(plan)
        if plan.scheduled or plan.begun_loads:
            return self._commit(plan)
        polls = poll and self.awaits_connector
        if not self._inflight:
            if polls or self._finished_req_ids or plan.preempted:
                return self._commit(plan)
        elif polls and may_poll_behind and self._computes_last and not plan.preempted:
            return self._commit(plan)
        self._preempted = plan.preempted
        return None

    @property
    def _computes_last(self) -> bool:
        """Whether one step is in flight, and computes, and nobody waits for its end to preempt."""
        if self._must_drain or len(self._inflight) != 1:
            return False
        return bool(self._inflight[0].scheduled)

    def _schedule_running(self, plan: StepPlan) -> None:
        """Let running requests catch up, in order."""
        for request in self.running:
            if plan.budget == 0 or request.status is not RequestStatus.RUNNING:
                break  # whoever was preempted stood at the tail: nobody is left behind it
            if self._ends_with_what_is_in_flight(request):
                continue
            end = self._end_of_plannable(request)
            computed = request.num_computed_tokens
            num_tokens = min(end - computed, plan.budget)
            if num_tokens <= 0:
                continue
            new_blocks = self._allocate_or_preempt(request, computed + num_tokens, plan.preempted)
            if new_blocks is None:
                break
            self._plan(
                plan,
                ScheduledRequest(request, num_tokens, computed, new_blocks, request.status),
            )

    def _end_of_plannable(self, request: Request) -> int:
        """Up to where steps may compute a running request; takes a load from the back, if it has
        come and met what was computed, for done."""
        if request.hole_end is None:
            return request.num_tokens_in_flight
        end = min(self._hole_start(request), request.hole_end)
        if request.num_computed_tokens < end or self._transfers.is_loading(request):
            return end
        self._close_hole(request)
        return request.num_tokens_in_flight

    def _hole_start(self, request: Request) -> int:
        """Asks the connector while the load goes on, and once more when it has ended."""
        if request.hole_start is not None:
            return request.hole_start
        assert self._connector is not None
        block_size = self.kv_cache.block_size
        end = self._connector.compute_end(request, request.load_end, block_size)
        if end is None:
            raise ConnectorError(
                f"{self._connector.name}.get_compute_end answered None for a load from the back:"
                " give a number until you were asked once after get_finished has reported its end."
            )
        if not self._transfers.is_loading(request):
            request.hole_start = end
        return end

    def _close_hole(self, request: Request) -> None:
        """Let the request go on behind what was loaded from the back."""
        first, stop = request.num_computed_tokens, request.hole_end
        assert stop is not None
        self._transfers.forget_load(request)
        request.hole_end = None
        if stop <= first:
            return
        self.kv_cache.publish_loaded(request, stop)
        # Something must be computed to sample from.
        request.num_computed_tokens = min(stop, request.num_tokens - 1)
        if request.num_preemptions == 0:
            request.num_external_cached_tokens = request.num_computed_tokens - first

    def _allocate_or_preempt(
        self, request: Request, num_tokens: int, preempted: list[Request]
    ) -> list[KVCacheBlock] | None:
        """Blocks for `request`, taken from those behind it if need be. None: not in this step."""
        while True:
            new_blocks = self.kv_cache.allocate(request, num_tokens)
            if new_blocks is not None:
                return new_blocks
            if self._inflight:
                self._must_drain = True
                return None
            victim = self.running.tail
            self._preempt(victim)
            preempted.append(victim)
            if victim is request:
                return None

    def _schedule_parked(self, plan: StepPlan) -> None:
        """Let requests run whose load has ended, in order, while budget and places last."""
        for request in self.parked:
            if not self._is_loaded(request):
                continue
            if plan.budget == 0 or len(self.running) >= self.config.max_num_seqs:
                continue
            computed = request.num_computed_tokens
            num_tokens = min(request.num_tokens - computed, plan.budget)
            new_blocks = self.kv_cache.allocate(request, computed + num_tokens)
            if new_blocks is None:
                continue
            self._tell_allocated(request, 0)
            self.parked.remove(request)
            self._record_admission(request, plan, min(request.load_start, computed), computed)
            self._run(
                plan, ScheduledRequest(request, num_tokens, computed, new_blocks, request.status)
            )

    def _is_loaded(self, request: Request) -> bool:
        """Whether a parked request has what it can build on; takes a load that has ended for done.

        If nothing is left, or what is left to fill is held by others too, the request queues anew.
        """
        if self._transfers.is_loading(request):
            return False
        has_ended = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        if has_ended:
            self._transfers.forget_load(request)
            was_preempted = request.num_preemptions > 0
            request.status = RequestStatus.PREEMPTED if was_preempted else RequestStatus.WAITING
        if request.num_computed_tokens == 0 or self._shares_what_it_lost(request):
            self.parked.remove(request)
            request.num_computed_tokens = 0
            self.kv_cache.free(request, self._last_applied_step)
            self.waiting.add(request)
            return False
        if has_ended:
            self.kv_cache.publish_loaded(request, request.num_computed_tokens)
            # Something must be computed to sample from.
            request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        return True

    def _schedule_waiting(self, plan: StepPlan) -> None:
        """Admit waiting requests, in order, while budget, places and blocks last."""
        place, self._ask_from = self._ask_from, 0
        num_deferred = 0
        num_reserved = self._num_reserved_blocks()
        while (
            plan.budget > 0
            and place < len(self.waiting)
            and len(self.running) < self.config.max_num_seqs
            and len(plan.begun_loads) < MAX_BEGUN_LOADS
        ):
            if num_deferred == MAX_DEFERRED:
                self._ask_from = place
                return
            request = self.waiting[place]
            self.offer_blocks(plan.step_id)  # it may share what this very step fills
            try:
                start = find_start(request, self.kv_cache, self._connector, num_reserved)
            except ConnectorError as error:
                logger.exception("request %s failed in the connector", request.request_id)
                self._failed.append(request)
                self.finish_request(request, RequestStatus.FINISHED_ERROR, error=str(error))
                continue
            if start is NotNow.NO_ROOM:
                self._make_sure_that_somebody_frees_blocks(request)
                return
            if start is NotNow.ASK_AGAIN:
                self._some_deferred = True
                num_deferred += 1
                place += 1
                continue
            self._admit(plan, request, start)
            if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                num_reserved += self.kv_cache.num_missing_blocks(request)

    def _make_sure_that_somebody_frees_blocks(self, request: Request) -> None:
        """A stall would need a head that no empty pool can hold; admission refuses those."""
        holders = (self.running, self.parked, self._inflight, self._transfers)
        if any(len(holder) for holder in holders):
            return
        assert self._connector is not None, f"{request!r} can never be scheduled"
        self._some_deferred = True  # the connector holds blocks of the pool: ask again

    def _num_reserved_blocks(self) -> int:
        """Blocks that parked requests still need for what they know."""
        return sum(map(self.kv_cache.num_missing_blocks, self.parked))

    def _admit(self, plan: StepPlan, request: Request, start: Start) -> None:
        """Give a waiting request its blocks, and let it run or load."""
        hit, loaded = start.hit, start.loaded
        if start.num_asked_tokens:
            self._count(
                num_connector_queried_tokens=start.num_asked_tokens,
                num_connector_hit_tokens=len(loaded),
            )
        self.waiting.remove(request)
        self.kv_cache.take_hit(request, hit, plan.step_id)
        if loaded:
            request.load_step_id = plan.step_id
        if start.compute_end is not None:
            self._begin_load_from_the_back(plan, request, start)
            return
        if start.is_async:
            self._begin_load(plan, request, loaded)
            return
        # Something must be computed to sample from, even if the connector brings all.
        computed = min(start.num_tokens, request.num_tokens - 1)
        num_tokens = min(request.num_tokens - computed, plan.budget)
        new_blocks = self._allocate(plan, request, computed + num_tokens, loaded)
        item = ScheduledRequest(
            request, num_tokens, computed, new_blocks, request.status, hit.tail, loaded
        )
        self._record_admission(request, plan, hit.num_tokens, computed)
        self._run(plan, item)

    def _begin_load(self, plan: StepPlan, request: Request, loaded: range) -> None:
        self._allocate(plan, request, loaded.stop, loaded)
        request.load_start = loaded.start
        request.num_computed_tokens = loaded.stop
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        self.parked.add(request)
        plan.begun_loads.append(request)

    def _begin_load_from_the_back(self, plan: StepPlan, request: Request, start: Start) -> None:
        assert start.compute_end is not None
        computed, loaded = start.hit.num_tokens, start.loaded
        new_blocks = self._allocate(plan, request, loaded.stop, loaded)
        request.hole_end = request.load_end = loaded.stop
        request.hole_start = None
        plan.begun_loads.append(request)
        num_tokens = min(start.compute_end - computed, plan.budget)
        self._record_admission(request, plan, computed, computed)
        self._run(plan, ScheduledRequest(request, num_tokens, computed, new_blocks, request.status))

    def _allocate(
        self, plan: StepPlan, request: Request, num_tokens: int, loaded: range
    ) -> list[KVCacheBlock]:
        """Blocks for an admitted request; the connector hears of them."""
        blocks = self.kv_cache.allocate(request, max(num_tokens, loaded.stop))
        assert blocks is not None, "admission has counted them"
        index, num_in_last = divmod(loaded.stop, self.kv_cache.block_size)
        if num_in_last:
            plan.zeroed_blocks.append(request.blocks[index].block_id)
        self._tell_allocated(request, len(loaded))
        return blocks

    def _tell_allocated(self, request: Request, num_external_tokens: int) -> None:
        if self._connector is not None:
            self._connector.allocated(request, num_external_tokens)

    def _run(self, plan: StepPlan, item: ScheduledRequest) -> None:
        """Let an admitted request run from this step on."""
        item.request.num_computed_tokens = item.num_computed_tokens
        item.request.status = RequestStatus.RUNNING
        self.running.add(item.request)
        self._plan(plan, item)

    def _plan(self, plan: StepPlan, item: ScheduledRequest) -> None:
        plan.scheduled.append(item)
        plan.budget -= item.num_tokens
        self._unoffered.append(item)

    def offer_blocks(self, step_id: int | None = None) -> None:
        """Let others share the blocks that the newest step fills; `step_id` if it is being planned.

        Of a long prompt that is loaded they are many. So this may wait until the step is launched;
        whatever depends on it sees to it by itself.
        """
        items, self._unoffered = self._unoffered, []
        for item in items:
            end = max(item.num_computed_tokens + item.num_tokens, item.loaded.stop)
            self.kv_cache.hash_blocks(item.request, end, step_id or self._last_step_id)

    def _ends_with_what_is_in_flight(self, request: Request) -> bool:
        """Whether the tokens under way will certainly be the request's last."""
        if request.num_output_placeholders == 0:
            return False
        max_tokens = request.sampling_params.max_tokens
        num_output = request.num_output_tokens + request.num_output_placeholders
        return request.num_tokens_in_flight >= self.max_total_tokens or (
            max_tokens is not None and num_output >= max_tokens
        )

    def _preempt(self, request: Request) -> None:
        """Take all blocks from a running request, which has nothing in flight, and requeue it."""
        assert request.num_output_placeholders == 0
        self.running.remove(request)
        self._transfers.forget_load(request)
        request.hole_end = None
        self.kv_cache.free(request, self._last_applied_step)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.add(request)
        self._count(num_preemptions=1)
        if self._events.active:
            self._events.emit(
                RequestPreempted(
                    self._clock.monotonic(), request.request_id, request.num_preemptions
                )
            )

    def _record_admission(
        self, request: Request, plan: StepPlan, num_local: int, num_computed: int
    ) -> None:
        """Note where the KV of the first `num_computed` tokens comes from."""
        num_external = num_computed - num_local
        if request.num_local_cached_tokens is None:
            request.num_local_cached_tokens = num_local
            request.num_external_cached_tokens = num_external
        if self._events.active:
            self._events.emit(
                RequestScheduled(
                    self._clock.monotonic(),
                    request.request_id,
                    plan.step_id,
                    num_local,
                    num_external,
                )
            )

    def _commit(self, plan: StepPlan) -> SchedulerOutput:
        """Turn the plan into the message, and count it as done for the planning of the next."""
        output = build_output(plan, frozenset(self._finished_req_ids), self.kv_cache.block_size)
        if self._connector is not None:
            output = self._connector.with_metadata(output)
        self._finished_req_ids = set()
        self._last_step_id = plan.step_id
        if plan.is_barrier:
            plan.keep_tables()
        self._inflight.append(plan)
        for item in plan.scheduled:
            request = item.request
            request.num_output_placeholders += item.samples
            request.num_computed_tokens += item.num_tokens
            request.last_step_id = plan.step_id
        self._count(num_steps=1)
        if self._events.active:
            self._events.emit(
                StepScheduled(
                    self._clock.monotonic(),
                    plan.step_id,
                    tuple(output.num_scheduled_tokens.items()),
                )
            )
        return output

    # ---------------------------------------------------------------- applying a step

    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> list[RequestUpdate]:
        """Apply the oldest step in flight, all of it: `take_tokens`, and `settle`."""
        updates = self.take_tokens(scheduler_output, runner_output)
        self.settle()
        return updates

    def take_tokens(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> list[RequestUpdate]:
        """Apply what callers wait for of the oldest step in flight; returns what is new, in batch
        order. `settle` is owed: until then its blocks are held as if the step were in flight.

        Requests that ended while the step ran are skipped, and so is whatever was computed from
        KV that did not arrive. A request whose update ends it is finished already when this
        returns. Raises: `ConnectorError`, fatal.
        """
        self.settle()
        self.offer_blocks()
        step = self._inflight.popleft()
        assert step.step_id == scheduler_output.step_id, "steps must be applied in order"
        reports = runner_output.kv_connector_output
        updates = []
        if reports is not None and reports.invalid_block_ids:
            self._last_applied_step = step.step_id  # nothing bad is held any longer
            updates += self._drop_bad_kv(step, frozenset(reports.invalid_block_ids))
        for item in step.scheduled:
            if not item.is_void:
                updates += self._apply_one(item, step.step_id, runner_output)
        num_sampled = sum(len(update.new_token_ids) for update in updates)
        self._count(num_generated_tokens=num_sampled)
        self._unsettled = _Unsettled(
            step.step_id, reports, runner_output.num_stray_reports, num_sampled
        )
        if self._events.active:
            got = (update.request.request_id for update in updates if update.new_token_ids)
            self._unsettled = self._unsettled._replace(
                sampled_req_ids=tuple(got), tokens_s=self._clock.monotonic()
            )
        if any(update.request.response_kv_transfer_params for update in updates):
            self.settle()
        return updates

    def settle(self) -> None:
        """Apply the rest of the step whose tokens were taken last, if that is owed: what connectors
        report, and which blocks are published or free. Of a long prompt these are many, so its
        first token goes out before.

        Raises: `ConnectorError`, fatal: then each time that it is called.
        """
        if self._settle_error is not None:
            raise self._settle_error
        unsettled, self._unsettled = self._unsettled, None
        if unsettled is None:
            return
        try:
            self._settle(unsettled)
        except Exception as error:
            self._settle_error = error
            raise

    def settle_unheard(self) -> None:
        """The same for who looks, or ends a request with words to its caller. What fails is fatal,
        and the loop's to hear: it is raised there."""
        with contextlib.suppress(Exception):
            self.settle()

    def _settle(self, step: _Unsettled) -> None:
        self._last_applied_step = step.step_id
        if step.reports is not None:
            self._apply_reports(step.reports, step.step_id)
        self._count_strays(step.num_stray_reports)
        self._take_news(step.reports)
        # Last, so that the blocks whose tokens became known just now are published with the rest.
        self.kv_cache.apply_step(step.step_id)
        if self._events.active:
            self._events.emit(
                StepDone(
                    self._clock.monotonic(),
                    step.step_id,
                    step.num_sampled,
                    step.sampled_req_ids,
                    step.tokens_s,
                )
            )

    def _apply_one(
        self, item: ScheduledRequest, step_id: int, runner_output: ModelRunnerOutput
    ) -> list[RequestUpdate]:
        request = item.request
        request.num_output_placeholders -= item.samples
        error = runner_output.request_errors.get(request.request_id)
        if error is not None:
            self.finish_request(request, RequestStatus.FINISHED_ERROR, error=error)
            return [RequestUpdate(request, (), None)]
        tokens = runner_output.sampled_token_ids.get(request.request_id, ())
        assert len(tokens) == item.samples, f"{request!r}: {tokens} sampled, not {item.samples}"
        if not item.samples:
            return []
        logprobs = runner_output.logprobs.get(request.request_id)
        return [self._append_tokens(request, step_id, tokens, logprobs)]

    def _drop_bad_kv(self, step: StepPlan, invalid: frozenset[int]) -> list[RequestUpdate]:
        """Blocks were promised and not brought: nothing that stands on one of them remains.

        Every request whose computed or loaded tokens lie in such a block, the one that loads it
        and all that share it, is set back to the last good token; under the policy `fail` it
        ends. Its blocks from there on lose their hashes. Nobody may compute into a block that
        somebody else holds: of those that share one, all but the first are preempted.
        """
        self._count(num_invalid_blocks=len(invalid))
        holders = (*self.parked, *self.running)
        hit = set_back(step, self._inflight, holders, invalid, self.kv_cache)
        if not self._recomputes:
            return [self._fail_for_bad_kv(lost) for lost in hit]
        for request, _ in reversed(hit):
            if request.status is RequestStatus.RUNNING and self._shares_what_it_lost(request):
                self._preempt(request)
                self._preempted.append(request)
        return []

    def _shares_what_it_lost(self, request: Request) -> bool:
        """Whether others hold blocks that the request has yet to fill."""
        first = request.num_computed_tokens // self.kv_cache.block_size
        return any(block.ref_cnt > 1 for block in request.blocks[first:])

    def _fail_for_bad_kv(self, lost: Lost) -> RequestUpdate:
        error = (
            f"KV from position {lost.position} on could not be loaded; "
            "kv_load_failure_policy='recompute' would compute it instead."
        )
        self.finish_request(lost.request, RequestStatus.FINISHED_ERROR, error=error)
        return RequestUpdate(lost.request, (), None)

    def _apply_reports(self, reports: KVConnectorOutput, step_id: int) -> None:
        """Follow what the connector's worker side reports: loads and reads that have ended."""
        assert self._connector is not None
        self._connector.report(reports)
        released, num_strays = self._transfers.apply(
            reports.finished_recving or (), reports.finished_sending or (), self.requests, step_id
        )
        for request in released:
            self.kv_cache.free(request, self._last_applied_step)
        self._count_strays(num_strays)

    def _count_strays(self, num_strays: int) -> None:
        if num_strays == 0:
            return
        assert self._connector is not None
        if not self.stats.num_stray_reports:
            logger.warning(
                "%s.get_finished reported ids that nobody waits for, or again; such reports are"
                " counted and ignored",
                self._connector.name,
            )
        self._count(num_stray_reports=num_strays)

    def _take_news(self, reports: KVConnectorOutput | None) -> None:
        """Statistics of both sides of the connector, and its cache events."""
        if self._connector is None:
            return
        of_workers = None if reports is None else reports.kv_connector_stats
        for stats in (of_workers, self._connector.take_stats()):
            if stats is not None and self._metrics is not None:
                self._metrics.observe(stats)
        for event in self._connector.take_events():
            if self._events.active:
                publish(event, self._clock.monotonic(), self._events)

    def _append_tokens(
        self,
        request: Request,
        step_id: int,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] | None,
    ) -> RequestUpdate:
        if request.num_output_tokens == 0:
            self._count_prefill(request)
        for token_id in tokens:
            request.append_output(token_id)
        self._hash_decoded_blocks(request, step_id)
        self._check_stop(request, tokens[-1])
        return RequestUpdate(request, tokens, logprobs)

    def _count_prefill(self, request: Request) -> None:
        """The first token is there: what was cached and loaded for it turned out to be right."""
        self._count(
            num_prompt_tokens=request.num_prompt_tokens,
            num_local_cached_tokens=request.num_local_cached_tokens or 0,
            num_external_cached_tokens=request.num_external_cached_tokens,
        )

    def _hash_decoded_blocks(self, request: Request, step_id: int) -> None:
        """Hash blocks whose last tokens were unknown when their step was planned.

        With a second step in flight, a block that step `step_id` filled had a placeholder in it
        then; by now its ids are known. What the later step computes is left to that step.
        """
        num_applied = request.num_computed_tokens - request.num_output_placeholders
        self.kv_cache.hash_blocks(request, num_applied, step_id)

    def _check_stop(self, request: Request, token_id: int) -> None:
        """Finish the request if `token_id` ends it: end of sequence, stop id, or length."""
        params = request.sampling_params
        if request.num_output_tokens >= params.min_tokens:
            if token_id in (params.stop_token_ids or ()):
                self.finish_request(request, RequestStatus.FINISHED_STOPPED, stop_reason=token_id)
                return
            if token_id in self._eos_token_ids and not params.ignore_eos:
                self.finish_request(request, RequestStatus.FINISHED_STOPPED)
                return
        if request.num_tokens >= self.max_total_tokens or (
            params.max_tokens is not None and request.num_output_tokens >= params.max_tokens
        ):
            self.finish_request(request, RequestStatus.FINISHED_LENGTH_CAPPED)

    def _count(self, **added: int) -> None:
        self.stats = dataclasses.replace(
            self.stats, **{name: getattr(self.stats, name) + n for name, n in added.items()}
        )

    def __repr__(self) -> str:
        pool = self.kv_cache.pool
        return (
            f"<Scheduler running={len(self.running)} waiting={len(self.waiting)}"
            f" in_flight={len(self._inflight)} free={pool.num_free_blocks}/"
            f"{pool.num_usable_blocks} fenced={self.kv_cache.num_fenced_blocks}>"
        )
