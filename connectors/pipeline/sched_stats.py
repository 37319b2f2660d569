"""PipelineConnector's statistics: blocks loaded, saved and dropped, and which ways were chosen."""

from __future__ import annotations

import collections
import dataclasses

from interlace.engine.kv_connector_stats import CountingStats


@dataclasses.dataclass
class PipelineStats(CountingStats):
    """`data` maps names to numbers, zeros left out.

    `blocks_loaded`, `blocks_failed_to_load`; `blocks_saved`, `blocks_not_saved` (a copy failed, or
    stood on bad KV), `blocks_dropped` (there was no record for them); `records_evicted`;
    `chose_recompute`, `chose_bulk`, `chose_layerwise` and `chose_hybrid`, a request each.

    With a store of files also, of blocks that lay in files only: `blocks_loaded_from_files`
    (registered ones, which a GPU copied from, whether they were good or not), `blocks_fetched`,
    `blocks_failed_to_fetch`, and of these `reads_late` (after the deadline), `reads_damaged` and
    `reads_failed` (for any other reason), counted when that is known; `fetches_missed` (promised,
    and gone before they were asked for, or without a record to go to). Of blocks that were to be
    written: `blocks_written`; `writes_dropped_queue_full`, `writes_dropped_no_room` and
    `writes_dropped_error`; and `stores_dropped` (too many waited already, so they were not even
    queued). And `slabs_evicted`, files that went to make room, and `slabs_undeletable`, files that
    turned out to be such. What goes on beside the steps is counted with the next step's report.
    """


class Counter:
    """Counts until it is asked. Event loop only."""

    def __init__(self) -> None:
        self._counts = collections.Counter[str]()
        self._taken = collections.Counter[str]()

    def add(self, name: str, number: int = 1) -> None:
        """Count `number` more of `name`; 0 leaves no trace."""
        if number:
            self._counts[name] += number

    def take(self) -> PipelineStats | None:
        """What was counted since the last call, None if nothing was."""
        if not self._counts:  # as after most steps
            return None
        counts, self._counts = self._counts, collections.Counter()
        self._taken.update(counts)
        return PipelineStats(data=dict(counts))

    def total(self, name: str) -> int:
        """Of `name`, since the start."""
        return self._taken[name] + self._counts[name]
