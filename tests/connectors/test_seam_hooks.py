"""Which hooks are called, when, how often; and what becomes of answers that break the protocol."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from connected import NOTHING, assert_right, connected_stepper, scripted_sides
from scheduling import ManualClock, Stepper, launched, make_scheduler

from interlace.connectors import SupportsHMA
from interlace.connectors.conformance import Async, Rule, Script, ScriptedConnector, Sync
from interlace.connectors.conformance.scripted_metadata import ScriptedMetadata
from interlace.engine.connector_calls import SLOW_HOOK_S, ConnectorCalls
from interlace.engine.errors import ConnectorError
from interlace.engine.kv_connector import KVConnectorRole
from interlace.engine.request import Request, RequestStatus
from interlace.engine.scheduler import MAX_BEGUN_LOADS, MAX_DEFERRED

both_depths = pytest.mark.parametrize("depth", [1, 2])
FAILED = RequestStatus.FINISHED_ERROR


# --- order and counts ----------------------------------------------------------------------------


def test_the_order_of_calls_for_one_request() -> None:
    script = Script(default=NOTHING)
    stepper, _ = connected_stepper(script)
    stepper.add([1, 2, 3], max_tokens=1)
    launched(stepper)
    stepper.apply()
    of_step = [
        "handle_preemptions",
        "bind_connector_metadata",
        "start_load_kv",
        "wait_for_layer_load",
        "save_kv_layer",
        "wait_for_save",
        "get_finished",
        "get_block_ids_with_load_errors",
        "get_kv_connector_stats",
        "get_kv_connector_kv_cache_events",
        "build_connector_worker_meta",
        "clear_connector_metadata",
    ]
    planned = ["get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"]
    assert script.hooks() == [
        "bind_gpu_block_pool",
        "register_kv_caches",
        "set_host_xfer_buffer_ops",
        "get_finished_count",
        "get_handshake_metadata",
        "set_xfer_handshake_metadata",
        *planned,
        *of_step,
        "request_finished",
        "get_kv_connector_stats",
        "take_events",
    ]
    launched(stepper)  # tells the worker of the end; it has no tokens
    stepper.apply()
    without = [hook for hook in of_step if "layer" not in hook and hook != "wait_for_save"]
    without += ["get_kv_connector_stats", "take_events"]
    assert script.hooks()[-len(without) - 1 :] == ["build_connector_meta", *without]


@both_depths
def test_b53_each_layer_waits_and_saves_once_in_each_forward(depth: int) -> None:
    script = Script(default=NOTHING)
    stepper, _ = connected_stepper(script, depth=depth, max_num_batched_tokens=3)
    request = stepper.add(list(range(10)), max_tokens=4)
    num_forwards = 0
    while stepper.launch() or stepper.inflight:
        num_forwards += stepper.inflight[0].total_num_scheduled_tokens > 0
        stepper.apply()
    assert script.count("wait_for_layer_load") == script.count("save_kv_layer") == num_forwards
    assert script.count("wait_for_save") == num_forwards
    assert_right(stepper, request)


def say_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let scripted connectors say so in every step."""
    monkeypatch.setattr(ScriptedMetadata, "is_idle", True)


@both_depths
def test_an_idle_step_calls_no_hook_of_the_worker_side(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(default=NOTHING)
    say_idle(monkeypatch)
    stepper, _ = connected_stepper(script, depth=depth, max_num_batched_tokens=3)
    registering = set(script.hooks())
    request = stepper.add(list(range(10)), max_tokens=4)
    while stepper.launch() or stepper.inflight:
        stepper.apply()
    assert_right(stepper, request)
    assert set(script.hooks()) - registering == {
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "build_connector_meta",
        "request_finished",
        "get_kv_connector_stats",
        "take_events",
    }


@pytest.mark.parametrize("load", [Sync(4), Async(4)])
def test_a_step_that_loads_is_not_idle(load: Sync | Async, monkeypatch: pytest.MonkeyPatch) -> None:
    stepper, _ = connected_stepper(Script(default=Rule(answers=(load,))))
    say_idle(monkeypatch)
    stepper.add(list(range(10)))
    with pytest.raises(ConnectorError, match="is_idle must be False there"):
        stepper.launch()


@both_depths
def test_finished_ids_are_delivered_exactly_once(depth: int) -> None:
    """I18"""
    script = Script(default=NOTHING)
    stepper, _ = connected_stepper(script, depth=depth)
    requests = [stepper.add([i] * 5, max_tokens=2 + i) for i in range(4)]
    delivered: list[str] = []
    while stepper.launch() or stepper.inflight:
        stepper.apply()
    for call in script.calls:
        if call.hook == "get_finished":
            delivered += [r.request_id for r in requests if r.request_id in call.summary]
    assert sorted(delivered) == ["r1", "r2", "r3", "r4"]
    assert script.count("request_finished") == 4


class _LateReporter:
    """A worker side that learns only in `wait_for_save`, long after it was told of a request's
    end, that the request's blocks are not read any more."""

    def __init__(self, inner: ScriptedConnector) -> None:
        self._inner = inner
        self._ended: set[str] = set()
        self._to_report: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def wait_for_save(self) -> None:
        self._inner.wait_for_save()
        self._to_report |= self._ended
        self._ended = set()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._inner.get_finished(finished_req_ids)
        self._ended |= finished_req_ids & {"one"}
        reported, self._to_report = self._to_report, set()
        return reported, None


def test_b20_what_is_reported_after_the_forward_reaches_the_scheduler_once() -> None:
    script = Script(default=Rule(answers=((0, False),), hold=True, send_delay=None))
    sides = scripted_sides(script)
    scheduler = make_scheduler(connector=sides[0])
    stepper = Stepper(scheduler, _LateReporter(sides[1]))
    one = stepper.add([1] * 5, request_id="one", max_tokens=2)
    script.rules["two"] = NOTHING
    two = stepper.add([2] * 5, request_id="two", max_tokens=6)
    stepper.run()
    assert_right(stepper, one, two)
    stepper.assert_idle()


def test_b40_both_sides_in_one_process_are_told_apart_by_their_roles() -> None:
    script = Script(default=NOTHING)
    one, two = connected_stepper(script)[1], connected_stepper(script)[1]
    assert [side.role for side in one] == list(KVConnectorRole)
    assert len({id(side) for side in (*one, *two)}) == 4


@both_depths
def test_preemptions_are_told_before_anything_else_of_the_step(depth: int) -> None:
    """B04: what still reads the blocks must end first."""
    script = Script(default=NOTHING)
    stepper, _ = connected_stepper(script, num_blocks=10, depth=depth)
    requests = [stepper.add([i] * 9, max_tokens=24) for i in (5, 6)]
    stepper.run()
    assert sum(request.num_preemptions for request in requests) > 0
    assert_right(stepper, *requests)
    worker = script.hooks(KVConnectorRole.WORKER)
    for hook, after in itertools.pairwise(worker):
        assert (hook == "handle_preemptions") == (after == "bind_connector_metadata")


@both_depths
@pytest.mark.parametrize("delay", [0, 1, 3])
def test_b04_held_blocks_come_back_with_the_report(depth: int, delay: int) -> None:
    script = Script(default=Rule(answers=((0, False),), hold=True, send_delay=delay))
    stepper, sides = connected_stepper(script, num_blocks=8, depth=depth)
    one = stepper.add([5] * 13, request_id="one", max_tokens=2)
    while not one.is_finished:
        stepper.step()
    pool = stepper.scheduler.kv_cache.pool
    assert stepper.scheduler.num_held_requests == 1
    assert stepper.scheduler.knows("one")
    assert pool.num_free_blocks == 8 - len(one.blocks)
    assert len(one.blocks) == 4
    two = stepper.add([6] * 20, request_id="two", max_tokens=2)  # needs more than is free
    stepper.run()
    assert not stepper.scheduler.knows("one")
    assert_right(stepper, one, two)
    stepper.assert_idle()
    assert sides[0].is_idle


def test_parameters_go_in_and_come_out() -> None:
    script = Script(default=Rule(answers=((0, False),), response_params={"remote": [1, 2]}))
    stepper, _ = connected_stepper(script)
    request = stepper.add([1, 2, 3], max_tokens=1, kv_transfer_params={"do_remote": True})
    stepper.run()
    assert request.kv_transfer_params == {"do_remote": True}
    assert request.response_kv_transfer_params == {"remote": [1, 2]}


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_roles(role: Any) -> None:
    script = Script()
    prompt = list(range(17))
    both, _ = connected_stepper(script)
    both.add(prompt, request_id="warm", max_tokens=1)
    both.run()
    stored = len(script.store)
    stepper, _ = connected_stepper(script, role=role)
    again = stepper.add(prompt, max_tokens=1)
    other = stepper.add([9] * 8, max_tokens=1)
    stepper.run()
    assert_right(stepper, again, other)
    loads = role == "kv_consumer"
    assert again.usage().num_external_cached_tokens == (16 if loads else 0)
    assert (len(script.store) > stored) == (not loads)


# --- answers that break the protocol -------------------------------------------------------------

VIOLATIONS: list[tuple[Any, str]] = [
    ((0, True), "without tokens cannot be asynchronous"),
    ((-1, False), "the request has 9 tokens beyond"),
    ((10, False), "the request has 9 tokens beyond"),
    ((10, True), "the request has 9 tokens beyond"),
    ((True, False), "it must be"),
    ((2.0, False), "it must be"),
    ((4, 1), "it must be"),
    ((4, False, 0), "it must be"),
    ((4, None), "it must be"),
]


@both_depths
@pytest.mark.parametrize(("wrong", "message"), VIOLATIONS, ids=lambda one: str(one))
def test_a_wrong_answer_to_a_match_query_ends_that_request_alone(
    depth: int, wrong: Any, message: str
) -> None:
    script = Script(default=NOTHING, rules={"bad": Rule(answers=(wrong,))})
    stepper, sides = connected_stepper(script, depth=depth)
    good = [stepper.add([1] * 9, max_tokens=3), stepper.add([2] * 9, max_tokens=3)]
    bad = stepper.add([3] * 9, request_id="bad")
    good.append(stepper.add([4] * 9, max_tokens=3))
    stepper.run()
    assert bad.status is FAILED
    assert message in (bad.error or "")
    assert "ScriptedConnector.get_num_new_matched_tokens" in (bad.error or "")
    assert_right(stepper, *good)
    stepper.assert_idle()
    assert sides[0].is_idle


@both_depths
def test_a_match_query_that_raises_ends_that_request_alone(depth: int) -> None:
    script = Script(default=NOTHING)
    script.raises = {"get_num_new_matched_tokens": (2, KeyError("lost"))}
    stepper, _ = connected_stepper(script, depth=depth)
    one, two, three = (stepper.add([i] * 5, max_tokens=3) for i in range(3))
    stepper.run()
    assert two.status is FAILED
    assert "get_num_new_matched_tokens raised KeyError: 'lost'" in (two.error or "")
    assert_right(stepper, one, three)
    stepper.assert_idle()


@both_depths
def test_request_finished_that_raises_ends_that_request_alone(depth: int) -> None:
    script = Script(default=NOTHING)
    script.raises = {"request_finished": (1, RuntimeError("no idea"))}
    stepper, _ = connected_stepper(script, depth=depth)
    one, two = (stepper.add([i] * 5, max_tokens=3) for i in range(2))
    stepper.run()
    assert one.status is FAILED
    assert "request_finished raised RuntimeError: no idea" in (one.error or "")
    assert_right(stepper, two)
    stepper.assert_idle()


FATAL = [
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "clear_connector_metadata",
]


@pytest.mark.parametrize("hook", FATAL)
def test_other_hooks_that_raise_are_fatal_and_named(hook: str) -> None:
    """Where nothing is loaded within the step: a load that fails is a failed load (B26)."""
    script = Script(default=NOTHING)
    script.raises = {hook: (1, ValueError("oh"))}
    stepper, _ = connected_stepper(script)
    stepper.add([1] * 5, max_tokens=3)
    with pytest.raises(ConnectorError, match=rf"ScriptedConnector\.{hook} raised ValueError: oh"):
        stepper.run()


@pytest.mark.parametrize(
    ("hook", "answer", "rule"),
    [
        ("get_finished", None, r"\(set of request ids or None, set"),
        ("get_finished", ({"a"},), r"\(set of request ids or None, set"),
        ("get_finished", (["a"], None), r"\(set of request ids or None, set"),
        ("get_finished", ({1}, None), r"\(set of request ids or None, set"),
        ("get_finished", (None, {None}), r"\(set of request ids or None, set"),
        ("get_block_ids_with_load_errors", None, "a set of block ids"),
        ("get_block_ids_with_load_errors", [1], "a set of block ids"),
        ("get_block_ids_with_load_errors", {"x"}, "a set of block ids"),
        ("get_block_ids_with_load_errors", {0}, "a set of block ids, .* from 1 to 64"),
        ("get_block_ids_with_load_errors", {65}, "a set of block ids, .* from 1 to 64"),
        ("get_block_ids_with_load_errors", {-3}, "a set of block ids, .* from 1 to 64"),
    ],
)
def test_wrong_answers_of_the_worker_side_are_named(hook: str, answer: Any, rule: str) -> None:
    stepper, sides = connected_stepper(Script(default=NOTHING))
    setattr(sides[1], hook, lambda *_: answer)
    stepper.add([1] * 5)
    with pytest.raises(ConnectorError, match=f"answered .* but it must be {rule}"):
        stepper.run()


def test_a_connector_s_own_connector_error_is_named_too() -> None:
    script = Script(default=NOTHING, raises={"wait_for_save": (1, ConnectorError("no"))})
    stepper, _ = connected_stepper(script)
    stepper.add([1] * 5)
    with pytest.raises(ConnectorError, match=r"ScriptedConnector\.wait_for_save raised"):
        stepper.run()


class _ForGroups(ScriptedConnector, SupportsHMA):
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        (group,) = block_ids
        self.request_finished(request, group)
        return False, {"num_blocks": len(group)}


def test_a_connector_for_several_groups_is_asked_by_its_own_hook() -> None:
    script = Script(default=NOTHING)
    stepper = Stepper(make_scheduler(connector=scripted_sides(script, kind=_ForGroups)[0]))
    request = stepper.add([1] * 5, max_tokens=1)
    stepper.run()
    assert request.response_kv_transfer_params == {"num_blocks": 2}


def test_many_that_are_to_be_asked_again_are_asked_in_turn() -> None:
    script = Script(default=Rule(answers=(None,)))
    stepper, _ = connected_stepper(script)
    requests = [stepper.add([1] * 5, max_tokens=1) for _ in range(2 * MAX_DEFERRED + 5)]
    asked = []
    for _ in range(3):
        launched(stepper)
        stepper.apply()
        asked.append(script.count("get_num_new_matched_tokens"))
    assert asked == [MAX_DEFERRED, 2 * MAX_DEFERRED, 2 * MAX_DEFERRED + 5]
    script.default = NOTHING
    for request in requests:
        script.rules[request.request_id] = NOTHING
    stepper.run()
    assert_right(stepper, *requests)


def test_so_many_loads_begin_with_one_step() -> None:
    script = Script(default=Rule(answers=(Async(4),)))
    stepper, _ = connected_stepper(script, num_blocks=400, max_num_seqs=8)
    requests = [stepper.add([i, 1, 2, 3, 4], max_tokens=1) for i in range(MAX_BEGUN_LOADS + 3)]
    launched(stepper)
    assert len(stepper.scheduler.parked) == MAX_BEGUN_LOADS
    stepper.run()
    assert_right(stepper, *requests)


def test_start_load_kv_that_raises_where_an_asynchronous_load_begins_is_fatal() -> None:
    """Nobody could say whether it writes to the blocks later."""
    script = Script(rules={"one": Rule(answers=(Async(4),)), "two": Rule(answers=(Sync(4),))})
    script.raises = {"start_load_kv": (1, ValueError("oh"))}
    stepper, _ = connected_stepper(script)
    stepper.add([1] * 5, request_id="one")
    stepper.add([1] * 5, request_id="two")
    with pytest.raises(ConnectorError, match="start_load_kv raised"):
        stepper.run()


# --- the wrapper alone ---------------------------------------------------------------------------


class _Careless:
    """A connector whose every answer is given."""

    def __init__(self, answer: Any = None, clock: ManualClock | None = None) -> None:
        self._answer = answer
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        def hook(*_: Any) -> Any:
            if self._clock is not None:
                self._clock.now_s += 2 * SLOW_HOOK_S
            return self._answer

        return hook


@pytest.mark.parametrize("wrong", [None, True, (1, None), (True, 5), (False, "x"), (True, {}, 1)])
def test_a_wrong_answer_of_request_finished(wrong: Any) -> None:
    calls = ConnectorCalls(_Careless(wrong), ManualClock())
    request = Stepper(connected_stepper(Script())[0].scheduler).add([1])
    with pytest.raises(ConnectorError, match=r"request_finished\w* answered"):
        calls.finished(request)


def test_metadata_must_not_be_none() -> None:
    stepper, _ = connected_stepper(Script(default=NOTHING))
    stepper.add([1])
    output = launched(stepper)
    with pytest.raises(ConnectorError, match="build_connector_meta returned None"):
        ConnectorCalls(_Careless(None), ManualClock()).with_metadata(output)


def test_a_slow_hook_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    calls = ConnectorCalls(_Careless(answer=True, clock=clock), clock)
    for _ in range(3):
        calls.reset_cache()
    assert len(caplog.messages) == 1
    assert "_Careless.reset_cache took 40 ms on the event loop" in caplog.messages[0]
