"""`get_compute_end`: requests that are computed from the front while their back is loaded. What the
engine makes of every answer, over a scripted connector; the oracle finds every wrong KV."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest
from connected import NOTHING, assert_right, connected_stepper, prompt_of, warm
from scheduling import Stepper

from interlace.connectors.conformance import Async, Rule, Script, Sync
from interlace.connectors.conformance.scripted_worker import ScriptedWorker
from interlace.engine.errors import ConnectorError
from interlace.engine.request import Request, RequestStatus

both_depths = pytest.mark.parametrize("depth", [1, 2])
Policy = Literal["fail", "recompute"]


@dataclasses.dataclass
class World:
    """A stepper over a scripted connector that has 40 tokens of `prompt_of`."""

    stepper: Stepper
    script: Script
    worker: ScriptedWorker

    def open(self, num_tokens: int = 36, **options: Any) -> Request:
        """A request whose load from the back has begun."""
        request = self.stepper.add(prompt_of(num_tokens), max_tokens=3, **options)
        self.stepper.step()
        assert request.hole_end is not None
        return request

    def end_loads(self) -> None:
        """With the next step."""
        for load in self.worker._async:
            load.steps_left = 0

    def run(self, *requests: Request) -> None:
        """To the end, where nothing is left and these have the right answers."""
        self.stepper.run()
        assert_right(self.stepper, *requests)
        self.stepper.assert_idle()
        assert self.worker.is_idle


def world(
    *ends: Any, num_tokens: int | None = 32, on_failure: Policy = "recompute", **options: Any
) -> World:
    """All requests are promised up to `num_tokens` tokens, and compute up to `ends`. `options`:
    fields of the rule, or those of `connected_stepper`."""
    script = Script()
    warm(script, prompt_of(40))
    fields = {field.name for field in dataclasses.fields(Rule)} & options.keys()
    rule = {name: options.pop(name) for name in fields}
    script.default = Rule(
        **{"answers": (Async(num_tokens),), "compute_ends": ends, "save": False, **rule}
    )
    stepper, (_, worker_side) = connected_stepper(script, policy_on_failure=on_failure, **options)
    return World(stepper, script, worker_side._on_worker)


# -------------------------------------------------------------------- answers


@both_depths
@pytest.mark.parametrize("budget", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("end", [4, 16, 32])
@pytest.mark.parametrize("delay", [0, 2, 9])
def test_the_two_meet(end: int, delay: int, budget: int, depth: int) -> None:
    engine = world(end, load_delay=delay, depth=depth, max_num_batched_tokens=budget)
    request = engine.stepper.add(prompt_of(36), max_tokens=3)
    engine.run(request)
    assert (request.num_local_cached_tokens, request.num_external_cached_tokens) == (0, 32 - end)
    stats = engine.stepper.scheduler.stats
    assert (stats.num_external_cached_tokens, stats.num_stray_reports) == (32 - end, 0)


def test_behind_the_front_news_are_asked_for_if_the_device_works_by_itself() -> None:
    """Once, and not before there is nothing else to plan."""
    engine = world(16, load_delay=4, depth=3, max_num_batched_tokens=8)
    engine.stepper.add(prompt_of(36), max_tokens=3)
    scheduler = engine.stepper.scheduler

    def plan(**how: bool) -> int | None:
        output = scheduler.schedule(**how)
        if output is None:
            return None
        engine.stepper.inflight.append(output)
        return output.total_num_scheduled_tokens

    assert [plan(poll=True, may_poll_behind=True) for _ in range(3)] == [8, 8, None]
    engine.stepper.apply()
    assert [plan(poll=True), plan(may_poll_behind=True)] == [None, None]
    assert [plan(poll=True, may_poll_behind=True) for _ in range(2)] == [0, None]
    engine.stepper.run()
    engine.stepper.assert_idle()


@both_depths
@pytest.mark.parametrize("num_tokens", [30, 33, 35, 36])
def test_a_promise_that_ends_in_a_block_or_with_the_prompt(num_tokens: int, depth: int) -> None:
    engine = world(8, num_tokens=num_tokens, load_delay=2, depth=depth)
    request = engine.stepper.add(prompt_of(36), max_tokens=3)
    engine.run(request)
    assert request.num_external_cached_tokens == min(num_tokens, 35) - 8


UNLAWFUL = [
    (True, "give an int"),
    ("8", "give an int"),
    (8.0, "give an int"),
    (6, "a multiple of the block size"),
    (-4, "at least"),
    (36, "at most 32"),
]


@pytest.mark.parametrize(("end", "said"), UNLAWFUL)
def test_an_unlawful_first_answer_ends_the_request_alone(end: object, said: str) -> None:
    engine = world(end)
    engine.script.rules["other"] = NOTHING
    wrong = engine.stepper.add(prompt_of(40), max_tokens=3)
    other = engine.stepper.add(prompt_of(9), request_id="other", max_tokens=3)
    engine.run(other)
    assert wrong.status is RequestStatus.FINISHED_ERROR
    assert said in str(wrong.error)


@pytest.mark.parametrize(("end", "said"), [*UNLAWFUL, (None, "answered None"), (4, "at least 8")])
def test_an_unlawful_later_answer_is_fatal(end: object, said: str) -> None:
    engine = world(16, 16, end, load_delay=None, max_num_batched_tokens=4)
    request = engine.open()
    engine.stepper.step()
    assert request.num_computed_tokens == 8
    with pytest.raises(ConnectorError, match=said):
        engine.stepper.step()


@pytest.mark.parametrize("number", [1, 2])
def test_what_it_raises_is_blamed(number: int) -> None:
    engine = world(8)
    engine.script.raises["get_compute_end"] = (number, OSError("gone"))
    request = engine.stepper.add(prompt_of(36), max_tokens=3)
    if number == 1:
        engine.run()
        assert request.status is RequestStatus.FINISHED_ERROR
        assert "get_compute_end" in str(request.error)
    else:
        with pytest.raises(ConnectorError, match="get_compute_end raised OSError: gone"):
            engine.stepper.run()


@both_depths
@pytest.mark.parametrize("end", [None, 0, 4, 8])
def test_with_nothing_to_compute_it_waits_like_any_other(end: int | None, depth: int) -> None:
    """8 tokens are cached on the device."""
    engine = world(end, num_tokens=24, load_delay=2, depth=depth)
    engine.script.rules["first"] = NOTHING
    first = engine.stepper.add(prompt_of(9), request_id="first", max_tokens=1)
    engine.run(first)
    request = engine.stepper.add(prompt_of(36), max_tokens=3)
    engine.stepper.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.run(request)
    assert (request.num_local_cached_tokens, request.num_external_cached_tokens) == (8, 24)


@both_depths
def test_behind_what_is_cached_here(depth: int) -> None:
    engine = world(20, num_tokens=24, load_delay=2, depth=depth, max_num_batched_tokens=5)
    engine.script.rules["first"] = NOTHING
    engine.run(engine.stepper.add(prompt_of(9), request_id="first", max_tokens=1))
    request = engine.stepper.add(prompt_of(36), max_tokens=3)
    engine.run(request)
    assert (request.num_local_cached_tokens, request.num_external_cached_tokens) == (8, 12)


@both_depths
@pytest.mark.parametrize(
    "ends", [(24, 24, 12), (8, 8, 16, 24), (8, 8, 28, 12), (32, 16), (4, 4, 4, 32)]
)
@pytest.mark.parametrize("delay", [5, 20])
def test_the_answer_may_fall_and_rise(ends: tuple[int, ...], delay: int, depth: int) -> None:
    engine = world(*ends, load_delay=delay, depth=depth, max_num_batched_tokens=3)
    request = engine.stepper.add(prompt_of(36), max_tokens=3)
    engine.run(request)
    assert request.num_external_cached_tokens == 32 - ends[-1]


@both_depths
def test_after_the_load_it_is_asked_once(depth: int) -> None:
    """What it says then was brought, and the rest was not, whatever it says later."""
    engine = world(16, 16, 4, load_delay=0, depth=depth, max_num_batched_tokens=2)
    request = engine.stepper.add(prompt_of(36), max_tokens=3)
    engine.stepper.launch()
    engine.stepper.apply()
    engine.run(request)
    assert engine.script.count("get_compute_end") == 2
    assert request.num_external_cached_tokens == 16


# -------------------------------------------------------------------- with the hole open


@both_depths
def test_nothing_is_forgotten_or_sampled_meanwhile(depth: int) -> None:
    engine = world(16, load_delay=None, depth=depth)
    request = engine.open()
    for _ in range(3):
        engine.stepper.step()
    scheduler = engine.stepper.scheduler
    assert not request.output_token_ids
    assert request.num_computed_tokens == 16
    assert scheduler.awaits_connector
    assert not scheduler.reset_prefix_cache()
    engine.end_loads()
    engine.run(request)
    assert scheduler.reset_prefix_cache()


@both_depths
@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
@pytest.mark.parametrize("delay", [0, 3, None])
def test_an_abort_at_any_time(num_steps: int, delay: int | None, depth: int) -> None:
    """A request of that id comes again as soon as it may."""
    engine = world(16, load_delay=delay, depth=depth, max_num_batched_tokens=5)
    scheduler = engine.stepper.scheduler
    request = engine.stepper.add(prompt_of(36), request_id="again", max_tokens=3)
    engine.stepper.launch()
    for _ in range(num_steps):
        engine.stepper.step()
    is_loading = scheduler._transfers.is_loading(request)
    scheduler.finish_request(request, RequestStatus.FINISHED_ABORTED)
    assert scheduler.num_held_requests == is_loading
    engine.end_loads()
    while scheduler.knows("again"):
        assert engine.stepper.step()
        engine.end_loads()
    engine.script.default = dataclasses.replace(engine.script.default, load_delay=1)
    engine.run(engine.stepper.add(prompt_of(36), request_id="again", max_tokens=3))
    assert scheduler.stats.num_stray_reports == 0


@both_depths
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_preemption_ends_the_load_and_the_next_one_is_its_own(policy: str, depth: int) -> None:
    """Somebody ahead of it takes its blocks; then it is loaded anew, under the same id."""
    engine = world(16, load_delay=None, depth=depth, num_blocks=14, policy=policy)
    engine.script.rules["ahead"] = NOTHING
    ahead = engine.stepper.add([9] * 14, request_id="ahead", max_tokens=20, priority=-1)
    engine.stepper.step()
    victim = engine.open()
    while not victim.num_preemptions:
        assert engine.stepper.step()
    assert victim.hole_end is None
    assert engine.worker.is_idle, "the load is lost"
    engine.script.default = dataclasses.replace(engine.script.default, load_delay=2)
    engine.run(ahead, victim)
    assert engine.stepper.scheduler.stats.num_stray_reports == 0


@both_depths
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("on_failure", ["fail", "recompute"])
@pytest.mark.parametrize("bad", [frozenset({0}), frozenset({3}), frozenset({4, 6}), frozenset({7})])
def test_a_bad_block(bad: frozenset[int], on_failure: Policy, depth: int, *, early: bool) -> None:
    """Of what is computed none is bad; the first one that was to be loaded ends what is used."""
    engine = world(
        16, fail=bad, report_early=early, load_delay=4, on_failure=on_failure, depth=depth
    )
    request = engine.stepper.add(prompt_of(36), max_tokens=3)
    is_lost = bad >= {4} or bad >= {7}
    if on_failure == "fail" and is_lost:
        engine.run()
        assert request.status is RequestStatus.FINISHED_ERROR
        assert f"KV from position {4 * min(bad)} on could not be loaded" in str(request.error)
        return
    engine.run(request)
    assert request.num_external_cached_tokens == 4 * (min({8} | (bad - {0, 3})) - 4)


@both_depths
@pytest.mark.parametrize("bad", [0, 2])
def test_a_bad_block_of_the_front_that_another_request_loads(bad: int, depth: int) -> None:
    """Who comes last of those that share it is preempted, with its hole open."""
    engine = world(20, num_tokens=20, load_delay=None, depth=depth)
    engine.script.rules["loader"] = Rule(
        answers=(Sync(12),), fail=frozenset({bad}), num_failing_loads=1, save=False
    )
    loader = engine.stepper.add(prompt_of(14), request_id="loader", max_tokens=5)
    victim = engine.stepper.add(prompt_of(36), max_tokens=3)
    engine.stepper.step()
    assert (victim.num_preemptions, engine.worker.is_idle) == (1, False)
    engine.stepper.step()
    assert engine.worker.is_idle, "the load is lost"
    engine.script.default = dataclasses.replace(engine.script.default, load_delay=2)
    engine.run(loader, victim)
    assert engine.stepper.scheduler.stats.num_stray_reports == 0
