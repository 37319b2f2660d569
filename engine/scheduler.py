"""Decides which tokens of which requests the next step computes, and applies what came back.

There are no prefill and decode phases, only tokens to catch up. Plain synchronous code on the
loop thread: it never awaits, does no I/O and reads no clock but the injected one. Knows nothing
of text, tokenizers or the device.

Preemption: when a running request cannot get its next block, the request that is last in
scheduling order gives up all of its blocks and is computed again later. That happens only while
no step is in flight; with steps in flight the scheduler first lets them drain, so a victim never
has a token under way and its blocks are free at once.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable

from interlace.engine.block_pool import KVCacheBlock
from interlace.engine.config import CacheConfig, SchedulerConfig
from interlace.engine.events import (
    EventBus,
    RequestPreempted,
    RequestQueued,
    RequestScheduled,
    StepDone,
    StepScheduled,
)
from interlace.engine.kv_cache_manager import KVCacheManager
from interlace.engine.outputs import ModelRunnerOutput, TokenLogprobs
from interlace.engine.ports import Clock
from interlace.engine.request import Request, RequestStatus
from interlace.engine.request_queue import RequestQueue
from interlace.engine.scheduler_output import (
    BlockCopy,
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)


@dataclasses.dataclass(frozen=True, slots=True)
class RequestUpdate:
    """What one applied step brought for one request."""

    request: Request
    new_token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Running totals since the engine started."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    """Of requests scheduled for the first time."""
    num_local_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_finished_requests: int = 0


@dataclasses.dataclass(slots=True)
class _Scheduled:
    """One request's share of one step."""

    request: Request
    num_tokens: int
    num_computed_tokens: int
    """Before the step."""
    new_blocks: list[KVCacheBlock]
    kind: RequestStatus
    """What the request was before: WAITING (new), PREEMPTED (resumed) or RUNNING."""
    copied_from: KVCacheBlock | None = None
    """The block whose content the first of `new_blocks` begins with."""

    @property
    def samples(self) -> bool:
        """Whether the step computes the request's last token, so that the next is sampled."""
        return self.num_computed_tokens + self.num_tokens == self.request.num_tokens_in_flight


@dataclasses.dataclass(frozen=True, slots=True)
class _InflightStep:
    step_id: int
    scheduled: list[tuple[Request, bool]]
    """(request, whether a token is sampled for it)."""


class Scheduler:
    """Continuous batching over one block pool. See the module's docstring."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache_config: CacheConfig,
        eos_token_ids: Iterable[int],
        clock: Clock,
        events: EventBus,
    ) -> None:
        self.config = config
        self.kv_cache = KVCacheManager(cache_config, clock, events)
        self.requests: dict[str, Request] = {}
        """Every request that has not ended, by id."""
        self.waiting = RequestQueue(config.policy)
        self.running = RequestQueue(config.policy)
        self.stats = SchedulerStats()
        pool_tokens = self.kv_cache.pool.num_usable_blocks * cache_config.block_size
        self.max_total_tokens = min(config.max_model_len, pool_tokens)
        """A request ends with `length` when prompt and output reach this."""
        self._eos_token_ids = frozenset(eos_token_ids)
        self._clock = clock
        self._events = events
        self._finished_req_ids: set[str] = set()  # since the last schedule()
        self._inflight: deque[_InflightStep] = deque()
        self._last_step_id = 0
        self._last_applied_step = 0
        self._must_drain = False

    # ---------------------------------------------------------------- requests come and go

    def add_request(self, request: Request) -> None:
        """Queue a request whose prompt was checked to fit (`max_total_tokens`)."""
        assert request.request_id not in self.requests
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

    def finish_request(
        self,
        request: Request,
        status: RequestStatus,
        *,
        stop_reason: str | int | None = None,
        error: str | None = None,
    ) -> None:
        """End a request in whatever state it is; does nothing if it has ended.

        Its blocks return to the pool when no step in flight touches them any more.
        """
        if request.is_finished:
            return
        assert status.is_finished
        (self.running if request.status is RequestStatus.RUNNING else self.waiting).remove(request)
        request.status = status
        request.stop_reason = stop_reason
        request.error = error
        del self.requests[request.request_id]
        self._finished_req_ids.add(request.request_id)
        self.kv_cache.free(request, self._last_applied_step)
        self._count(num_finished_requests=1)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; False while a request or a step in flight needs any block.

        A step in flight that touches blocks holds them, be it for a request that has ended.
        """
        return self.kv_cache.pool.reset_prefix_cache()

    @property
    def num_inflight_steps(self) -> int:
        """Steps scheduled and not yet applied."""
        return len(self._inflight)

    # ---------------------------------------------------------------- planning a step

    def schedule(self) -> SchedulerOutput | None:
        """Plan one step, or return None if there is nothing to do now.

        Runs to the end without awaiting. Every request in the plan has its blocks; its
        `num_computed_tokens` already counts the step, so that the next step can be planned
        before this one is applied. A plan without tokens only delivers `finished_req_ids`.
        """
        if self._must_drain and self._inflight:
            return None
        self._must_drain = False
        budget = self.config.max_num_batched_tokens
        step_id = self._last_step_id + 1
        plan: list[_Scheduled] = []
        preempted: list[Request] = []
        budget = self._schedule_running(plan, preempted, step_id, budget)
        if not preempted and not self._must_drain:
            self._schedule_waiting(plan, step_id, budget)
        if not plan and (self._inflight or not (self._finished_req_ids or preempted)):
            return None
        return self._commit(plan, preempted, step_id)

    def _schedule_running(
        self, plan: list[_Scheduled], preempted: list[Request], step_id: int, budget: int
    ) -> int:
        """Let running requests catch up, in order; returns the budget that is left."""
        for request in self.running:
            if budget == 0 or request.status is not RequestStatus.RUNNING:
                break  # whoever was preempted stood at the tail: nobody is left behind it
            if self._ends_with_what_is_in_flight(request):
                continue
            num_tokens = request.num_tokens_in_flight - request.num_computed_tokens
            num_tokens = min(num_tokens, budget)
            if num_tokens == 0:
                continue
            new_blocks = self._allocate_or_preempt(
                request, request.num_computed_tokens + num_tokens, preempted
            )
            if new_blocks is None:
                break
            self._plan(plan, request, num_tokens, new_blocks, step_id, RequestStatus.RUNNING)
            budget -= num_tokens
        return budget

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

    def _schedule_waiting(self, plan: list[_Scheduled], step_id: int, budget: int) -> None:
        """Admit waiting requests, in order, while budget, places and blocks last."""
        while budget > 0 and len(self.waiting) and len(self.running) < self.config.max_num_seqs:
            request = self.waiting.head
            hit = self.kv_cache.find_longest_hit(request)
            if not self.kv_cache.can_admit(request, hit):
                # A stall would need a head that no empty pool can hold; admission refuses those.
                assert len(self.running) or self._inflight, f"{request!r} can never be scheduled"
                return
            self.waiting.remove(request)
            self.kv_cache.take_hit(request, hit, step_id)
            num_tokens = min(request.num_tokens - hit.num_tokens, budget)
            new_blocks = self.kv_cache.allocate(request, hit.num_tokens + num_tokens)
            assert new_blocks is not None
            kind, request.status = request.status, RequestStatus.RUNNING
            request.num_computed_tokens = hit.num_tokens
            self.running.add(request)
            self._record_admission(request, hit.num_tokens, step_id)
            self._plan(plan, request, num_tokens, new_blocks, step_id, kind, hit.tail)
            budget -= num_tokens

    def _plan(
        self,
        plan: list[_Scheduled],
        request: Request,
        num_tokens: int,
        new_blocks: list[KVCacheBlock],
        step_id: int,
        kind: RequestStatus,
        copied_from: KVCacheBlock | None = None,
    ) -> None:
        computed = request.num_computed_tokens
        plan.append(_Scheduled(request, num_tokens, computed, new_blocks, kind, copied_from))
        # From here on, later requests of this very step may share the blocks that it fills.
        self.kv_cache.hash_blocks(request, computed + num_tokens, step_id)

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

    def _record_admission(self, request: Request, num_cached: int, step_id: int) -> None:
        if request.num_local_cached_tokens is None:
            request.num_local_cached_tokens = num_cached
            self._count(
                num_prompt_tokens=request.num_prompt_tokens, num_local_cached_tokens=num_cached
            )
        if self._events.active:
            self._events.emit(
                RequestScheduled(
                    self._clock.monotonic(), request.request_id, step_id, num_cached, 0
                )
            )

    def _commit(
        self, plan: list[_Scheduled], preempted: list[Request], step_id: int
    ) -> SchedulerOutput:
        """Turn the plan into the message, and count it as done for the planning of the next."""
        output = _build_output(plan, preempted, step_id, frozenset(self._finished_req_ids))
        self._finished_req_ids = set()
        self._last_step_id = step_id
        self._inflight.append(_InflightStep(step_id, [(s.request, s.samples) for s in plan]))
        for item in plan:
            request = item.request
            request.num_output_placeholders += item.samples
            request.num_computed_tokens += item.num_tokens
            request.last_step_id = step_id
        self._count(num_steps=1)
        if self._events.active:
            self._events.emit(
                StepScheduled(
                    self._clock.monotonic(), step_id, tuple(output.num_scheduled_tokens.items())
                )
            )
        return output

    # ---------------------------------------------------------------- applying a step

    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> list[RequestUpdate]:
        """Apply the oldest step in flight; returns what is new, in batch order.

        Requests that ended while the step ran are skipped. A request whose update ends it is
        finished already when this returns.
        """
        step = self._inflight.popleft()
        assert step.step_id == scheduler_output.step_id, "steps must be applied in order"
        self._last_applied_step = step.step_id
        updates = []
        for request, samples in step.scheduled:
            if request.is_finished:
                continue
            request.num_output_placeholders -= samples
            error = runner_output.request_errors.get(request.request_id)
            if error is not None:
                self.finish_request(request, RequestStatus.FINISHED_ERROR, error=error)
                updates.append(RequestUpdate(request, (), None))
                continue
            tokens = runner_output.sampled_token_ids.get(request.request_id, ())
            assert len(tokens) == samples, f"{request!r} expected {samples} tokens, not {tokens}"
            if samples:
                logprobs = runner_output.logprobs.get(request.request_id)
                updates.append(self._append_tokens(request, tokens, logprobs))
        # Last, so that the blocks whose tokens became known just now are published with the rest.
        self.kv_cache.apply_step(step.step_id)
        num_sampled = sum(len(update.new_token_ids) for update in updates)
        self._count(num_generated_tokens=num_sampled)
        if self._events.active:
            self._events.emit(StepDone(self._clock.monotonic(), step.step_id, num_sampled))
        return updates

    def _append_tokens(
        self,
        request: Request,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] | None,
    ) -> RequestUpdate:
        for token_id in tokens:
            request.append_output(token_id)
        self._hash_decoded_blocks(request)
        self._check_stop(request, tokens[-1])
        return RequestUpdate(request, tokens, logprobs)

    def _hash_decoded_blocks(self, request: Request) -> None:
        """Hash blocks whose last tokens were unknown when their step was planned.

        With a second step in flight, a block that the applied step filled had a placeholder in
        it then; by now its ids are known. What the later step computes is left to that step.
        """
        num_applied = request.num_computed_tokens - request.num_output_placeholders
        self.kv_cache.hash_blocks(request, num_applied, self._last_applied_step)

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


def _build_output(
    plan: list[_Scheduled], preempted: list[Request], step_id: int, finished: frozenset[str]
) -> SchedulerOutput:
    new_reqs: list[NewRequestData] = []
    cached = CachedRequestData()
    for item in plan:
        request = item.request
        if item.kind is RequestStatus.WAITING:
            new_reqs.append(
                NewRequestData(
                    req_id=request.request_id,
                    prompt_token_ids=request.prompt_token_ids,
                    sampling_params=request.sampling_params,
                    seed=request.seed,
                    block_ids=([block.block_id for block in request.blocks],),
                    num_computed_tokens=item.num_computed_tokens,
                )
            )
            continue
        added = item.new_blocks
        if item.kind is RequestStatus.PREEMPTED:
            cached.resumed_req_ids.add(request.request_id)
            cached.all_token_ids[request.request_id] = list(request.all_token_ids)
            added = request.blocks
        cached.req_ids.append(request.request_id)
        cached.new_block_ids.append(([block.block_id for block in added],) if added else None)
        cached.num_computed_tokens.append(item.num_computed_tokens)
    num_scheduled = {item.request.request_id: item.num_tokens for item in plan}
    return SchedulerOutput(
        step_id=step_id,
        scheduled_new_reqs=new_reqs,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=num_scheduled,
        total_num_scheduled_tokens=sum(num_scheduled.values()),
        finished_req_ids=finished,
        preempted_req_ids=frozenset(r.request_id for r in preempted),
        sampling_req_ids=frozenset(item.request.request_id for item in plan if item.samples),
        block_copies=tuple(
            BlockCopy(item.copied_from.block_id, item.new_blocks[0].block_id)
            for item in plan
            if item.copied_from is not None
        ),
    )
