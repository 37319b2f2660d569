"""`interlace check` passes for every built-in connector, as its own `check_setup` has it run.

Those that keep files are checked in part, to save time; `interlace check NAME` does all of it.
"""

from __future__ import annotations

import pytest

from interlace.connectors.conformance import check_connector
from interlace.connectors.factory import KVConnectorFactory

IN_PART = ("tokens-full-hit", "shared-prefix", "plan-reset", "tokens-preempted", "failures-exact")
CHECKED = {
    "DecodeBenchConnector": (),
    "ExampleConnector": IN_PART,
    "ExampleHiddenStatesConnector": (),
    "MultiConnector": IN_PART,
    "ScriptedConnector": (),
}


@pytest.mark.parametrize("name", CHECKED)
def test_a_built_in_connector_passes(name: str) -> None:
    check_connector(name, only=CHECKED[name]).raise_if_failed()


@pytest.mark.parametrize("name", ["ExampleConnector", "MultiConnector"])
def test_it_passes_with_two_workers(name: str) -> None:
    check_connector(name, workers=2, only=("tokens-full-hit",)).raise_if_failed()


def test_none_is_left_out() -> None:
    assert sorted(CHECKED) == KVConnectorFactory().known_names
