"""Prometheus metrics of connectors whose statistics are numbers by name. Knows no connector.

The families are one list, so that connectors that count the same thing call it the same, and those
in one MultiConnector can share them. A connector says which of its numbers goes where.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from interlace.engine.kv_connector_stats import KVConnectorPromMetrics

if TYPE_CHECKING:
    from interlace.engine.config import EngineConfig


class Family(NamedTuple):
    """What several numbers are to Prometheus, which may add `_total` to the name."""

    text: str
    label: str | None = None
    """By which they differ."""
    is_level: bool = False
    """How something stands, and not a count."""


FAMILIES: Mapping[str, Family] = {
    "kv_load_ways": Family("Requests with stored KV, by the way that was chosen for them.", "way"),
    "kv_loaded_blocks": Family("Blocks loaded into the engine's pool."),
    "kv_load_failed_blocks": Family("Blocks promised and not loaded: they were computed instead."),
    "kv_saved_blocks": Family("Blocks saved from the engine's pool."),
    "kv_dropped_blocks": Family(
        "Blocks that were to be kept and are not, by why: record (no room in host memory), copy (it"
        " failed, or they stood on bad KV), order (too many waited to be written to be queued),"
        " write_queue, disk_full, disk_error.",
        "reason",
    ),
    "kv_dropped_saves": Family(
        "Runs of blocks that were to be kept and are not, by why: write_queue, disk_error, bad_kv.",
        "reason",
    ),
    "kv_fetched_blocks": Family(
        "Blocks read from files into host memory, to be loaded from there."
    ),
    "kv_fetch_failed_blocks": Family("Blocks that were to be read from files, and were not."),
    "kv_missed_fetches": Family("Blocks whose file, or record, had gone before they were read."),
    "kv_mapped_blocks": Family("Blocks that a GPU copied from registered files directly."),
    "kv_failed_reads": Family(
        "Reads of a block from a file that failed, by why: late, damaged, error.", "reason"
    ),
    "kv_written_blocks": Family("Blocks written to files."),
    "kv_evicted_records": Family("Blocks that left host memory to make room."),
    "kv_evicted_slabs": Family("Files of blocks that were removed to make room."),
    "kv_undeletable_slabs": Family("Files of blocks that could not be removed."),
    "kv_damaged_folders": Family("Folders of blocks that were found damaged."),
    "kv_foreign_folders": Family("Folders of blocks found that another kind of engine has made."),
    "kv_lost_events": Family("Events of stored and lost blocks that nobody took in time."),
    "kv_stuck_transfers": Family(
        "Transfers between host memory and the engine's pool, given up after a deadline."
    ),
    "kv_hanging_transfers": Family(
        "Transfers and reads that were given up and have not returned: their room is not used.",
        is_level=True,
    ),
    "kv_transfer_bytes": Family(
        "Bytes moved, by where: load (into the engine's pool), save (out of it), read and write"
        " (files). vLLM: kv_offload_total_bytes.",
        "transfer",
    ),
    "kv_transfer_seconds": Family(
        "Time that timed transfers took, from the first copy to the last one of each, on its lane:"
        " load (within steps), load_beside (beside them), save, read, write. Reads that have ended"
        " when they are first looked at are not timed. vLLM: kv_offload_total_time.",
        "transfer",
    ),
    "kv_timed_transfer_bytes": Family(
        "Bytes of the transfers that were timed, to divide by that time.", "transfer"
    ),
    "kv_open_transfers": Family("Loads and saves that have not ended.", "transfer", is_level=True),
    "kv_write_queue_bytes": Family("Bytes that wait to be written to files.", is_level=True),
    "kv_read_queue_blocks": Family("Blocks that wait to be read from files.", is_level=True),
    "kv_host_blocks": Family(
        "Blocks that host memory has room for, by state: stored (can be loaded), free, busy (being"
        " saved or read into).",
        "state",
        is_level=True,
    ),
}


class Number(NamedTuple):
    """Where a number goes."""

    family: str
    """Of `FAMILIES`."""
    label: str | None = None
    """Its value, if the family has one."""
    scale: float = 1.0
    """Prometheus' unit, in units of the number."""


class CountedMetrics(KVConnectorPromMetrics):
    """Exports `CountingStats`. What a connector can count begins at 0, so that it is seen that it
    has not happened."""

    def __init__(
        self,
        vllm_config: EngineConfig,
        metric_types: Mapping[type[Any], Callable[..., Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        numbers: Mapping[str, Number],
    ) -> None:
        """`numbers`: name in the statistics -> where it goes. Others are left out."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        made: dict[str, Any] = {}
        self._cells: dict[tuple[int, str], Any] = {}
        self._numbers = numbers
        for name, number in numbers.items():
            if number.family not in made:
                made[number.family] = self._make(number.family)
            own = [] if number.label is None else [number.label]
            for engine_idx, values in per_engine_labelvalues.items():
                metric = made[number.family]
                labels = (*values, *own)
                self._cells[engine_idx, name] = metric.labels(*labels) if labels else metric

    def _make(self, name: str) -> Any:
        family = FAMILIES[name]
        kind = self._gauge_cls if family.is_level else self._counter_cls
        own = [] if family.label is None else [family.label]
        return kind(f"interlace_{name}", family.text, [*self._labelnames, *own])

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add counts, and take over levels."""
        for name, value in transfer_stats_data.items():
            number = self._numbers.get(name)
            if number is None:
                continue
            cell = self._cells[engine_idx, name]
            if FAMILIES[number.family].is_level:
                cell.set(value * number.scale)
            else:
                cell.inc(value * number.scale)


class CountedConnector:
    """For connectors whose metrics are their statistics' numbers."""

    metric_numbers: ClassVar[Mapping[str, Number]]
    """See `CountedMetrics`."""

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: EngineConfig,
        metric_types: Mapping[type[Any], Callable[..., Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Of all that its statistics have."""
        return CountedMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues, cls.metric_numbers
        )
