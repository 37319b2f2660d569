"""`check_connector` with ScriptedConnector: right scripts pass, broken promises are named."""

from __future__ import annotations

import pytest

from interlace.connectors.conformance import (
    Async,
    CheckReport,
    Rule,
    Script,
    ScriptedConnector,
    Sync,
    check_connector,
)

RIGHT = {
    "sync": Rule(),
    "async": Rule(answers=(Async(),), load_delay=2, hold=True, send_delay=1),
    "asks-again": Rule(answers=(None, None, Sync()), hold=True),
    "saves-nothing": Rule(save=False),
}


def check(rule: Rule, *only: str, fail_fast: bool = False, quick: bool = False) -> CheckReport:
    """A check of ScriptedConnector with one rule for all requests."""
    extra = {"script": Script(default=rule)}
    return check_connector(ScriptedConnector, extra, only=only, fail_fast=fail_fast, quick=quick)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_script_passes(name: str) -> None:
    only = ("tokens-hit", "shared-prefix", "plan-reset")
    report = check(RIGHT[name], *only)
    report.raise_if_failed()


def test_the_whole_check_passes() -> None:
    report = check(RIGHT["async"], quick=True)
    report.raise_if_failed()
    skipped = {one.property.id: one.detail for one in report.results if one.verdict == "skipped"}
    assert skipped == {
        "layer-loads-complete": "it never loaded within a step",
        "loads-do-not-hold-up-steps": "it never loaded so on lanes",
        "transfers-in-any-order": "it uses no lanes, so its transfers have one order",
        "failures-exact": "it declares no store_fault_kinds",
        "workers-agree": "there were not several workers that loaded",
    }
    assert report.notes == (
        "each scenario was played in one way only, since it had to be quick",
        "it uses no lanes: its transfers were seen in one order only",
    )


def test_an_answer_that_changes_when_it_is_asked_for_again_is_an_effect() -> None:
    report = check(Rule(answers=(Async(), Sync())), "match-has-no-effects")
    assert report.failed == ["match-has-no-effects"]
    assert "asked 5 times for hit0" in report.result("match-has-no-effects").detail


BROKEN = {
    "repeats the end of a load": (
        Rule(answers=(Async(),), load_delay=1, repeat_recving=1),
        "reported-once",
    ),
    "repeats the end of a send": (Rule(hold=True, repeat_sending=1), "reported-once"),
    "repeats a lost block": (
        Rule(fail=frozenset((0,)), repeat_invalid=1, num_failing_loads=1),
        "reported-once",
    ),
    "never ends a load": (Rule(answers=(Async(),), load_delay=None), "promises-kept"),
    "never lets go": (Rule(hold=True, send_delay=None), "promises-kept"),
    "asks again for ever": (Rule(answers=(None,)), "bounded-time"),
    "promises too much": (Rule(answers=((1000, False),)), "answers-lawful"),
    "promises nothing asynchronously": (Rule(answers=((0, True),)), "answers-lawful"),
    "answers nonsense": (Rule(answers=(("much", False),)), "answers-lawful"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_is_named(name: str) -> None:
    rule, property_id = BROKEN[name]
    report = check(rule, "tokens-hit", fail_fast=True)
    assert report.failed == [property_id], "\n".join(report.lines())
    result = report.result(property_id)
    assert result.trace, "the calls that led there"
    assert "depth 1" in result.where
    assert report.result("tokens-hit").verdict == "skipped", "cut short is not passed"


def test_a_promise_of_what_is_not_stored_is_named() -> None:
    report = check(Rule(answers=(Sync(4),)), "tokens-cold", fail_fast=True)
    assert report.failed == ["loaded-kv-right"]
    assert "nobody ever computed" in report.result("loaded-kv-right").detail


def test_a_connector_that_may_not_load_is_not_judged_by_loads() -> None:
    report = check_connector(
        ScriptedConnector, {"script": Script()}, role="kv_producer", only=("tokens-hit",)
    )
    report.raise_if_failed()
    assert report.result("tokens-hit").verdict == "skipped"
    assert "role" in report.result("tokens-hit").detail
    assert any("it never loaded" in note for note in report.notes)


def test_equal_seeds_give_equal_reports() -> None:
    rule = Rule(answers=(Async(),), load_delay=1, repeat_recving=1)
    one, two = (check(rule, "tokens-hit", "shared-prefix") for _ in range(2))
    assert one.results == two.results
    assert one.notes == two.notes
