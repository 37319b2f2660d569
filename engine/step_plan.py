"""One step on its way: what the scheduler planned for each request, and the message it becomes."""

from __future__ import annotations

import dataclasses

from interlace.engine.block_pool import KVCacheBlock
from interlace.engine.request import Request, RequestStatus
from interlace.engine.scheduler_output import (
    BlockCopy,
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)


@dataclasses.dataclass(slots=True)
class ScheduledRequest:
    """One request's share of one step."""

    request: Request
    num_tokens: int
    num_computed_tokens: int
    """When its computing begins; what the step loads counts as computed."""
    new_blocks: list[KVCacheBlock]
    kind: RequestStatus
    """What the request was before: WAITING (new), PREEMPTED (resumed) or RUNNING."""
    copied_from: KVCacheBlock | None = None
    """The block whose content the first of `new_blocks` begins with."""
    loaded: range = range(0)
    """Positions whose KV a connector loads within this step."""

    def __post_init__(self) -> None:
        self.samples = self._reaches_the_end()
        self.epoch = self.request.epoch

    samples: bool = dataclasses.field(init=False)
    """Whether the step computes the request's last token, so that the next is sampled."""
    epoch: int = dataclasses.field(init=False)
    """The request's when this was planned; another one later means: the result is void."""

    def _reaches_the_end(self) -> bool:
        end = self.num_computed_tokens + self.num_tokens
        return end == self.request.num_tokens_in_flight

    @property
    def is_void(self) -> bool:
        """Whether the request ended, or was set back, after this was planned."""
        return self.request.is_finished or self.request.epoch != self.epoch


@dataclasses.dataclass(slots=True)
class StepPlan:
    """All of one step."""

    step_id: int
    budget: int
    """Tokens that may still be added."""
    scheduled: list[ScheduledRequest] = dataclasses.field(default_factory=list)
    preempted: list[Request] = dataclasses.field(default_factory=list)
    """Since the step before."""
    begun_loads: list[Request] = dataclasses.field(default_factory=list)
    """Requests whose asynchronous loads begin with this step."""
    zeroed_blocks: list[int] = dataclasses.field(default_factory=list)
    tables: dict[str, tuple[KVCacheBlock, ...]] = dataclasses.field(default_factory=dict)
    """Request id -> its blocks, kept where a load within the step may turn out bad."""

    @property
    def is_barrier(self) -> bool:
        """Whether a connector loads within the step: the next one waits until it is applied."""
        return any(item.loaded for item in self.scheduled)

    def keep_tables(self) -> None:
        """Remember who holds which blocks, for requests that end before the step is applied."""
        for item in self.scheduled:
            self.tables[item.request.request_id] = tuple(item.request.blocks)


def build_output(plan: StepPlan, finished: frozenset[str], block_size: int) -> SchedulerOutput:
    """The message for the runner; connector metadata comes later."""
    new_reqs: list[NewRequestData] = []
    cached = CachedRequestData()
    for item in plan.scheduled:
        if item.kind is RequestStatus.WAITING:
            new_reqs.append(_new_request(item))
        else:
            _add_cached(cached, item)
    num_scheduled = {item.request.request_id: item.num_tokens for item in plan.scheduled}
    return SchedulerOutput(
        step_id=plan.step_id,
        scheduled_new_reqs=new_reqs,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=num_scheduled,
        total_num_scheduled_tokens=sum(num_scheduled.values()),
        finished_req_ids=finished,
        preempted_req_ids=frozenset(r.request_id for r in plan.preempted),
        sampling_req_ids=frozenset(i.request.request_id for i in plan.scheduled if i.samples),
        block_copies=tuple(
            BlockCopy(item.copied_from.block_id, item.new_blocks[0].block_id)
            for item in plan.scheduled
            if item.copied_from is not None
        ),
        zeroed_block_ids=tuple(plan.zeroed_blocks),
        loading_block_ids=frozenset(
            block.block_id for item in plan.scheduled for block in _loaded_blocks(item, block_size)
        ),
        async_loading_req_ids=frozenset(r.request_id for r in plan.begun_loads),
    )


def _loaded_blocks(item: ScheduledRequest, block_size: int) -> list[KVCacheBlock]:
    if not item.loaded:
        return []
    return item.request.blocks[item.loaded.start // block_size : -(-item.loaded.stop // block_size)]


def _new_request(item: ScheduledRequest) -> NewRequestData:
    request = item.request
    return NewRequestData(
        req_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling_params=request.sampling_params,
        seed=request.seed,
        block_ids=([block.block_id for block in request.blocks],),
        num_computed_tokens=item.num_computed_tokens,
        prompt_array=request.prompt_array,
    )


def _add_cached(cached: CachedRequestData, item: ScheduledRequest) -> None:
    request, added = item.request, item.new_blocks
    if item.kind is RequestStatus.PREEMPTED:
        cached.resumed_req_ids.add(request.request_id)
        cached.all_token_ids[request.request_id] = list(request.all_token_ids)
        added = request.blocks
    cached.req_ids.append(request.request_id)
    cached.new_block_ids.append(([block.block_id for block in added],) if added else None)
    cached.num_computed_tokens.append(item.num_computed_tokens)
    cached.num_output_tokens.append(request.num_tokens_in_flight - request.num_prompt_tokens)
