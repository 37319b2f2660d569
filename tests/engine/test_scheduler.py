"""Which tokens come next: budget, order, preemption, blocks in flight, what is told to the runner.

Plain steps by hand; the oracle runner finds any wrong KV.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest
from paged_oracle import answer
from scheduling import Stepper, launched, make_scheduler

from interlace.engine.config import SchedulingPolicy
from interlace.engine.events import BlockStored, EventBus, EventStream, RequestPreempted
from interlace.engine.outputs import ModelRunnerOutput
from interlace.engine.request import Request, RequestStatus
from interlace.engine.sampling_params import SamplingParams
from interlace.engine.scheduler import Scheduler
from interlace.engine.scheduler_output import SchedulerOutput

both_depths = pytest.mark.parametrize("depth", [1, 2])
both_ends = pytest.mark.parametrize(
    "status", [RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_ABORTED]
)


def assert_right(stepper: Stepper, requests: Sequence[Request]) -> None:
    for request in requests:
        tokens = stepper.outputs[request.request_id]
        assert tokens == answer(request.prompt_token_ids, len(tokens))
        assert tokens


def watch_preemptions(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids in order; fails on one that happens while a step is in flight."""
    preempted: list[str] = []
    preempt = scheduler._preempt

    def watching(request: Request) -> None:
        assert scheduler.num_inflight_steps == 0
        preempted.append(request.request_id)
        preempt(request)

    monkeypatch.setattr(scheduler, "_preempt", watching)
    return preempted


# --- budget and order ----------------------------------------------------------------------------


@both_depths
@pytest.mark.parametrize("budget", [1, 2, 3, 5, 64])
def test_the_budget_bounds_each_step_and_answers_stay_right(depth: int, budget: int) -> None:
    stepper = Stepper(make_scheduler(max_num_batched_tokens=budget, depth=depth))
    requests = [stepper.add([i, 1, 2, 3, 4, 5, 6], max_tokens=5) for i in range(4)]
    totals = []
    while True:
        while (output := stepper.launch()) is not None:
            totals.append(output.total_num_scheduled_tokens)
            assert sum(output.num_scheduled_tokens.values()) == totals[-1] <= budget
        if not stepper.inflight:
            break
        stepper.apply()
    assert sum(totals) == 4 * (7 + 5 - 1), "no token was computed twice"
    assert_right(stepper, requests)
    stepper.assert_idle()


@both_depths
@pytest.mark.parametrize("most", [1, 3])
def test_no_more_requests_in_a_step_than_allowed(depth: int, most: int) -> None:
    stepper = Stepper(make_scheduler(max_num_seqs=most, depth=depth))
    requests = [stepper.add([i, 1, 2], max_tokens=4) for i in range(7)]
    seen = 0
    while stepper.step():
        assert len(stepper.scheduler.running) <= most
        seen = max([seen, *(len(output.num_scheduled_tokens) for output in stepper.inflight)])
    assert seen <= most
    assert_right(stepper, requests)
    stepper.assert_idle()


def request_with(arrival: int, name: str, priority: int = 0) -> Request:
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    return Request(name, [1, 2], params, seed=0, arrival=arrival, block_size=4, priority=priority)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("fcfs", ["a", "b", "c", "d"]), ("priority", ["d", "b", "c", "a"])],
)
def test_order_is_by_policy_then_arrival_not_by_who_was_ready_first(
    policy: SchedulingPolicy, expected: list[str]
) -> None:
    """A long prompt is hashed in a thread and is added late; it came first all the same."""
    stepper = Stepper(make_scheduler(policy=policy, max_num_seqs=1))
    for arrival, name, priority in ((3, "d", -1), (1, "b", 0), (2, "c", 0), (0, "a", 5)):
        stepper.outputs[name] = []
        stepper.scheduler.add_request(request_with(arrival, name, priority))
    order: list[str] = []
    while (output := stepper.launch()) is not None:
        order += output.num_scheduled_tokens
        stepper.apply()
    assert order == expected


# --- preemption ----------------------------------------------------------------------------------


@both_depths
def test_b14_b15_a_resumed_request_brings_all_its_tokens(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepper = Stepper(make_scheduler(num_blocks=10, depth=depth, prefix_caching=False))
    preempted = watch_preemptions(stepper.scheduler, monkeypatch)
    requests = [stepper.add([i] * 6, max_tokens=24) for i in range(2)]
    resumed = 0
    while True:
        while (output := stepper.launch()) is not None:
            cached = output.scheduled_cached_reqs
            assert set(cached.all_token_ids) == cached.resumed_req_ids
            for name in cached.resumed_req_ids:
                resumed += 1
                request = next(r for r in requests if r.request_id == name)
                known = answer(request.prompt_token_ids, request.num_output_tokens)
                assert cached.all_token_ids[name] == [*request.prompt_token_ids, *known]
                assert request.num_output_tokens > 0
        if not stepper.inflight:
            break
        stepper.apply()
    assert resumed == len(preempted) > 0
    assert [len(stepper.outputs[r.request_id]) for r in requests] == [24, 24]
    assert_right(stepper, requests)
    stepper.assert_idle()


def test_a_request_is_new_to_the_runner_only_once() -> None:
    """B83 b: 'no output yet' does not mean 'never seen'."""
    stepper = Stepper(make_scheduler(num_blocks=6, max_num_batched_tokens=4))
    requests = [stepper.add([i] * 12, max_tokens=8) for i in range(3)]
    new: list[str] = []
    while (output := stepper.launch()) is not None:
        new += [one.req_id for one in output.scheduled_new_reqs]
        stepper.apply()
    assert sorted(new) == ["r1", "r2", "r3"]
    assert_right(stepper, requests)


@both_depths
def test_b32_only_as_many_are_preempted_as_it_takes(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight are running and hold everything; then each of them wants one block more."""
    stepper = Stepper(make_scheduler(num_blocks=16, depth=depth, prefix_caching=False))
    preempted = watch_preemptions(stepper.scheduler, monkeypatch)
    requests = [stepper.add([i] * 7, max_tokens=6) for i in range(8)]
    while not preempted:
        assert stepper.step()
    # Six others find their third block in what the last two gave up, two blocks each.
    assert preempted[:3] == ["r8", "r7", "r6"]
    assert len(preempted) == 3
    assert len(stepper.scheduler.running) == 5
    stepper.run()
    assert_right(stepper, requests)
    stepper.assert_idle()


@both_depths
def test_by_priority_the_least_urgent_is_preempted(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepper = Stepper(
        make_scheduler(num_blocks=8, depth=depth, policy="priority", prefix_caching=False)
    )
    preempted = watch_preemptions(stepper.scheduler, monkeypatch)
    for priority in (2, 0, 1):
        stepper.add([priority] * 6, max_tokens=12, priority=priority)
    stepper.run()
    assert preempted
    assert preempted[0] == "r1"
    assert "r2" not in preempted


@both_depths
def test_usage_is_of_the_first_scheduled_prefill(depth: int) -> None:
    stepper = Stepper(make_scheduler(num_blocks=10, depth=depth))
    stepper.add([5] * 9, max_tokens=1)
    stepper.run()
    requests = [stepper.add([5] * 9, max_tokens=24), stepper.add([6] * 9, max_tokens=24)]
    stepper.run()
    assert requests[1].num_preemptions > 0
    assert [r.usage().num_local_cached_tokens for r in requests] == [8, 0]
    assert [r.usage().num_preemptions for r in requests] == [r.num_preemptions for r in requests]
    assert stepper.scheduler.stats.num_prompt_tokens == 27
    assert stepper.scheduler.stats.num_local_cached_tokens == 8


# --- blocks of those that ended while a step is in flight ----------------------------------------


@both_ends
def test_b02_b10_blocks_are_not_handed_on_while_a_step_may_touch_them(
    status: RequestStatus,
) -> None:
    # I5
    stepper = Stepper(make_scheduler(num_blocks=6, depth=2))
    old = stepper.add([1] * 15, max_tokens=20)
    stepper.step()
    launched(stepper)
    assert len(stepper.inflight) == 2
    assert old.last_step_id == stepper.inflight[-1].step_id
    num_held = len(old.blocks)
    stepper.scheduler.finish_request(old, status)
    new = stepper.add([2] * 12, max_tokens=4)
    stepper.apply()
    assert stepper.launch() is None, "it does not fit beside what may still be written to"
    assert stepper.scheduler.kv_cache.num_fenced_blocks == num_held
    stepper.apply()
    assert stepper.scheduler.kv_cache.num_fenced_blocks == 0
    assert new.request_id in launched(stepper).num_scheduled_tokens
    stepper.run()
    assert_right(stepper, [new])
    stepper.assert_idle()


def test_b02_a_request_that_stops_by_itself_is_fenced_by_the_step_after() -> None:
    stop = answer([1] * 7, 3)[2]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[stop])
    stepper = Stepper(make_scheduler(num_blocks=4, depth=2))
    request = stepper.add([1] * 7, params=params)
    while not request.is_finished:
        stepper.launch()
        stepper.launch()
        stepper.apply()
    assert request.status is RequestStatus.FINISHED_STOPPED
    assert request.stop_reason == stop
    assert len(stepper.inflight) == 1, "a step too many was planned"
    kv_cache = stepper.scheduler.kv_cache
    assert kv_cache.num_fenced_blocks == 4 - kv_cache.pool.num_free_blocks > 0
    stepper.apply()
    assert kv_cache.num_fenced_blocks == 0
    assert len(stepper.outputs[request.request_id]) == request.output_token_ids.index(stop) + 1
    stepper.run()
    stepper.assert_idle()


@both_depths
def test_the_end_is_told_once_also_by_a_step_without_tokens(depth: int) -> None:
    stepper = Stepper(make_scheduler(depth=depth))
    told: list[str] = []
    stepper.add([1, 2], max_tokens=2, request_id="a")
    stepper.add([1, 2], max_tokens=3, request_id="b")
    while True:
        while (output := stepper.launch()) is not None:
            told += sorted(output.finished_req_ids)
        if not stepper.inflight:
            break
        stepper.apply()
    assert told == ["a", "b"]
    assert output is None
    never_run = stepper.add([3], request_id="c")
    stepper.scheduler.finish_request(never_run, RequestStatus.FINISHED_ABORTED)
    stepper.scheduler.finish_request(never_run, RequestStatus.FINISHED_STOPPED)
    assert never_run.status is RequestStatus.FINISHED_ABORTED, "the first end counts"
    empty = launched(stepper)
    assert empty.total_num_scheduled_tokens == 0
    assert empty.finished_req_ids == frozenset({"c"})
    stepper.apply()
    assert stepper.launch() is None
    stepper.assert_idle()


@both_depths
def test_an_id_is_used_again_while_its_old_step_is_in_flight(depth: int) -> None:
    stepper = Stepper(make_scheduler(depth=depth))
    old = stepper.add([1, 2, 3, 4, 5], request_id="x")
    launched(stepper)
    stepper.scheduler.finish_request(old, RequestStatus.FINISHED_ABORTED)
    new = stepper.add([5, 6], request_id="x", max_tokens=6)
    stepper.run()
    assert old.num_output_tokens == 0
    assert stepper.outputs["x"] == answer([5, 6], 6)
    assert new.status is RequestStatus.FINISHED_LENGTH_CAPPED
    stepper.assert_idle()


@both_depths
def test_a_request_error_ends_one_and_updates_the_others(depth: int) -> None:
    stepper = Stepper(make_scheduler(depth=depth))
    bad, good = stepper.add([1, 2], request_id="bad"), stepper.add([3, 4], request_id="good")
    output = launched(stepper)
    stepper.launch()
    result = stepper.runner.execute(output)
    tokens = {"good": result.sampled_token_ids["good"]}
    broken = ModelRunnerOutput(tokens, {}, {"bad": "no number"})
    stepper.inflight.popleft()
    updates = stepper.scheduler.update_from_output(output, broken)
    assert [(u.request.request_id, u.new_token_ids) for u in updates] == [
        ("bad", ()),
        ("good", tokens["good"]),
    ]
    assert (bad.status, bad.error) == (RequestStatus.FINISHED_ERROR, "no number")
    stepper.outputs["good"] += tokens["good"]
    stepper.run()
    assert_right(stepper, [good])
    stepper.assert_idle()


# --- pools that are just big enough --------------------------------------------------------------


@both_depths
@pytest.mark.parametrize("num_blocks", [7, 8, 9, 16])
def test_b43_pools_around_the_size_of_the_work(depth: int, num_blocks: int) -> None:
    """Two requests of 16 tokens each: eight blocks hold both to the end, or just do not."""
    stepper = Stepper(make_scheduler(num_blocks=num_blocks, depth=depth, prefix_caching=False))
    requests = [stepper.add([i] * 9, max_tokens=8) for i in range(2)]
    stepper.run()
    assert_right(stepper, requests)
    assert (stepper.scheduler.stats.num_preemptions > 0) == (num_blocks < 8)
    stepper.assert_idle()


@both_depths
@pytest.mark.parametrize(("blocks", "model_len"), [(4, 200), (50, 16)])
def test_b33_the_longest_prompt_that_is_admitted_runs(
    depth: int, blocks: int, model_len: int
) -> None:
    scheduler = make_scheduler(num_blocks=blocks, max_model_len=model_len, depth=depth)
    assert scheduler.max_total_tokens == 16
    stepper = Stepper(scheduler)
    for length in (15, 14, 1):
        request = stepper.add([length] * length, max_tokens=None)
        stepper.run(200)
        assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED
        assert request.num_tokens == 16
        assert_right(stepper, [request])
    stepper.assert_idle()
    with pytest.raises(AssertionError):
        stepper.add([1] * 16)  # the front end refuses it before


@both_depths
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_b83bc_256_requests_in_a_pool_for_40(depth: int, policy: SchedulingPolicy) -> None:
    stepper = Stepper(
        make_scheduler(
            num_blocks=160,  # of four blocks each
            max_num_seqs=64,
            max_num_batched_tokens=100,
            policy=policy,
            depth=depth,
        )
    )
    requests = [
        stepper.add(
            [j % (2 + i % 3) for j in range(4 + i % 9)] + [i % 5], max_tokens=6, priority=i % 3
        )
        for i in range(256)
    ]
    stepper.run()
    assert all(len(stepper.outputs[r.request_id]) == 6 for r in requests)
    assert_right(stepper, requests)
    assert stepper.scheduler.stats.num_local_cached_tokens > 0
    stepper.assert_idle()


# --- prefix cache --------------------------------------------------------------------------------


@both_depths
@pytest.mark.parametrize("length", [15, 16, 17, 32, 48])
def test_b83a_a_prompt_that_is_cached_whole(depth: int, length: int) -> None:
    stepper = Stepper(make_scheduler(block_size=16, num_blocks=8, depth=depth))
    prompt = [i % 7 for i in range(length)]
    for expected in (0, length - 1, length - 1):
        request = stepper.add(prompt, max_tokens=4)
        first = launched(stepper)
        assert first.num_scheduled_tokens[request.request_id] == length - expected >= 1
        assert len(first.block_copies) == (expected % 16 > 0)
        stepper.run()
        assert request.num_local_cached_tokens == expected
        assert stepper.outputs[request.request_id] == answer(prompt, 4)
    stepper.assert_idle()


def test_b49_a_prompt_sent_again_hits_though_the_pool_is_just_big_enough() -> None:
    stepper = Stepper(make_scheduler(num_blocks=4))
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    other = [1, 2, 3, 4, 9, 9, 9]
    cached = []
    for tokens in (prompt, other, prompt):
        request = stepper.add(tokens, max_tokens=1)
        stepper.run()
        cached.append(request.num_local_cached_tokens)
        assert_right(stepper, [request])
    assert cached[:2] == [0, 4]
    assert cached[2] is not None
    assert cached[2] >= 4


def test_b83f_a_block_that_is_not_full_after_the_step_is_never_hit() -> None:
    stepper = Stepper(make_scheduler(block_size=16, max_num_batched_tokens=8))
    first = stepper.add([i % 5 for i in range(20)], max_tokens=3)
    second = stepper.add([i % 5 for i in range(20)], max_tokens=3)
    plans = []
    while second.num_local_cached_tokens is None:
        plans.append(dict(launched(stepper).num_scheduled_tokens))
        stepper.apply()
    assert plans == [{"r1": 8}, {"r1": 8}, {"r1": 4, "r2": 4}]
    assert second.num_local_cached_tokens == 16, "by then the block was full"
    stepper.run()
    assert_right(stepper, [first, second])


def test_b83f_two_short_prompts_in_one_step_share_nothing() -> None:
    stepper = Stepper(make_scheduler(block_size=16))
    requests = [stepper.add([1, 2, 3, 4, 5, 6, 7, 8], max_tokens=3) for _ in range(2)]
    assert launched(stepper).num_scheduled_tokens == {"r1": 8, "r2": 8}
    assert requests[0].blocks[0] is not requests[1].blocks[0]
    stepper.run()
    assert_right(stepper, requests)


@both_depths
def test_b83f_a_block_that_this_very_step_fills_is_shared(depth: int) -> None:
    stepper = Stepper(make_scheduler(block_size=16, depth=depth))
    requests = [stepper.add([i % 5 for i in range(20)], max_tokens=3) for _ in range(3)]
    assert launched(stepper).num_scheduled_tokens == {"r1": 20, "r2": 4, "r3": 4}
    shared = requests[0].blocks[0]
    assert shared.pending_step == 1
    assert shared.ref_cnt == 3
    # The one that fills it may leave: the step computes it all the same.
    stepper.scheduler.finish_request(requests[0], RequestStatus.FINISHED_ABORTED)
    stepper.run()
    assert_right(stepper, requests[1:])
    stepper.assert_idle()


async def _stored(stream: EventStream) -> list[int]:
    stream.close()
    return [e.block_id or 0 async for e in stream if isinstance(e, BlockStored)]


async def test_a_block_is_published_when_its_step_is_applied_and_not_before() -> None:
    # I6
    """Its last token was unknown when the step that computes it was planned."""
    bus = EventBus()
    stepper = Stepper(make_scheduler(depth=2, events=bus))
    request = stepper.add([1, 2, 3], max_tokens=6)
    launched(stepper)  # computes the prompt, samples token 3
    launched(stepper)  # computes token 3, which fills the block
    block = request.blocks[0]
    stream = bus.subscribe()
    stepper.apply()
    assert len(request.block_hashes) == 1, "all ids are known by now"
    hashes = [block.block_hash]
    assert await _stored(stream) == []
    stream = bus.subscribe()
    stepper.apply()
    hashes.append(block.block_hash)
    assert hashes == [None, request.block_hashes[0]], "what computes the last id was in flight"
    assert await _stored(stream) == [block.block_id]
    stepper.run()
    stepper.assert_idle()


async def test_a_block_in_flight_may_be_shared_by_a_later_step() -> None:
    """It is pending then, and is published when both steps have been applied."""
    bus = EventBus()
    stepper = Stepper(make_scheduler(depth=2, events=bus))
    request = stepper.add([1, 2, 3], max_tokens=6)
    launched(stepper)
    launched(stepper)
    stepper.apply()
    stream = bus.subscribe()
    follower = stepper.add([*request.all_token_ids, 9], max_tokens=2)
    launched(stepper)
    block = request.blocks[0]
    assert follower.num_local_cached_tokens == 4
    assert follower.blocks[0] is block
    pending = [block.pending_step is not None]
    assert await _stored(stream) == []
    for _ in range(2):
        stepper.apply()
        pending.append(block.pending_step is not None)
    assert pending == [True, True, False]
    late = stepper.add([*request.all_token_ids[:4], 8], max_tokens=2)
    stepper.run()
    assert late.num_local_cached_tokens == 4
    assert_right(stepper, [request, follower, late])
    stepper.assert_idle()


@both_depths
async def test_stored_is_told_once_for_each_block_of_prompt_and_answer(depth: int) -> None:
    bus = EventBus()
    stepper = Stepper(make_scheduler(depth=depth, events=bus))
    stream = bus.subscribe()
    request = stepper.add([1, 2, 3], max_tokens=11)
    stepper.run()
    stored = await _stored(stream)
    assert len(stored) == len(set(stored)) == (3 + 11 - 1) // 4
    again = stepper.add(request.all_token_ids, max_tokens=1)
    stepper.run()
    assert again.num_local_cached_tokens == 13, "12 in full blocks, one copied"
    assert_right(stepper, [again])


@both_depths
def test_a_preemption_is_told(depth: int) -> None:
    bus = EventBus()
    stream = bus.subscribe()
    stepper = Stepper(make_scheduler(num_blocks=5, depth=depth, events=bus))
    requests = [stepper.add([i] * 6, max_tokens=10) for i in range(2)]
    stepper.run()
    told = [e for e in stream._pending if isinstance(e, RequestPreempted)]
    assert [e.request_id for e in told] == ["r2"] * requests[1].num_preemptions
    assert requests[1].num_preemptions > 0


@both_depths
def test_the_cache_can_be_reset_as_soon_as_nothing_is_held(depth: int) -> None:
    """Also while the step that only tells the runner of the last end is in flight."""
    stepper = Stepper(make_scheduler(depth=depth))
    request = stepper.add([1, 2, 3, 4, 5], max_tokens=2)
    resets = []
    while not request.is_finished:
        launched(stepper)
        resets.append(stepper.scheduler.reset_prefix_cache())
        stepper.apply()
    assert not any(resets)
    assert launched(stepper).total_num_scheduled_tokens == 0
    assert stepper.scheduler.reset_prefix_cache()
    assert stepper.scheduler.kv_cache.pool.num_cached_blocks == 0
    stepper.run()
    stepper.assert_idle()


# --- cost and determinism ------------------------------------------------------------------------


def calls_of(function: Callable[[], object]) -> int:
    """Python and C functions called meanwhile."""
    count = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


@both_depths
def test_planning_and_applying_are_linear_in_the_running_requests(depth: int) -> None:
    planning, applying = [], []
    for num in (64, 128, 256):
        scheduler = make_scheduler(
            num_blocks=4 * num, max_num_seqs=num, max_num_batched_tokens=8 * num, depth=depth
        )
        stepper = Stepper(scheduler)
        for i in range(num):
            stepper.add([i % 50, i // 50, 1, 2, 3, 4], max_tokens=9)
        stepper.step()
        if not stepper.inflight:
            launched(stepper)
        while stepper.inflight:
            stepper.apply()
        planning.append(calls_of(stepper.launch))
        output = stepper.inflight.popleft()
        assert len(output.num_scheduled_tokens) == num
        result = stepper.runner.execute(output)
        update = functools.partial(scheduler.update_from_output, output, result)
        applying.append(calls_of(update))
    for counts in (planning, applying):
        assert counts[2] - counts[1] <= 2.1 * (counts[1] - counts[0])
        assert counts[2] <= 60 * 256, "a step of 256 requests stays under 2 ms"


@both_depths
def test_equal_engines_make_equal_plans(depth: int) -> None:
    def plans() -> list[SchedulerOutput]:
        stepper = Stepper(make_scheduler(num_blocks=12, max_num_batched_tokens=9, depth=depth))
        found = []
        for i in range(12):
            stepper.add([j % 3 for j in range(1 + i * 3 % 17)], max_tokens=7, priority=i % 2)
        while True:
            while (output := stepper.launch()) is not None:
                found.append(output)
            if not stepper.inflight:
                return found
            stepper.apply()

    assert plans() == plans()
