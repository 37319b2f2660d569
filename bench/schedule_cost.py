"""How long the scheduler takes to plan and to apply a step, with no model behind it."""

from __future__ import annotations

import dataclasses

from interlace.bench.report import Check, Row
from interlace.bench.spread import Spread
from interlace.engine.config import CacheConfig, SchedulerConfig
from interlace.engine.events import EventBus
from interlace.engine.outputs import ModelRunnerOutput
from interlace.engine.ports import Clock
from interlace.engine.request import Request
from interlace.engine.sampling_params import SamplingParams
from interlace.engine.scheduler import Scheduler
from interlace.engine.scheduler_output import SchedulerOutput

BLOCK_SIZE = 16
MAX_SCHEDULE_MS = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduleLoad:
    """Requests that run, tokens of each prompt, and decode steps to time."""

    num_requests: int = 256
    prompt_tokens: int = 512
    num_steps: int = 200


def measure_schedule(load: ScheduleLoad, clock: Clock) -> tuple[Row, Check]:
    """Time `schedule()` and `update_from_output()` while every request decodes.

    Takes a second or two. Any thread.
    """
    scheduler = _scheduler_with(load, clock)
    while len(scheduler.waiting) or _prefilling(scheduler):
        _step(scheduler, clock)
    times = [_step(scheduler, clock) for _ in range(load.num_steps)]
    schedule = Spread.of(planned * 1e3 for planned, _ in times)
    row = Row(
        f"{load.num_requests} running requests",
        {"schedule() ms": schedule, "update ms": Spread.of(applied * 1e3 for _, applied in times)},
    )
    name = f"schedule() with {load.num_requests} running requests, ms"
    return row, Check(name, schedule.median, at_most=MAX_SCHEDULE_MS)


def _scheduler_with(load: ScheduleLoad, clock: Clock) -> Scheduler:
    """A scheduler with `load.num_requests` requests waiting, and blocks for all they will need."""
    longest = load.prompt_tokens + BLOCK_SIZE + load.num_steps + 64
    num_blocks = 1 + load.num_requests * (longest // BLOCK_SIZE + 2)
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=load.num_requests,
            max_num_batched_tokens=8192,
            max_model_len=num_blocks * BLOCK_SIZE,
        ),
        CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=num_blocks),
        (),
        clock,
        EventBus(),
    )
    for index in range(load.num_requests):
        # Lengths differ, so that not all requests need their next block in the same step.
        prompt = [index, *range(load.prompt_tokens - 1 + index % BLOCK_SIZE)]
        request = Request(
            f"r{index}",
            prompt,
            SamplingParams(max_tokens=None),
            seed=0,
            arrival=index,
            block_size=BLOCK_SIZE,
        )
        scheduler.add_request(request)
    return scheduler


def _prefilling(scheduler: Scheduler) -> bool:
    return any(request.num_output_tokens == 0 for request in scheduler.running)


def _step(scheduler: Scheduler, clock: Clock) -> tuple[float, float]:
    """Plan and apply one step; seconds that each took."""
    started = clock.monotonic()
    output = scheduler.schedule()
    planned = clock.monotonic()
    assert output is not None, "there are requests to run"
    answer = _answer(output)
    answered = clock.monotonic()
    scheduler.update_from_output(output, answer)
    return planned - started, clock.monotonic() - answered


def _answer(output: SchedulerOutput) -> ModelRunnerOutput:
    """What a model would have returned: some token for each request that samples."""
    return ModelRunnerOutput(sampled_token_ids=dict.fromkeys(output.sampling_req_ids, (7,)))
