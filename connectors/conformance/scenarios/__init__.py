"""All scenarios of a check, in the order in which they are played: simple ones first, since what
fails in those is not held against a later one."""

from __future__ import annotations

from interlace.connectors.conformance.scenarios import (
    aborts,
    asking,
    both_ends,
    failures,
    pressure,
    saving,
    steps,
    tokens,
    transfers,
)
from interlace.connectors.conformance.stage import Scenario

SCENARIOS: tuple[Scenario, ...] = (
    *tokens.SCENARIOS,
    *transfers.SCENARIOS,
    *tokens.SHARING,
    *asking.SCENARIOS,
    *steps.SCENARIOS,
    *pressure.SCENARIOS,
    *aborts.SCENARIOS,
    *saving.SCENARIOS,
    *failures.SCENARIOS,
    *both_ends.SCENARIOS,
)
"""Some properties have no scenario of their own: they are watched in all."""
