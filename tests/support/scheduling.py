"""Builds schedulers and requests for tests, and drives steps without an event loop."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

from paged_oracle import WRONG, PagedOracleRunner, paint_when_reused

from interlace.engine.config import CacheConfig, SchedulerConfig, SchedulingPolicy
from interlace.engine.connector_metrics import ConnectorMetrics
from interlace.engine.events import EventBus
from interlace.engine.ports import SchedulerConnector, WorkerConnector
from interlace.engine.request import Request
from interlace.engine.sampling_params import SamplingParams
from interlace.engine.scheduler import RequestUpdate, Scheduler
from interlace.engine.scheduler_output import SchedulerOutput

EOS = 7


class ManualClock:
    """A clock whose hands the test turns."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 200,
    policy: SchedulingPolicy = "fcfs",
    depth: int = 1,
    prefix_caching: bool = True,
    events: EventBus | None = None,
    connector: SchedulerConnector | None = None,
    failure_policy: Literal["fail", "recompute"] = "fail",
    metrics: ConnectorMetrics | None = None,
) -> Scheduler:
    """`num_blocks` counts the usable ones."""
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            policy=policy,
            max_inflight_steps=depth,
        ),
        CacheConfig(block_size, num_blocks + 1, prefix_caching),
        [EOS],
        ManualClock(),
        events or EventBus(),
        connector,
        failure_policy,
        metrics,
    )


@dataclasses.dataclass
class Stepper:
    """A scheduler and an oracle runner, stepped by hand."""

    scheduler: Scheduler
    connector: WorkerConnector | None = None
    """The worker side of the scheduler's connector."""
    runner: PagedOracleRunner = dataclasses.field(init=False)
    inflight: deque[SchedulerOutput] = dataclasses.field(default_factory=deque)
    outputs: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    num_added: int = 0
    settles_late: bool = False
    """Whether a step is settled only when somebody asks, as in the loop, and not at once."""

    def __post_init__(self) -> None:
        cache = self.scheduler.kv_cache
        self.runner = PagedOracleRunner(len(cache.pool.blocks), cache.block_size, self.connector)
        paint_when_reused(self.scheduler, self.runner)
        self.scheduler.connect(self.runner)

    def add(
        self,
        prompt: Sequence[int],
        *,
        request_id: str | None = None,
        max_tokens: int | None = 8,
        priority: int = 0,
        cache_salt: str | None = None,
        params: SamplingParams | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> Request:
        self.num_added += 1
        request = Request(
            request_id or f"r{self.num_added}",
            prompt,
            params or SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True),
            seed=0,
            arrival=self.num_added,
            block_size=self.scheduler.kv_cache.block_size,
            priority=priority,
            cache_salt=cache_salt,
            kv_transfer_params=kv_transfer_params,
        )
        self.outputs[request.request_id] = []
        self.scheduler.add_request(request)
        return request

    def launch(self, *, poll: bool = True) -> SchedulerOutput | None:
        """Plan one more step, if depth and scheduler allow; empty ones too if `poll`."""
        if len(self.inflight) >= self.scheduler.config.max_inflight_steps:
            return None
        output = self.scheduler.schedule(poll=poll)
        self._take(self.scheduler.take_failed())
        if output is not None:
            self.inflight.append(output)
        return output

    def apply(self) -> list[RequestUpdate]:
        """Execute and apply the oldest step in flight."""
        output = self.inflight.popleft()
        scheduler = self.scheduler
        apply = scheduler.take_tokens if self.settles_late else scheduler.update_from_output
        updates = apply(output, self.runner.execute(output))
        self._take(updates)
        return updates

    def _take(self, updates: Sequence[RequestUpdate]) -> None:
        for update in updates:
            assert WRONG not in update.new_token_ids, self.runner.last_fault
            self.outputs[update.request.request_id] += update.new_token_ids

    def step(self) -> bool:
        """Launch as far as depth allows, then apply one; False if there was nothing to do."""
        while self.launch() is not None:
            pass
        if not self.inflight:
            return False
        self.apply()
        return True

    def run(self, max_steps: int = 5000) -> int:
        """Step until nothing is left; returns the number of steps."""
        for num_steps in range(max_steps):
            if not self.step():
                return num_steps
        raise AssertionError(f"no end after {max_steps} steps: {self.scheduler!r}")

    def assert_idle(self) -> None:
        """Nothing is held, queued or remembered."""
        scheduler = self.scheduler
        pool = scheduler.kv_cache.pool
        assert not scheduler.requests
        assert len(scheduler.waiting) == len(scheduler.running) == len(scheduler.parked) == 0
        assert scheduler.num_held_requests == 0
        assert scheduler._transfers.num_ended_loads == 0
        assert not self.inflight
        assert scheduler.num_inflight_steps == 0
        assert pool.num_free_blocks == pool.num_usable_blocks
        assert all(block.ref_cnt == 0 for block in pool.blocks)
        assert all(block.pending_step is None for block in pool.blocks)
        assert scheduler.kv_cache.num_fenced_blocks == 0
        assert not self.runner.state.requests


def launched(stepper: Stepper) -> SchedulerOutput:
    """The next step, which there must be."""
    output = stepper.launch()
    assert output is not None
    return output
