"""What careless connectors answer and hand over, and what the engine makes of it."""

from __future__ import annotations

from collections import deque

import pytest
from connected import connected_stepper
from paged_oracle import answer

from interlace.connectors.conformance import Async, Rule, Script, Sync
from interlace.engine.outputs import ModelRunnerOutput
from interlace.engine.scheduler_output import SchedulerOutput

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def test_a_connector_may_use_its_sets_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two steps in flight the second may run before the first is applied."""
    script = Script(rules={"one": Rule(answers=(Async(8),), load_delay=1)})
    stepper, sides = connected_stepper(script, depth=2)
    get_finished = sides[1].get_finished
    received: set[str] = set()

    def with_the_same_set(ids: set[str]) -> tuple[set[str] | None, set[str]]:
        received.clear()
        sent, more = get_finished(ids)
        received.update(more or ())
        return sent, received

    monkeypatch.setattr(sides[1], "get_finished", with_the_same_set)
    other = stepper.add([7, 7], max_tokens=12)
    one = stepper.add(PROMPT, request_id="one", max_tokens=3)
    done: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
    for _ in range(60):
        while len(done) < 2 and (output := stepper.scheduler.schedule(poll=True)) is not None:
            done.append((output, stepper.runner.execute(output)))
        if done:
            stepper.scheduler.update_from_output(*done.popleft())
    assert other.is_finished
    assert one.is_finished


def test_stats_agree_with_usage_when_a_load_fails() -> None:
    script = Script(rules={"one": Rule(answers=(Sync(8),))})
    stepper, _ = connected_stepper(script)
    one = stepper.add(PROMPT, request_id="one", max_tokens=3)
    stepper.run()
    assert stepper.outputs["one"] == answer(PROMPT, 3)
    assert one.usage().num_external_cached_tokens == 0
    assert stepper.scheduler.stats.num_invalid_blocks == 2
    assert stepper.scheduler.stats.num_external_cached_tokens == 0


def test_failed_requests_that_are_not_asked_about_count_no_queries() -> None:
    script = Script(rules={"one": Rule(answers=(Async(8),))})
    stepper, _ = connected_stepper(script)
    stepper.add(PROMPT, request_id="one", max_tokens=3)
    stepper.run()
    assert script.count("get_num_new_matched_tokens") == 2
    assert stepper.scheduler.stats.num_connector_queried_tokens == 2 * len(PROMPT)


def test_reports_may_be_frozen_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `get_block_ids_with_load_errors` may answer."""
    stepper, sides = connected_stepper(Script())
    monkeypatch.setattr(sides[1], "get_finished", lambda _: (frozenset(), frozenset()))
    one = stepper.add(PROMPT, max_tokens=1)
    stepper.run()
    assert one.is_finished
