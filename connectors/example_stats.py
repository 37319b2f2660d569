"""ExampleConnector's statistics: what a worker side has loaded, saved, dropped and failed."""

from __future__ import annotations

import dataclasses

from interlace.engine.kv_connector_stats import CountingStats


@dataclasses.dataclass
class ExampleConnectorStats(CountingStats):
    """`data` maps names of `KVFolderCounters`' fields to numbers, zeros left out. Each worker
    counts its part of a block."""
