"""The kit for testing connectors and engines: a connector that answers by script.

Names are loaded on first use (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlace.engine.lazy_names import lazy_names

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

__getattr__, __dir__ = lazy_names(__name__, _HOMES, __all__)
