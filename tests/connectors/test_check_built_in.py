"""`interlace check` passes for every built-in connector, as its own `check_setup` has it run.

Each scenario is played in one of its ways, to save time; `interlace check NAME` plays all of them.
"""

from __future__ import annotations

import pytest

from interlace.connectors.conformance import CheckReport, check_connector
from interlace.connectors.factory import KVConnectorFactory

NAMES = (
    "DecodeBenchConnector",
    "ExampleConnector",
    "ExampleHiddenStatesConnector",
    "MultiConnector",
    "PipelineConnector",
    "ScriptedConnector",
)
KEEP_FILES = ("ExampleConnector", "MultiConnector")


@pytest.mark.parametrize("name", NAMES)
def test_a_built_in_connector_passes(name: str) -> None:
    report = check_connector(name, quick=True)
    report.raise_if_failed()
    if name in KEEP_FILES:
        assert skipped(report) == {
            "loads-reported-when-done",  # they load within the step
            "loads-do-not-hold-up-steps",
            "reset-forgets",  # they share their files with other processes
            "workers-agree",
        }


def skipped(report: CheckReport) -> set[str]:
    """Ids of the properties that were not judged."""
    return {one.property.id for one in report.results if one.verdict == "skipped"}


@pytest.mark.parametrize("name", KEEP_FILES)
def test_it_passes_with_two_workers(name: str) -> None:
    only = ("tokens-full-hit", "shared-prefix")
    report = check_connector(name, workers=2, only=only, quick=True)
    report.raise_if_failed()
    assert not skipped(report)


def test_none_is_left_out() -> None:
    assert sorted(NAMES) == KVConnectorFactory().known_names
