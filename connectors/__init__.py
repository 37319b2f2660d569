"""KV connectors: the protocol's base class, its factory, and the connectors themselves.

Names are loaded on first use (PEP 562): asking for the base class imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlace.engine.lazy_names import lazy_names

if TYPE_CHECKING:
    from interlace.connectors.base import KVConnectorBase_V1, SupportsHMA, supports_hma
    from interlace.connectors.example_connector import ExampleConnector
    from interlace.connectors.factory import KVConnectorFactory
    from interlace.engine.kv_connector import (
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorOutput,
        KVConnectorRole,
        KVConnectorWorkerMetadata,
    )

_HOMES = {
    "ExampleConnector": "interlace.connectors.example_connector",
    "KVConnectorFactory": "interlace.connectors.factory",
    **dict.fromkeys(
        ("KVConnectorBase_V1", "SupportsHMA", "supports_hma"), "interlace.connectors.base"
    ),
    **dict.fromkeys(
        (
            "KVConnectorHandshakeMetadata",
            "KVConnectorMetadata",
            "KVConnectorOutput",
            "KVConnectorRole",
            "KVConnectorWorkerMetadata",
        ),
        "interlace.engine.kv_connector",
    ),
}

__all__ = [
    "ExampleConnector",
    "KVConnectorBase_V1",
    "KVConnectorFactory",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorOutput",
    "KVConnectorRole",
    "KVConnectorWorkerMetadata",
    "SupportsHMA",
    "supports_hma",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES, __all__)
