"""A check of a few scenarios, to save time."""

from __future__ import annotations

from typing import Any

import pytest

from interlace.connectors.base import KVConnectorBase_V1
from interlace.connectors.conformance import CheckReport, check_connector, checking
from interlace.connectors.conformance.scenarios import SCENARIOS


def check_in(
    monkeypatch: pytest.MonkeyPatch,
    scenarios: tuple[str, ...],
    connector: str | type[KVConnectorBase_V1],
    extra_config: dict[str, Any] | None = None,
    **options: Any,
) -> CheckReport:
    """Play the scenarios of these properties alone; all properties are watched in them."""
    chosen = tuple(one for one in SCENARIOS if one.property_id in scenarios)
    assert {one.property_id for one in chosen} == set(scenarios)
    monkeypatch.setattr(checking, "SCENARIOS", chosen)
    return check_connector(connector, extra_config, **options)
