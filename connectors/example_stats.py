"""ExampleConnector's statistics: what a worker side has loaded, saved, dropped and failed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from interlace.connectors.counted_metrics import Number
from interlace.engine.kv_connector_stats import CountingStats


@dataclasses.dataclass
class ExampleConnectorStats(CountingStats):
    """`data` maps names of `KVFolderCounters`' fields to numbers, zeros left out. Each worker
    counts its part of a block."""


NUMBERS: Mapping[str, Number] = {
    "blocks_loaded": Number("kv_loaded_blocks"),
    "blocks_failed": Number("kv_load_failed_blocks"),
    "blocks_saved": Number("kv_saved_blocks"),
    "bytes_loaded": Number("kv_transfer_bytes", "load"),
    "bytes_saved": Number("kv_transfer_bytes", "save"),
    "saves_dropped_queue_full": Number("kv_dropped_saves", "write_queue"),
    "saves_dropped_error": Number("kv_dropped_saves", "disk_error"),
    "saves_dropped_bad_blocks": Number("kv_dropped_saves", "bad_kv"),
    "damaged_folders": Number("kv_damaged_folders"),
    "foreign_folders": Number("kv_foreign_folders"),
    "events_dropped": Number("kv_lost_events"),
}
"""Where they go in Prometheus."""
