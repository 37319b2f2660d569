"""KV connectors: the protocol's base class, its factory, and the connectors themselves.

Names are loaded on first use (PEP 562): asking for the base class imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlace.engine.lazy_names import lazy_names

if TYPE_CHECKING:
    from interlace.connectors.base import (
        CheckSetup,
        CopyBlocksOp,
        KVConnectorBase_V1,
        SupportsHMA,
        supports_hma,
    )
    from interlace.connectors.decode_bench_connector import DecodeBenchConnector
    from interlace.connectors.example_connector import ExampleConnector
    from interlace.connectors.example_hidden_states_connector import ExampleHiddenStatesConnector
    from interlace.connectors.factory import KVConnectorFactory
    from interlace.connectors.multi_connector import MultiConnector
    from interlace.connectors.pipeline.layer_pipeline import LayerPipeline
    from interlace.connectors.pipeline_connector import PipelineConnector
    from interlace.engine.kv_connector import (
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorOutput,
        KVConnectorRole,
        KVConnectorWorkerMetadata,
    )
    from interlace.engine.kv_connector_stats import KVConnectorPromMetrics, KVConnectorStats
    from interlace.engine.ports import Gate, Lane, Lanes
    from interlace.layers.lanes import ThreadLanes
    from interlace.layers.virtual_lanes import VirtualLanes

_HOMES = {
    "DecodeBenchConnector": "interlace.connectors.decode_bench_connector",
    "ExampleConnector": "interlace.connectors.example_connector",
    "ExampleHiddenStatesConnector": "interlace.connectors.example_hidden_states_connector",
    "KVConnectorFactory": "interlace.connectors.factory",
    "LayerPipeline": "interlace.connectors.pipeline.layer_pipeline",
    "MultiConnector": "interlace.connectors.multi_connector",
    "PipelineConnector": "interlace.connectors.pipeline_connector",
    "ThreadLanes": "interlace.layers.lanes",
    "VirtualLanes": "interlace.layers.virtual_lanes",
    **dict.fromkeys(
        ("CheckSetup", "CopyBlocksOp", "KVConnectorBase_V1", "SupportsHMA", "supports_hma"),
        "interlace.connectors.base",
    ),
    **dict.fromkeys(
        ("KVConnectorPromMetrics", "KVConnectorStats"), "interlace.engine.kv_connector_stats"
    ),
    **dict.fromkeys(("Gate", "Lane", "Lanes"), "interlace.engine.ports"),
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
    "CheckSetup",
    "CopyBlocksOp",
    "DecodeBenchConnector",
    "ExampleConnector",
    "ExampleHiddenStatesConnector",
    "Gate",
    "KVConnectorBase_V1",
    "KVConnectorFactory",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorOutput",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorWorkerMetadata",
    "Lane",
    "Lanes",
    "LayerPipeline",
    "MultiConnector",
    "PipelineConnector",
    "SupportsHMA",
    "ThreadLanes",
    "VirtualLanes",
    "supports_hma",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES, __all__)
