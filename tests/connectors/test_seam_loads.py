"""The engine's side of the protocol, by single steps: match queries, loads, promotion, room."""

from __future__ import annotations

from typing import Any

import pytest
from connected import assert_right, connected_stepper, prompt_of, warm
from scheduling import launched

from interlace.connectors.conformance import Async, Rule, Script, Sync
from interlace.engine.kv_connector import KVConnectorRole
from interlace.engine.request import Request, RequestStatus

both_depths = pytest.mark.parametrize("depth", [1, 2])
WAITING_FOR_REMOTE_KVS = RequestStatus.WAITING_FOR_REMOTE_KVS


def rules(**answers: Any) -> dict[str, Rule]:
    return {name: Rule(answers=(one,)) for name, one in answers.items()}


# --- the example ---------------------------------------------------------------------------------


@both_depths
def test_the_seed_example(depth: int) -> None:
    """1,024 prompt tokens, blocks of 16, 256 cached locally, (512, True).

    768 tokens count as computed, none is scheduled, the request waits for its KV; later the other
    256 are scheduled. ARCHITECTURE.md walks through it.
    """
    script = Script()
    prompt = prompt_of(1024)
    warm(script, prompt, block_size=16)
    script.rules |= {"first": Rule(answers=((0, False),)), "seed": Rule(answers=(Async(512),))}
    stepper, _ = connected_stepper(
        script,
        block_size=16,
        num_blocks=100,
        max_model_len=1200,
        max_num_batched_tokens=2048,
        depth=depth,
    )
    stepper.add([*prompt[:256], 1], request_id="first", max_tokens=1)
    stepper.run()
    request = stepper.add(prompt, request_id="seed", max_tokens=4)
    output = launched(stepper)
    assert output.total_num_scheduled_tokens == 0
    assert not output.scheduled_new_reqs
    assert request.status is WAITING_FOR_REMOTE_KVS
    assert request.num_computed_tokens == 768
    assert len(request.blocks) == 48
    assert [block.block_hash is None for block in request.blocks] == [False] * 16 + [True] * 32
    stepper.apply()
    assert request.status is WAITING_FOR_REMOTE_KVS, "the report alone schedules nothing"
    output = launched(stepper)
    assert dict(output.num_scheduled_tokens) == {"seed": 256}
    (new,) = output.scheduled_new_reqs
    assert (new.req_id, new.num_computed_tokens) == ("seed", 768)
    stepper.scheduler.offer_blocks()  # the loop does while the step is computed
    assert all(block.block_hash is not None for block in request.blocks)
    stepper.run()
    assert_right(stepper, request)
    usage = request.usage()
    assert usage.num_local_cached_tokens == 256
    assert usage.num_external_cached_tokens == 512
    assert usage.num_computed_prompt_tokens == 256
    queries = [call for call in script.calls if call.hook == "get_num_new_matched_tokens"]
    assert len([call for call in queries if "seed" in call.summary]) == 1, "B17"


@both_depths
@pytest.mark.parametrize("how", [Async(1024), Sync(1024)])
def test_the_seed_example_all_external(depth: int, how: Async | Sync) -> None:
    """All 1,024 come from the connector: 1,023 count, and one token is computed again."""
    script = Script(rules={"seed": Rule(answers=(how,))})
    prompt = prompt_of(1024)
    warm(script, prompt, block_size=16)
    stepper, _ = connected_stepper(
        script, block_size=16, num_blocks=80, max_model_len=1200, depth=depth
    )
    request = stepper.add(prompt, request_id="seed", max_tokens=3)
    if isinstance(how, Async):
        assert launched(stepper).total_num_scheduled_tokens == 0
        stepper.apply()
    output = launched(stepper)
    assert dict(output.num_scheduled_tokens) == {"seed": 1}
    assert output.scheduled_new_reqs[0].num_computed_tokens == 1023
    assert len(request.blocks) == 64, "no new block is needed for it"
    stepper.run()
    assert_right(stepper, request)
    assert request.usage().num_external_cached_tokens == 1023
    stepper.assert_idle()


# --- how much is loaded --------------------------------------------------------------------------


@both_depths
@pytest.mark.parametrize("length", [15, 16, 17, 32, 33])
@pytest.mark.parametrize("how", [Sync(), Async()])
def test_b45_prompts_that_the_store_has_whole(depth: int, length: int, how: Async | Sync) -> None:
    script = Script(rules={"again": Rule(answers=(how,))})
    prompt = prompt_of(length)
    warm(script, prompt, block_size=16)
    stepper, _ = connected_stepper(script, block_size=16, num_blocks=8, depth=depth)
    request = stepper.add(prompt, request_id="again", max_tokens=5)
    stepper.run()
    assert_right(stepper, request)
    expected = min(length // 16 * 16, length - 1)
    assert request.usage().num_external_cached_tokens == expected
    stepper.assert_idle()


@both_depths
@pytest.mark.parametrize("budget", [1, 3, 64])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 9, 18, 19, 20])
@pytest.mark.parametrize("kind", [Sync, Async])
def test_any_number_of_tokens_may_be_brought(
    depth: int, budget: int, num_tokens: int, kind: type[Sync] | type[Async]
) -> None:
    """Also in the middle of a block, whose other slots hold whatever was there before."""
    script = Script(rules={"again": Rule(answers=(kind(num_tokens),))})
    prompt = prompt_of(20)
    warm(script, prompt)
    stepper, _ = connected_stepper(script, depth=depth, max_num_batched_tokens=budget)
    request = stepper.add(prompt, request_id="again", max_tokens=5)
    stepper.run()
    assert_right(stepper, request)
    assert request.usage().num_external_cached_tokens == min(num_tokens, 19)


@both_depths
def test_the_connector_is_asked_for_what_lies_beyond_the_whole_blocks(depth: int) -> None:
    """A part of a block that can be copied is used where the connector has no more than that."""
    script = Script(default=Rule(answers=(Sync(),)))
    prompt = prompt_of(23)
    stepper, _ = connected_stepper(script, depth=depth)
    first = stepper.add(prompt, max_tokens=1)
    stepper.run()
    again = stepper.add(prompt, max_tokens=1)
    stepper.run()
    longer = stepper.add([*prompt[:18], 46, 46, 46, 46, 46, 46], max_tokens=1)
    stepper.run()
    queries = [c.summary for c in script.calls if c.hook == "get_num_new_matched_tokens"]
    assert ["20" in query for query in queries] == [False, True, False]
    assert again.usage().num_local_cached_tokens == 22
    assert longer.usage().num_local_cached_tokens == 18
    assert_right(stepper, first, again, longer)


def test_what_is_loaded_is_shared_like_what_is_computed() -> None:
    script = Script(rules=rules(one=Sync(16), two=(0, False), three=(0, False)))
    prompt = prompt_of(21)
    warm(script, prompt)
    stepper, _ = connected_stepper(script)
    one = stepper.add(prompt, request_id="one", max_tokens=3)
    two = stepper.add(prompt, request_id="two", max_tokens=3)
    assert dict(launched(stepper).num_scheduled_tokens) == {"one": 5, "two": 1}
    assert one.blocks[:5] == two.blocks[:5], "in the very step that loads"
    three = stepper.add(prompt, request_id="three", max_tokens=3)
    stepper.run()
    assert three.usage().num_local_cached_tokens == 20
    assert_right(stepper, one, two, three)


def test_an_identical_prompt_gets_nothing_of_a_load_that_goes_on() -> None:
    prompt = prompt_of(21)
    script = Script(rules={"one": Rule(answers=(Async(20),), load_delay=3)})
    warm(script, prompt)
    script.rules |= rules(two=(0, False))
    stepper, _ = connected_stepper(script)
    one = stepper.add(prompt, request_id="one", max_tokens=2)
    launched(stepper)
    two = stepper.add(prompt, request_id="two", max_tokens=2)
    stepper.apply()
    assert dict(launched(stepper).num_scheduled_tokens) == {"two": 21}
    stepper.run()
    assert two.usage().num_local_cached_tokens == 0
    assert_right(stepper, one, two)


# --- when it is asked ----------------------------------------------------------------------------


@both_depths
def test_none_means_ask_again_and_holds_nobody_up(depth: int) -> None:
    script = Script(rules={"one": Rule(answers=(None, None, None, Sync(8)))})
    prompt = prompt_of(9)
    warm(script, prompt)
    script.rules |= rules(two=(0, False))
    stepper, _ = connected_stepper(script, depth=depth)
    one = stepper.add(prompt, request_id="one", max_tokens=2)
    two = stepper.add([5] * 7, request_id="two", max_tokens=2)
    output = launched(stepper)
    assert dict(output.num_scheduled_tokens) == {"two": 7}
    assert one.status is RequestStatus.WAITING
    assert not one.blocks
    stepper.run()
    assert one.usage().num_external_cached_tokens == 8
    assert_right(stepper, one, two)


@both_depths
@pytest.mark.parametrize("times", [1, 2, 5])
def test_b18_asking_often_changes_nothing(depth: int, times: int) -> None:
    """The head of the queue is asked about in each step until it is admitted."""
    prompt = prompt_of(17)
    script = Script(rules={"again": Rule(answers=(*[None] * (times - 1), Async()))})
    warm(script, prompt)
    stored = set(script.store)
    stepper, sides = connected_stepper(script, depth=depth)
    request = stepper.add(prompt, request_id="again", max_tokens=1)
    stepper.run()
    assert_right(stepper, request)
    assert request.usage().num_external_cached_tokens == 16
    assert set(script.store) == stored
    assert sides[0].is_idle


def test_b17_after_a_load_nobody_asks_again() -> None:
    prompt = prompt_of(17)
    script = Script(rules={"one": Rule(answers=(Async(16), Async(16)), load_delay=2)})
    warm(script, prompt)
    before = script.count("get_num_new_matched_tokens")
    stepper, _ = connected_stepper(script, max_num_seqs=1)
    blocker = stepper.add([1] * 5, request_id="two", max_tokens=12)
    request = stepper.add(prompt, request_id="one", max_tokens=2)
    stepper.run()
    assert script.count("get_num_new_matched_tokens") == before + 2
    allocated = [c for c in script.calls if c.hook == "update_state_after_alloc"]
    assert len([c for c in allocated if "one" in c.summary]) == 2, "when it loads, and when it runs"
    assert_right(stepper, request, blocker)


@both_depths
def test_a_preempted_request_is_asked_about_again_with_all_its_tokens(depth: int) -> None:
    """B15: its length counts what it has generated."""
    script = Script(default=Rule(answers=((0, False),)))
    stepper, _ = connected_stepper(script, num_blocks=10, depth=depth)
    requests = [stepper.add([i] * 9, max_tokens=24) for i in (5, 6)]
    script.rules["r2"] = Rule(answers=((0, False), Sync()))
    stepper.run()
    assert requests[1].num_preemptions > 0
    assert_right(stepper, *requests)
    queries = [
        call.summary
        for call in script.calls
        if call.hook == "get_num_new_matched_tokens" and "r2" in call.summary
    ]
    assert len(queries) == 1 + requests[1].num_preemptions
    # The generated tokens were saved as well, so they come back with the prompt.
    assert any(c.hook == "update_state_after_alloc" for c in script.calls)


# --- the state in between ------------------------------------------------------------------------


@both_depths
def test_others_run_while_one_loads(depth: int) -> None:
    prompt = prompt_of(17)
    script = Script(rules={"one": Rule(answers=(Async(16),), load_delay=4)})
    warm(script, prompt)
    script.rules |= rules(two=(0, False))
    stepper, _ = connected_stepper(script, depth=depth)
    one = stepper.add(prompt, request_id="one", max_tokens=2)
    two = stepper.add([5] * 7, request_id="two", max_tokens=9)
    for _ in range(4):
        assert stepper.step()
        assert one.status is WAITING_FOR_REMOTE_KVS
    assert len(stepper.outputs["two"]) >= 3
    stepper.run()
    assert_right(stepper, one, two)


def test_a_partial_last_block_stays_unhashed_after_promotion() -> None:
    prompt = prompt_of(20)
    script = Script(rules={"one": Rule(answers=(Async(18),))})
    warm(script, prompt)
    stepper, _ = connected_stepper(script, max_num_batched_tokens=1)
    one = stepper.add(prompt, request_id="one", max_tokens=1)
    launched(stepper)
    stepper.apply()
    assert dict(launched(stepper).num_scheduled_tokens) == {"one": 1}
    assert [block.block_hash is None for block in one.blocks] == [False] * 4 + [True]
    stepper.run()
    assert_right(stepper, one)


@both_depths
@pytest.mark.parametrize("delay", [0, 2])
def test_an_abort_while_it_loads_keeps_the_blocks_until_the_report(depth: int, delay: int) -> None:
    """B10: what is being written to is nobody else's yet."""
    prompt = prompt_of(17)
    script = Script(rules={"one": Rule(answers=(Async(16),), load_delay=1 + delay)})
    warm(script, prompt)
    script.rules |= rules(two=(0, False))
    stepper, sides = connected_stepper(script, num_blocks=6, depth=depth)
    pool = stepper.scheduler.kv_cache.pool
    one = stepper.add(prompt, request_id="one")
    launched(stepper)
    stepper.apply()
    stepper.scheduler.finish_request(one, RequestStatus.FINISHED_ABORTED)
    assert (pool.num_free_blocks, stepper.scheduler.num_held_requests) == (2, 1)
    two = stepper.add([5] * 17, request_id="two", max_tokens=3)
    assert not stepper.scheduler.reset_prefix_cache()
    stepper.run()
    assert_right(stepper, two)
    assert script.count("request_finished") == 3
    stepper.assert_idle()
    assert sides[0].is_idle
    assert sides[1].is_idle


def test_an_abort_of_what_holds_no_blocks_is_told_too() -> None:
    script = Script(rules={"one": Rule(answers=(None,))})
    stepper, _ = connected_stepper(script)
    one = stepper.add([1] * 9, request_id="one")
    launched(stepper)
    stepper.apply()
    stepper.scheduler.finish_request(one, RequestStatus.FINISHED_ABORTED)
    output = launched(stepper)
    assert output.finished_req_ids == {"one"}
    stepper.apply()
    assert stepper.launch() is None
    assert script.hooks(KVConnectorRole.SCHEDULER).count("request_finished") == 1
    stepper.assert_idle()


# --- room ----------------------------------------------------------------------------------------


def test_no_room_to_receive_into_means_no_transfer() -> None:
    prompt = prompt_of(21)
    script = Script()
    warm(script, prompt)
    script.rules |= rules(big=(0, False), one=Async(20))
    stepper, _ = connected_stepper(script, num_blocks=8)
    big = stepper.add([5] * 22, request_id="big", max_tokens=3)
    one = stepper.add(prompt, request_id="one", max_tokens=2)
    launched(stepper)
    assert one.status is RequestStatus.WAITING
    assert not one.blocks
    assert not any("one" in c.summary for c in script.calls if c.hook == "update_state_after_alloc")
    stepper.run()
    assert_right(stepper, big, one)
    assert one.usage().num_external_cached_tokens == 20


@both_depths
def test_b29_two_loads_that_together_need_more_than_the_pool(depth: int) -> None:
    """I17: a load is begun only if the whole prompt will fit beside what others are promised."""
    script = Script(default=Rule(answers=(Async(24),), load_delay=2))
    prompts = [[9, *prompt_of(35)], [8, *prompt_of(35)]]
    for prompt in prompts:
        warm(script, prompt)
    stepper, _ = connected_stepper(script, num_blocks=12, depth=depth)
    requests = [stepper.add(prompt, max_tokens=4) for prompt in prompts]
    launched(stepper)
    assert [r.status is WAITING_FOR_REMOTE_KVS for r in requests] == [True, False]
    stepper.run(max_steps=200)
    assert_right(stepper, *requests)


@both_depths
def test_b30_who_holds_blocks_is_not_stuck_behind_who_holds_none(depth: int) -> None:
    """I17"""
    prompt = prompt_of(33)
    script = Script(
        rules={
            "a": Rule(answers=(None, None, (0, False))),
            "b": Rule(answers=(Async(32),), load_delay=1),
        }
    )
    warm(script, prompt)
    stepper, _ = connected_stepper(script, num_blocks=10, depth=depth)
    a = stepper.add([5] * 30, request_id="a", max_tokens=4)
    b = stepper.add(prompt, request_id="b", max_tokens=4)
    stepper.run(max_steps=200)
    assert_right(stepper, a, b)
    assert b.usage().num_external_cached_tokens == 32


@both_depths
def test_no_place_to_run_when_the_load_is_done(depth: int) -> None:
    prompt = prompt_of(17)
    script = Script()
    warm(script, prompt)
    script.rules |= rules(busy=(0, False), one=Async(16))
    stepper, _ = connected_stepper(script, max_num_seqs=2, depth=depth)
    busy = stepper.add([5] * 6, request_id="busy", max_tokens=20)
    one = stepper.add(prompt, request_id="one", max_tokens=4)
    launched(stepper)
    more = stepper.add([6] * 6, request_id="busy2", max_tokens=8)
    script.rules["busy2"] = script.rules["busy"]
    stepper.run()
    assert_right(stepper, busy, one, more)
    assert one.usage().num_external_cached_tokens == 16


@both_depths
def test_b35_whatever_was_finished_can_be_evicted(depth: int) -> None:
    """Prefixes that were computed, saved, loaded in both ways: half the pool is there at once."""
    script = Script(rules=rules(synced=Sync(), parked=Async(), saved=(0, False)))
    warm(script, [1, *prompt_of(11)])
    warm(script, [2, *prompt_of(11)])
    stepper, _ = connected_stepper(script, num_blocks=16, depth=depth)
    script.rules |= {
        "big": Rule(answers=((0, False),)),
        "plain": Rule(answers=((0, False),), save=False),
    }
    for name, first in (("synced", 1), ("parked", 2), ("saved", 3), ("plain", 4)):
        stepper.add([first, *prompt_of(11)], request_id=name, max_tokens=3)
        stepper.run()
        pool = stepper.scheduler.kv_cache.pool
        assert pool.num_free_blocks == pool.num_usable_blocks
    assert pool.num_cached_blocks >= 12
    big = stepper.add([5] * 40, request_id="big", max_tokens=4)
    assert launched(stepper).num_scheduled_tokens["big"] == 40
    stepper.run()
    assert_right(stepper, big)


def test_b42_a_match_query_that_lets_local_blocks_go_changes_nothing() -> None:
    """What was found is held before anything else is allocated, and nothing runs in between."""
    script = Script(default=Rule(answers=((0, False),)))
    stepper, sides = connected_stepper(script, num_blocks=8)
    prompt = prompt_of(17)
    stepper.add(prompt, max_tokens=1)
    stepper.run()
    again = stepper.add(prompt, request_id="again", max_tokens=3)
    query = sides[0].get_num_new_matched_tokens

    def forgetful(request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        stepper.scheduler.reset_prefix_cache()
        return query(request, num_computed_tokens)

    sides[0].get_num_new_matched_tokens = forgetful  # type: ignore[method-assign]
    stepper.run()
    assert_right(stepper, again)
    stepper.assert_idle()


# --- a step that loads is a barrier --------------------------------------------------------------


def test_nothing_is_planned_while_a_step_that_loads_is_in_flight() -> None:
    prompt = prompt_of(17)
    script = Script()
    warm(script, prompt)
    script.rules |= rules(one=Sync(16), two=(0, False))
    stepper, _ = connected_stepper(script, depth=2)
    two = stepper.add([5] * 6, request_id="two", max_tokens=9)
    launched(stepper)
    one = stepper.add(prompt, request_id="one", max_tokens=4)
    loading = launched(stepper)
    assert loading.loading_block_ids == {block.block_id for block in one.blocks[:4]}
    stepper.apply()
    assert stepper.launch() is None  # I15
    stepper.apply()
    assert stepper.launch() is not None
    stepper.run()
    assert_right(stepper, one, two)


def test_an_asynchronous_load_is_no_barrier() -> None:
    prompt = prompt_of(17)
    script = Script(rules={"one": Rule(answers=(Async(16),), load_delay=2)})
    warm(script, prompt)
    script.rules |= rules(two=(0, False))
    stepper, _ = connected_stepper(script, depth=2)
    two = stepper.add([5] * 6, request_id="two", max_tokens=9)
    one = stepper.add(prompt, request_id="one", max_tokens=4)
    launched(stepper)
    assert launched(stepper).total_num_scheduled_tokens == 1
    stepper.run()
    assert_right(stepper, one, two)
