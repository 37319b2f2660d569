"""Connectors for tests on a GPU."""

from __future__ import annotations

from typing import Any

from interlace.connectors.conformance import ScriptedConnector


class Layerwise(ScriptedConnector):
    """Says that its layer hooks have to run."""

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True
