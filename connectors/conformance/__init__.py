"""The kit for testing connectors and engines: a connector that answers by script.

Names are loaded on first use (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interlace.connectors.conformance.script import Answer, Async, Call, Rule, Script, Sync
    from interlace.connectors.conformance.scripted import ScriptedConnector

_HOMES = {
    "ScriptedConnector": "interlace.connectors.conformance.scripted",
    **dict.fromkeys(
        ("Answer", "Async", "Call", "Rule", "Script", "Sync"),
        "interlace.connectors.conformance.script",
    ),
}

__all__ = ["Answer", "Async", "Call", "Rule", "Script", "ScriptedConnector", "Sync"]


def __getattr__(name: str) -> Any:
    """Import a public name on its first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'interlace.connectors.conformance' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
