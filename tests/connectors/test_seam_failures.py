"""KV that was promised and did not come: what is dropped, who is set back, what is never hit."""

from __future__ import annotations

import gc
import weakref
from typing import Literal

import pytest
from connected import assert_right, connected_stepper, prompt_of, warm
from scheduling import launched

from interlace.connectors.conformance import Async, Rule, Script, Sync
from interlace.engine.kv_connector import KVConnectorRole
from interlace.engine.request import RequestStatus

both_depths = pytest.mark.parametrize("depth", [1, 2])
both_kinds = pytest.mark.parametrize("kind", [Sync, Async])
FAILED = RequestStatus.FINISHED_ERROR


# --- recompute -----------------------------------------------------------------------------------


@both_depths
@both_kinds
@pytest.mark.parametrize("budget", [3, 64])
@pytest.mark.parametrize("bad", range(6))
def test_b21_block_k_of_n_fails_for_every_k(
    depth: int, kind: type[Sync] | type[Async], budget: int, bad: int
) -> None:
    """I16. Two requests share the prefix; the second is admitted in the step that loads it."""
    prompt = prompt_of(25)
    script = Script(
        rules={
            "one": Rule(answers=(kind(24),), fail=frozenset({bad}), num_failing_loads=1),
            "two": Rule(answers=((0, False),)),
        }
    )
    warm(script, prompt)
    stepper, _ = connected_stepper(script, depth=depth, max_num_batched_tokens=budget)
    one = stepper.add(prompt, request_id="one", max_tokens=6)
    two = stepper.add([*prompt, 3, 4], request_id="two", max_tokens=6)
    stepper.run(max_steps=200)
    assert_right(stepper, one, two)
    stepper.assert_idle()
    if kind is Async and bad == 0:
        return  # nothing was left of it: it began anew, when the other had computed the prefix
    assert stepper.scheduler.stats.num_invalid_blocks == 1
    assert one.usage().num_external_cached_tokens == bad * 4
    assert stepper.scheduler.stats.num_connector_hit_tokens == 24, "counted once, when promised"


def test_a_failed_step_gives_no_tokens_and_the_request_goes_on_running() -> None:
    prompt = prompt_of(17)
    script = Script(rules={"one": Rule(answers=(Sync(16),), fail=frozenset({2}))})
    warm(script, prompt)
    stepper, _ = connected_stepper(script)
    one = stepper.add(prompt, request_id="one", max_tokens=2)
    other = stepper.add([5] * 6, request_id="other", max_tokens=2)
    launched(stepper)
    blocks = list(one.blocks)
    updates = stepper.apply()
    assert [update.request for update in updates] == [other]
    assert one.status is RequestStatus.RUNNING
    assert one.num_computed_tokens == 8
    assert one.blocks == blocks
    assert [block.block_hash is not None for block in blocks] == [True, True, False, False, False]
    assert launched(stepper).num_scheduled_tokens["one"] == 9
    stepper.run()
    assert_right(stepper, one, other)
    assert script.count("request_finished") == 3


def test_b27_no_sharer_keeps_what_it_had_and_its_own_blocks_are_hidden() -> None:
    """I16, I2: also the blocks that a sharer computed on the bad ground within the step."""
    prompt = prompt_of(17)
    script = Script(
        rules={
            "one": Rule(answers=(Sync(16),), fail=frozenset({1})),
            "two": Rule(answers=((0, False),)),
        }
    )
    warm(script, prompt)
    stepper, _ = connected_stepper(script)
    one = stepper.add(prompt, request_id="one", max_tokens=2)
    two = stepper.add([*prompt, *range(12)], request_id="two", max_tokens=2)
    launched(stepper)
    assert two.num_local_cached_tokens == 16
    assert stepper.apply() == []
    assert (one.num_computed_tokens, two.num_computed_tokens) == (4, 0)
    assert two.status is RequestStatus.PREEMPTED, "or both would compute into the same blocks"
    assert stepper.scheduler.kv_cache.pool.num_cached_blocks == 1
    plan = launched(stepper)
    assert plan.preempted_req_ids == {"two"}
    assert dict(plan.num_scheduled_tokens) == {"one": 13}
    stepper.run()
    assert_right(stepper, one, two)
    third = stepper.add([*prompt, *range(12)], request_id="three", max_tokens=2)
    script.rules["three"] = script.rules["two"]
    stepper.run()
    assert_right(stepper, third)
    assert third.usage().num_local_cached_tokens == 28


@pytest.mark.parametrize("abort", ["one", "two"])
def test_what_was_shared_stays_hidden_though_its_owner_was_aborted_meanwhile(abort: str) -> None:
    prompt = prompt_of(17)
    script = Script(
        rules={
            "one": Rule(answers=(Sync(16),), fail=frozenset({1})),
            "two": Rule(answers=((0, False),)),
            "after": Rule(answers=((0, False),)),
        }
    )
    warm(script, prompt)
    stepper, _ = connected_stepper(script)
    requests = {
        "one": stepper.add(prompt, request_id="one", max_tokens=2),
        "two": stepper.add([*prompt, *range(9)], request_id="two", max_tokens=2),
    }
    launched(stepper)
    gone = requests.pop(abort)
    stepper.scheduler.finish_request(gone, RequestStatus.FINISHED_ABORTED)
    stepper.apply()
    after = stepper.add([*prompt, *range(11)], request_id="after", max_tokens=3)
    stepper.run()
    assert_right(stepper, after, *requests.values())
    stepper.assert_idle()


def test_the_last_part_of_a_held_request_on_bad_ground_is_never_copied() -> None:
    """I16: its blocks are freed long after the step that found the bad one."""
    prompt = prompt_of(10)
    script = Script(
        default=Rule(answers=((0, False),)),
        rules={"one": Rule(answers=(Sync(8),), fail=frozenset({0}), hold=True, send_delay=2)},
    )
    warm(script, prompt)
    stepper, _ = connected_stepper(script)
    one = stepper.add(prompt, request_id="one", max_tokens=3)
    launched(stepper)
    stepper.scheduler.finish_request(one, RequestStatus.FINISHED_ABORTED)
    stepper.apply()
    stepper.run()
    assert not stepper.scheduler.num_held_requests
    shorter = stepper.add(prompt[:9], max_tokens=1)
    stepper.run()
    longer = stepper.add([*prompt, 1, 2], max_tokens=2)
    stepper.run()
    assert_right(stepper, shorter, longer)


def test_only_a_load_of_its_own_counts_as_failed() -> None:
    prompt = prompt_of(17)
    script = Script(
        rules={
            "one": Rule(answers=(Sync(16),), fail=frozenset({0, 1, 3})),
            "two": Rule(answers=((0, False),)),
            "three": Rule(
                answers=(Async(40),), fail=frozenset({1, 3, 5}), load_delay=5, report_early=True
            ),
        }
    )
    warm(script, prompt)
    warm(script, [9, *prompt_of(40)])
    stepper, _ = connected_stepper(script)
    one = stepper.add(prompt, request_id="one", max_tokens=2)
    two = stepper.add(prompt, request_id="two", max_tokens=2)
    three = stepper.add([9, *prompt_of(40)], request_id="three", max_tokens=2)
    stepper.run()
    assert_right(stepper, one, two, three)
    assert [r.num_failed_loads for r in (one, two, three)] == [1, 0, 1]


@both_depths
@pytest.mark.parametrize("bad", [{0, 9}, {5, 9}, {9}])
def test_an_asynchronous_failure_sets_back_its_owner_alone(depth: int, bad: set[int]) -> None:
    prompt = prompt_of(41)
    script = Script(
        rules={
            "one": Rule(
                answers=(Async(40),), fail=frozenset(bad), load_delay=3, num_failing_loads=1
            ),
            "other": Rule(answers=(Async(36),), load_delay=3),
        }
    )
    warm(script, prompt)
    stepper, _ = connected_stepper(script, depth=depth)
    one = stepper.add(prompt, request_id="one", max_tokens=2)
    other = stepper.add(prompt[:37], request_id="other", max_tokens=2)
    stepper.run()
    assert_right(stepper, one, other)
    assert other.usage().num_external_cached_tokens == 36
    asked = [
        c.summary
        for c in script.calls
        if c.hook == "get_num_new_matched_tokens" and c.summary.startswith("one")
    ]
    # What nothing is left of is asked for once more; a part is built upon.
    assert len(asked) == (2 if 0 in bad else 1)


@both_depths
def test_failures_that_are_reported_bit_by_bit_only_shrink_what_is_there(depth: int) -> None:
    prompt = prompt_of(41)
    rule = Rule(answers=(Async(40),), fail=frozenset({8, 5, 3}), load_delay=5, report_early=True)
    script = Script(rules={"one": rule})
    warm(script, prompt)
    stepper, _ = connected_stepper(script, depth=depth)
    one = stepper.add(prompt, request_id="one", max_tokens=2)
    counts = []
    while one.status is not RequestStatus.RUNNING:
        stepper.step()
        counts.append(one.num_computed_tokens)
    waiting = [count for count in counts if count <= 40]
    assert waiting == sorted(waiting, reverse=True) or waiting[:-1] == sorted(
        waiting[:-1], reverse=True
    )
    assert 12 in counts
    stepper.run()
    assert_right(stepper, one)
    assert one.usage().num_external_cached_tokens == 12


@both_depths
@both_kinds
def test_a_connector_that_promises_again_and_again_is_not_asked_for_ever(
    depth: int, kind: type[Sync] | type[Async]
) -> None:
    script = Script(default=Rule(answers=(kind(16),), fail=frozenset(range(9))))
    stepper, _ = connected_stepper(script, depth=depth)
    one = stepper.add(prompt_of(17), max_tokens=3)
    stepper.run(max_steps=50)
    assert_right(stepper, one)
    assert one.usage().num_external_cached_tokens == 0


@both_depths
@pytest.mark.parametrize("repeats", [1, 3])
def test_reports_that_come_again(depth: int, repeats: int) -> None:
    """The same blocks once more: the request is set back again, and stays right."""
    rule = Rule(
        answers=(Async(16),),
        fail=frozenset({2}),
        hold=True,
        repeat_recving=repeats,
        repeat_sending=repeats,
        repeat_invalid=repeats,
    )
    script = Script(rules={"one": rule})
    prompt = prompt_of(17)
    warm(script, prompt)
    stepper, sides = connected_stepper(script, depth=depth)
    one = stepper.add(prompt, request_id="one", max_tokens=6)
    other = stepper.add([5] * 6, request_id="other", max_tokens=20)
    stepper.run()
    assert_right(stepper, one, other)
    assert stepper.scheduler.stats.num_stray_reports > 0
    stepper.assert_idle()
    assert sides[0].is_idle


# --- fail ----------------------------------------------------------------------------------------


@both_depths
@both_kinds
def test_under_fail_the_request_ends_with_an_error(
    depth: int, kind: type[Sync] | type[Async]
) -> None:
    prompt = prompt_of(25)
    script = Script(
        rules={
            "one": Rule(answers=(kind(24),), fail=frozenset({2})),
            "other": Rule(answers=((0, False),)),
            "after": Rule(answers=((0, False),)),
        }
    )
    warm(script, prompt)
    stepper, _ = connected_stepper(script, depth=depth, policy_on_failure="fail")
    one = stepper.add(prompt, request_id="one", max_tokens=6)
    other = stepper.add([5] * 6, request_id="other", max_tokens=12)
    stepper.run()
    assert one.status is FAILED
    assert "recompute" in (one.error or "")
    assert stepper.outputs["one"] == []
    after = stepper.add(prompt, request_id="after", max_tokens=6)
    stepper.run()
    assert_right(stepper, other, after)
    good = 8 if kind is Sync else 0  # what came whole within the step stays
    assert after.usage().num_local_cached_tokens == good
    assert script.count("request_finished") == 4
    stepper.assert_idle()


def test_under_fail_every_sharer_ends_and_earlier_blocks_stay_cached() -> None:
    prompt = prompt_of(25)
    script = Script(
        rules={
            "one": Rule(answers=(Sync(24),), fail=frozenset({3})),
            "two": Rule(answers=((0, False),)),
            "brief": Rule(answers=((0, False),)),
        }
    )
    warm(script, prompt)
    stepper, _ = connected_stepper(script, policy_on_failure="fail")
    one = stepper.add(prompt, request_id="one", max_tokens=6)
    two = stepper.add([*prompt, 1, 2, 3, 4, 5, 6], request_id="two", max_tokens=6)
    brief = stepper.add(prompt[:10], request_id="brief", max_tokens=6)
    launched(stepper)
    updates = {update.request.request_id: update for update in stepper.apply()}
    assert (one.status, two.status) == (FAILED, FAILED)
    assert updates["one"].new_token_ids == updates["two"].new_token_ids == ()
    assert len(updates["brief"].new_token_ids) == 1, "it shares only what is good"
    assert stepper.scheduler.kv_cache.pool.num_cached_blocks == 3
    stepper.run()
    assert_right(stepper, brief)
    stepper.assert_idle()


def test_under_fail_blocks_stay_until_the_load_has_ended() -> None:
    rule = Rule(answers=(Async(16),), fail=frozenset({1}), load_delay=4, report_early=True)
    script = Script(rules={"one": rule})
    prompt = prompt_of(17)
    warm(script, prompt)
    stepper, _ = connected_stepper(script, policy_on_failure="fail", num_blocks=8)
    one = stepper.add(prompt, request_id="one")
    while one.status is not FAILED:
        assert stepper.step()
    assert stepper.scheduler.num_held_requests == 1
    assert stepper.scheduler.kv_cache.pool.num_free_blocks == 4
    stepper.run()
    stepper.assert_idle()


# --- hooks that raise ----------------------------------------------------------------------------


class DiskOnFireError(Exception):
    """Unlike a built-in one it can be referred to weakly."""


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("hook", ["wait_for_layer_load", "start_load_kv"])
def test_b26_a_load_that_raises_fifty_times(
    hook: str, policy: Literal["recompute", "fail"]
) -> None:
    """The engine lives, nothing of it is a success under `fail`, and no traceback is kept."""
    prompt = prompt_of(17)
    script = Script()
    warm(script, prompt)
    script.default = Rule(answers=(Sync(16),), save=False)
    stepper, _ = connected_stepper(script, policy_on_failure=policy)
    errors = []
    for _ in range(50):
        error = DiskOnFireError()
        errors.append(weakref.ref(error))
        number = script.hooks(KVConnectorRole.WORKER).count(hook) + 1
        script.raises = {hook: (number, error)}
        one = stepper.add(prompt, max_tokens=2)
        stepper.run()
        if policy == "fail":
            assert one.status is FAILED
            assert stepper.outputs[one.request_id] == []
        else:
            assert_right(stepper, one)
            assert stepper.scheduler.reset_prefix_cache()
        stepper.assert_idle()
        script.raises = {}
        del error
    gc.collect()
    assert not any(error() for error in errors)
