"""`interlace check` can fail: it finds each mistake of tests/broken_connectors, and names it.

And what it finds there it does not find in the right connector that they are made of.
"""

from __future__ import annotations

import itertools
import re

import pytest
from memory_broken import Broken, all_broken
from memory_connector import MemoryConnector
from memory_store import MemoryStore

from interlace.connectors.conformance import checking
from interlace.connectors.conformance.check import check_connector
from interlace.connectors.conformance.properties import PROPERTIES
from interlace.connectors.conformance.report import CheckFailedError, CheckReport
from interlace.connectors.conformance.scenarios import SCENARIOS

BROKEN = all_broken()
WAYS = list(itertools.product([False, True], [False, True], [1, 2]))


def play_only(monkeypatch: pytest.MonkeyPatch, *property_ids: str) -> None:
    """Of all scenarios those of these properties, to save time: others add no verdicts here."""
    chosen = tuple(one for one in SCENARIOS if one.property_id in property_ids)
    assert {one.property_id for one in chosen} == set(property_ids)
    monkeypatch.setattr(checking, "SCENARIOS", chosen)


def check_broken(broken: Broken, *, fail_fast: bool) -> CheckReport:
    return check_connector(
        broken.connector,
        broken.extra_config(),
        workers=broken.workers,
        deadline_s=broken.deadline_s,
        fail_fast=fail_fast,
    )


@pytest.mark.parametrize("broken", BROKEN, ids=[str(one) for one in BROKEN])
def test_a_broken_connector_is_found(broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    play_only(monkeypatch, broken.seen_in or broken.property_id)
    report = check_broken(broken, fail_fast=True)
    if broken.property_id not in report.failed:  # what is noticed first may be a consequence
        report = check_broken(broken, fail_fast=False)
    assert broken.property_id in report.failed, "\n".join(report.lines())
    result = report.result(broken.property_id)
    assert result.detail
    assert result.trace
    with pytest.raises(CheckFailedError, match=re.escape(broken.property_id)):
        report.raise_if_failed()


@pytest.mark.parametrize("place", range(len(SCENARIOS)), ids=[s.property_id for s in SCENARIOS])
def test_the_right_connector_passes(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each scenario in one of the eight ways; all ways have their turn."""
    property_id = SCENARIOS[place].property_id
    play_only(monkeypatch, property_id)
    load_async, save_async, workers = WAYS[3 * place % 8]
    extra = {"store": MemoryStore(), "load_async": load_async, "save_async": save_async}
    report = check_connector(MemoryConnector, extra, workers=workers)
    report.raise_if_failed()
    assert report.result(property_id).verdict == "ok", "\n".join(report.lines())


def test_there_is_a_broken_connector_for_almost_every_property() -> None:
    """The others are backstops: what breaks them is noticed sooner, as something else."""
    missing = {one.id for one in PROPERTIES} - {one.property_id for one in BROKEN}
    assert missing <= {
        "calls-in-order",
        "tokens-cold",
        "tokens-hit",
        "aborted-in-every-state",
        "no-deadlock-in-tiny-pools",
    }
    assert len({one.connector for one in BROKEN}) >= 50
