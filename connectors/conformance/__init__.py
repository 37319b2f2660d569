"""The kit for testing connectors and engines: the check behind `interlace check`, a harness that
steps an engine by hand, and a connector that answers by script.

    from interlace.connectors.conformance import check_connector

    def test_it_keeps_the_protocol():
        check_connector("my_package.my_module:MyConnector", {"path": "..."}).raise_if_failed()

Names are loaded on first use (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlace.engine.lazy_names import lazy_names

if TYPE_CHECKING:
    from interlace.connectors.conformance.check import check_connector
    from interlace.connectors.conformance.engine_shape import EngineShape
    from interlace.connectors.conformance.findings import Violation
    from interlace.connectors.conformance.harness import Harness
    from interlace.connectors.conformance.properties import PROPERTIES, Property
    from interlace.connectors.conformance.report import CheckFailedError, CheckReport, Result
    from interlace.connectors.conformance.script import Answer, Async, Call, Rule, Script, Sync
    from interlace.connectors.conformance.scripted import ScriptedConnector

_PACKAGE = "interlace.connectors.conformance"
_HOMES = {
    "ScriptedConnector": f"{_PACKAGE}.scripted",
    "check_connector": f"{_PACKAGE}.check",
    "EngineShape": f"{_PACKAGE}.engine_shape",
    "Harness": f"{_PACKAGE}.harness",
    "Violation": f"{_PACKAGE}.findings",
    **dict.fromkeys(("PROPERTIES", "Property"), f"{_PACKAGE}.properties"),
    **dict.fromkeys(("CheckFailedError", "CheckReport", "Result"), f"{_PACKAGE}.report"),
    **dict.fromkeys(("Answer", "Async", "Call", "Rule", "Script", "Sync"), f"{_PACKAGE}.script"),
}

__all__ = [
    "PROPERTIES",
    "Answer",
    "Async",
    "Call",
    "CheckFailedError",
    "CheckReport",
    "EngineShape",
    "Harness",
    "Property",
    "Result",
    "Rule",
    "Script",
    "ScriptedConnector",
    "Sync",
    "Violation",
    "check_connector",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES, __all__)
