"""How a report reads, and what a connector's own tests do with it."""

from __future__ import annotations

import json

import pytest

from interlace.connectors.conformance import (
    PROPERTIES,
    CheckFailedError,
    CheckReport,
    Result,
)


def report(*verdicts: str) -> CheckReport:
    """Of the first properties."""
    results = []
    for one, verdict in zip(PROPERTIES, verdicts, strict=False):
        failed = verdict == "FAILED"
        results.append(
            Result(
                one,
                verdict,  # type: ignore[arg-type]
                {"ok": "", "skipped": "it never loaded", "FAILED": "X.hook raised"}[verdict],
                "tokens-cold at depth 1, lanes eager" if failed else "",
                ("scheduler request_finished(A)", "worker 0  get_finished()") if failed else (),
            )
        )
    return CheckReport("X", 7, 1, tuple(results), ("it uses no lanes",), 1.25)


def test_each_property_has_a_line_and_failures_have_a_trace() -> None:
    lines = report("ok", "FAILED", "skipped").lines()
    one, two, three = PROPERTIES[:3]
    assert lines[0].split() == ["ok", one.id, *one.title.split()]
    assert lines[1].startswith(f"FAILED  {two.id}")
    assert [line.strip() for line in lines[2:6]] == [
        "X.hook raised",
        "in tokens-cold at depth 1, lanes eager, after:",
        "scheduler request_finished(A)",
        "worker 0  get_finished()",
    ]
    assert lines[6].startswith(f"skipped {three.id}")
    assert lines[6].endswith("(it never loaded)")
    assert lines[7] == "note    it uses no lanes"
    assert lines[8] == "X: 1 ok, 1 failed, 1 skipped in 1.2 s (seed 7, 1 worker)"


def test_it_passes_if_nothing_failed() -> None:
    assert report("ok", "skipped").passed
    report("ok", "skipped").raise_if_failed()


def test_it_raises_the_table_if_something_failed() -> None:
    failed = report("ok", "FAILED")
    assert not failed.passed
    assert failed.failed == [PROPERTIES[1].id]
    with pytest.raises(CheckFailedError, match=r"X\.hook raised") as raised:
        failed.raise_if_failed()
    assert isinstance(raised.value, AssertionError), "so pytest shows it as a failure"


def test_its_json_says_the_same() -> None:
    said = json.loads(report("ok", "FAILED").to_json())
    assert said["connector"] == "X"
    assert said["passed"] is False
    assert [one["verdict"] for one in said["results"]] == ["ok", "FAILED"]
    assert said["results"][1]["property"]["id"] == PROPERTIES[1].id
    assert said["results"][1]["trace"]


def test_an_unknown_property_has_no_result() -> None:
    with pytest.raises(KeyError):
        report("ok").result("no-such-property")


def test_ids_are_unique_and_titles_short() -> None:
    assert len({one.id for one in PROPERTIES}) == len(PROPERTIES)
    assert all(len(one.title) <= 70 for one in PROPERTIES)
