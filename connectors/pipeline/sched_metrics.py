"""Where `PipelineStats`' numbers go in Prometheus."""

from __future__ import annotations

from collections.abc import Mapping

from interlace.connectors.counted_metrics import Number

_US = 1e-6

NUMBERS: Mapping[str, Number] = {
    "chose_recompute": Number("kv_load_ways", "recompute"),
    "chose_bulk": Number("kv_load_ways", "bulk"),
    "chose_layerwise": Number("kv_load_ways", "layerwise"),
    "chose_hybrid": Number("kv_load_ways", "hybrid"),
    "blocks_loaded": Number("kv_loaded_blocks"),
    "blocks_failed_to_load": Number("kv_load_failed_blocks"),
    "blocks_saved": Number("kv_saved_blocks"),
    "blocks_not_saved": Number("kv_dropped_blocks", "copy"),
    "blocks_dropped": Number("kv_dropped_blocks", "record"),
    "stores_dropped": Number("kv_dropped_blocks", "order"),
    "writes_dropped_queue_full": Number("kv_dropped_blocks", "write_queue"),
    "writes_dropped_no_room": Number("kv_dropped_blocks", "disk_full"),
    "writes_dropped_error": Number("kv_dropped_blocks", "disk_error"),
    "blocks_fetched": Number("kv_fetched_blocks"),
    "blocks_failed_to_fetch": Number("kv_fetch_failed_blocks"),
    "fetches_missed": Number("kv_missed_fetches"),
    "blocks_loaded_from_files": Number("kv_mapped_blocks"),
    "reads_late": Number("kv_failed_reads", "late"),
    "reads_damaged": Number("kv_failed_reads", "damaged"),
    "reads_failed": Number("kv_failed_reads", "error"),
    "blocks_written": Number("kv_written_blocks"),
    "records_evicted": Number("kv_evicted_records"),
    "slabs_evicted": Number("kv_evicted_slabs"),
    "slabs_undeletable": Number("kv_undeletable_slabs"),
    "transfers_stuck": Number("kv_stuck_transfers"),
    "bytes_loaded": Number("kv_transfer_bytes", "load"),
    "bytes_saved": Number("kv_transfer_bytes", "save"),
    "bytes_fetched": Number("kv_transfer_bytes", "read"),
    "bytes_written": Number("kv_transfer_bytes", "write"),
    "load_us": Number("kv_transfer_seconds", "load", _US),
    "beside_us": Number("kv_transfer_seconds", "load_beside", _US),
    "save_us": Number("kv_transfer_seconds", "save", _US),
    "fetch_us": Number("kv_transfer_seconds", "read", _US),
    "write_us": Number("kv_transfer_seconds", "write", _US),
    "load_timed_bytes": Number("kv_timed_transfer_bytes", "load"),
    "beside_timed_bytes": Number("kv_timed_transfer_bytes", "load_beside"),
    "save_timed_bytes": Number("kv_timed_transfer_bytes", "save"),
    "fetch_timed_bytes": Number("kv_timed_transfer_bytes", "read"),
    "write_timed_bytes": Number("kv_timed_transfer_bytes", "write"),
    "open_loads": Number("kv_open_transfers", "load"),
    "open_saves": Number("kv_open_transfers", "save"),
    "transfers_hanging": Number("kv_hanging_transfers"),
    "write_queue_bytes": Number("kv_write_queue_bytes"),
    "read_queue_blocks": Number("kv_read_queue_blocks"),
    "records_stored": Number("kv_host_blocks", "stored"),
    "records_free": Number("kv_host_blocks", "free"),
    "records_busy": Number("kv_host_blocks", "busy"),
}
