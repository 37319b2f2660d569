"""The harness by itself: steps by hand, and what it tells of a connector."""

from __future__ import annotations

from typing import Any

import pytest

from interlace.connectors.conformance import (
    Async,
    EngineShape,
    Harness,
    Rule,
    Script,
    ScriptedConnector,
    Violation,
)
from interlace.engine.request import RequestStatus

PROMPT = [7, 3, 9, 1, 4, 4, 2, 8, 5, 5, 6, 1, 2]


def harness(rule: Rule | None = None, **shape: Any) -> Harness:
    """Over ScriptedConnector, which all requests come to by the same rule."""
    script = Script(default=rule or Rule())
    return Harness.of(ScriptedConnector, {"script": script}, shape=EngineShape(**shape))


def test_a_step_has_three_parts() -> None:
    with harness() as engine:
        request = engine.add("A", PROMPT, max_tokens=2)
        assert engine.plan() is not None
        assert request.num_computed_tokens == len(PROMPT)
        assert engine.tokens_of(request) == []
        engine.execute()
        engine.apply()
        assert len(engine.tokens_of(request)) == 1
        engine.run()
        assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED
        assert engine.num_inflight == 0
        assert not engine.step(), "nothing is left to do"


def test_with_two_steps_in_flight_the_next_is_planned_before_one_is_applied() -> None:
    with harness(depth=2) as engine:
        engine.add("A", PROMPT, max_tokens=4)
        assert engine.plan() is not None
        assert engine.plan() is not None
        assert engine.plan() is None
        assert engine.num_inflight == 2
        engine.run()


def test_what_is_stored_is_loaded_and_compared() -> None:
    with harness() as engine:
        for name in ("saves", "loads"):
            engine.add(name, PROMPT)
            engine.run()
            assert engine.reset_prefix_cache()
        evidence = engine.watch.evidence
        assert evidence["loaded tokens"] == 12
        assert evidence["compared blocks"] == 3 * 3, "three blocks in three layers"
        first, second = engine.requests.values()
        assert engine.tokens_of(first) == engine.tokens_of(second)


def test_a_violation_comes_out_of_the_step_with_the_calls_before_it() -> None:
    rule = Rule(answers=(Async(),), load_delay=1, repeat_recving=1)
    with harness(rule) as engine:
        engine.add("saves", PROMPT)
        engine.run()
        engine.reset_prefix_cache()
        engine.add("loads", PROMPT)
        with pytest.raises(Violation, match="reported loads as received again") as raised:
            engine.run()
    assert raised.value.property_id == "reported-once"
    assert any("get_num_new_matched_tokens(loads" in line for line in raised.value.trace)


def test_a_request_can_be_aborted_in_a_planned_step() -> None:
    with harness() as engine:
        request = engine.add("A", PROMPT)
        engine.plan()
        engine.abort(request)
        engine.run()
        assert request.status is RequestStatus.FINISHED_ABORTED
        assert engine.scheduler.kv_cache.pool.num_free_blocks == 40


def test_a_request_that_nobody_can_serve_is_a_stall() -> None:
    with harness(Rule(answers=(None,))) as engine:
        engine.add("A", PROMPT)
        with pytest.raises(Violation, match="asks to be asked again for A") as raised:
            engine.run()
    assert raised.value.property_id == "bounded-time"
