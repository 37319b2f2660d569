"""Who loads and who saves under a MultiConnector, step by step over the oracle."""

from __future__ import annotations

import pytest
from connected import NOTHING, assert_right, prompt_of, warm
from multi_kit import multi_stepper
from scheduling import launched

from interlace.connectors.conformance import Async, Rule, Script, Sync
from interlace.engine.request import RequestStatus

depths = pytest.mark.parametrize("depth", [1, 2])
ways = pytest.mark.parametrize("way", [Sync(), Async()])
PROMPT = prompt_of(17)


def loads_of(script: Script) -> list[str]:
    """Summaries of the allocations that the child was told of."""
    return [call.summary for call in script.calls if call.hook == "update_state_after_alloc"]


def queries_of(script: Script) -> int:
    return script.count("get_num_new_matched_tokens")


def test_all_children_save_what_is_computed() -> None:
    first, second = Script(), Script()
    sides = multi_stepper(first, second)
    request = sides.stepper.add(PROMPT)
    sides.stepper.run()
    assert_right(sides.stepper, request)
    sides.assert_idle()
    assert first.store.keys() == second.store.keys()
    assert len(first.store) == 6


@depths
@ways
def test_the_first_child_that_has_something_loads(way: Sync | Async, depth: int) -> None:
    """Both are asked; the other one is told of 0 tokens and saves what was loaded."""
    first, second, third = (Script(default=Rule(answers=(way,))) for _ in range(3))
    warm(second, PROMPT)
    warm(third, PROMPT)
    sides = multi_stepper(first, second, third, depth=depth)
    request = sides.stepper.add(PROMPT, request_id="r")
    sides.stepper.run()
    assert_right(sides.stepper, request)
    assert request.num_external_cached_tokens == 16
    assert "r external=16" in loads_of(second)
    for script in (first, third):
        assert "r external=0" in loads_of(script)
        assert "r external=16" not in loads_of(script)
    assert first.store.keys() >= set(request.block_hashes[:4])
    assert all(bool((first.store[h][0] == second.store[h][0]).all()) for h in first.store)
    sides.assert_idle()


@depths
def test_b17_after_an_asynchronous_load_nobody_loads_again(depth: int) -> None:
    first = Script(default=Rule(answers=(Async(8),), load_delay=3))
    second = Script(default=Rule(answers=(Async(),)))
    warm(first, PROMPT)
    warm(second, PROMPT)
    first.calls.clear()
    second.calls.clear()
    sides = multi_stepper(first, second, depth=depth)
    request = sides.stepper.add(PROMPT, request_id="r")
    before = queries_of(first), queries_of(second)
    sides.stepper.run()
    assert (queries_of(first), queries_of(second)) == (before[0] + 1, before[1] + 1)
    assert loads_of(first) == ["r external=8", "r external=0"]
    assert loads_of(second) == ["r external=0"], "and not before the load has ended"
    assert_right(sides.stepper, request)
    sides.assert_idle()


def test_all_are_asked_although_one_does_not_know_yet() -> None:
    first = Script(default=Rule(answers=(None, None, Sync())))
    second = Script(default=Rule(answers=(Sync(),)))
    warm(second, PROMPT)
    sides = multi_stepper(first, second)
    before = queries_of(second)
    request = sides.stepper.add(PROMPT)
    sides.stepper.run()
    assert queries_of(first) == queries_of(second) - before == 3
    assert request.num_external_cached_tokens == 16
    assert_right(sides.stepper, request)


def test_what_an_earlier_query_found_is_void() -> None:
    """The second query finds nothing: the request computes all, and nobody loads."""
    waits = Script(default=Rule(answers=(None, (0, False))))
    has = Script(default=Rule(answers=(Sync(), (0, False))))
    warm(has, PROMPT)
    sides = multi_stepper(has, waits)
    request = sides.stepper.add(PROMPT, request_id="r")
    sides.stepper.run()
    assert set(loads_of(has)) >= {"r external=0"}
    assert "r external=16" not in loads_of(has)
    assert request.num_external_cached_tokens == 0
    assert_right(sides.stepper, request)
    sides.assert_idle()


def test_a_choice_is_forgotten_with_its_request() -> None:
    """It never came to an allocation, since another child did not know."""
    has, waits = Script(), Script(default=Rule(answers=(None,)))
    warm(has, PROMPT)
    sides = multi_stepper(has, waits)
    request = sides.stepper.add(PROMPT)
    launched(sides.stepper)
    sides.stepper.apply()
    sides.stepper.scheduler.finish_request(request, RequestStatus.FINISHED_ABORTED)
    sides.stepper.run()
    sides.assert_idle()


@depths
@ways
def test_bad_blocks_of_one_child_are_bad_for_all(way: Sync | Async, depth: int) -> None:
    """The other child must not keep what it saved on top of them."""
    first = Script(default=Rule(answers=(way,), fail=frozenset({1}), num_failing_loads=1))
    second = Script(default=NOTHING)
    warm(first, PROMPT)
    sides = multi_stepper(first, second, depth=depth)
    request = sides.stepper.add(PROMPT)
    sides.stepper.run()
    assert_right(sides.stepper, request)
    sides.assert_idle()
    for block_hash, pages in second.store.items():
        assert bool((pages[0] >= 0).all()), "no painted page was kept"
        assert bool((pages[0] == first.store[block_hash][0]).all())


@depths
def test_a_loader_that_fails_wholly_may_be_followed_by_another(depth: int) -> None:
    first = Script(default=Rule(answers=(Async(), (0, False)), fail=frozenset({0})))
    second = Script(default=Rule(answers=((0, False), Async()), load_delay=1))
    warm(first, PROMPT)
    warm(second, PROMPT)
    sides = multi_stepper(first, second, depth=depth)
    request = sides.stepper.add(PROMPT, request_id="r")
    sides.stepper.run()
    assert "r external=16" in loads_of(first)
    assert "r external=16" in loads_of(second)
    assert_right(sides.stepper, request)
    sides.assert_idle()


def test_another_childs_report_ends_no_load() -> None:
    """The first child repeats the end of its failed load while the second one loads."""
    rule = Rule(answers=(Async(), (0, False)), fail=frozenset({0}), repeat_recving=9)
    first = Script(default=rule)
    second = Script(default=Rule(answers=((0, False), Async()), load_delay=4))
    warm(first, PROMPT)
    warm(second, PROMPT)
    sides = multi_stepper(first, second)
    request = sides.stepper.add(PROMPT)
    sides.stepper.run()
    assert sides.worker.num_stray_reports > 0
    assert request.num_external_cached_tokens == 16
    assert_right(sides.stepper, request)


@depths
def test_a_child_that_saves_sees_others_loads_as_computed(depth: int) -> None:
    """Nothing is there yet when a step that loads begins."""
    loader = Script()
    warm(loader, PROMPT)
    saver = Script(default=NOTHING)
    sides = multi_stepper(loader, saver, depth=depth)
    child = sides.scheduler.children[1]
    build = child.build_connector_meta
    seen = []

    def build_and_note(output):  # type: ignore[no-untyped-def]
        seen.append(output)
        return build(output)

    child.build_connector_meta = build_and_note  # type: ignore[method-assign]
    sides.stepper.add(PROMPT, request_id="r", max_tokens=2)
    output = launched(sides.stepper)
    assert output.scheduled_new_reqs[0].num_computed_tokens == 16
    assert output.num_scheduled_tokens == {"r": 1}
    assert seen[0].scheduled_new_reqs[0].num_computed_tokens == 0
    assert seen[0].num_scheduled_tokens == {"r": 17}
    assert seen[0].total_num_scheduled_tokens == 17
    sides.stepper.run()
    assert seen[1].num_scheduled_tokens == {"r": 1}
    sides.assert_idle()
