"""PipelineConnector's statistics: blocks loaded, saved and dropped, and which ways were chosen."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Self

from interlace.engine.kv_connector_stats import CountingStats, KVConnectorStats

LEVELS = frozenset(
    {
        *("open_loads", "open_saves", "records_stored", "records_free", "records_busy"),
        *("transfers_hanging", "write_queue_bytes", "read_queue_blocks"),
    }
)
"""Of `PipelineStats`' names, those that say how things stand: the newest counts."""
BYTES_OF = {
    "blocks_loaded": "bytes_loaded",
    "blocks_saved": "bytes_saved",
    "blocks_fetched": "bytes_fetched",
    "blocks_written": "bytes_written",
}


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

    `transfers_stuck` were given up after the deadline. `bytes_loaded`, `bytes_saved`,
    `bytes_fetched` and `bytes_written` go with the blocks of these names. Times, in microseconds,
    each with the bytes that were moved in it (`load_timed_bytes` and so on): `load_us` of loads
    within steps, `beside_us` beside them, `save_us` of saves, `fetch_us`, `write_us`.

    How things stand, told when that has changed (`LEVELS`): `open_loads`, `open_saves`;
    `records_stored`, `records_free` and `records_busy`, of host memory; `write_queue_bytes` and
    `read_queue_blocks`; `transfers_hanging`, which were given up and have not returned.
    """

    def aggregate(self, other: KVConnectorStats) -> Self:
        """Add `other`'s counts to these, and take over its levels."""
        super().aggregate(other)
        self.data.update((name, other.data[name]) for name in LEVELS & other.data.keys())
        return self

    def add_bytes(self, record_bytes: int) -> None:
        """What its blocks come to. `record_bytes`: of one."""
        for blocks, num_bytes in BYTES_OF.items():
            if blocks in self.data:
                self.data[num_bytes] = self.data[blocks] * record_bytes

    def is_empty(self) -> bool:
        """Whether nothing was counted, and no level told, be it 0."""
        return super().is_empty() and not LEVELS & self.data.keys()


class Counter:
    """Counts until it is asked. Event loop only."""

    def __init__(self) -> None:
        self._counts = collections.Counter[str]()
        self._levels: dict[str, int] = {}
        self._changed: dict[str, int] = {}
        self._taken = collections.Counter[str]()

    def add(self, name: str, number: int = 1) -> None:
        """Count `number` more of `name`; 0 leaves no trace."""
        if number:
            self._counts[name] += number

    def set_levels(self, levels: Mapping[str, int]) -> None:
        """How things stand: what differs from the last time is told. 0 is where all begin."""
        for name, level in levels.items():
            if self._levels.get(name, 0) != level:
                self._levels[name] = self._changed[name] = level

    def take(self) -> PipelineStats | None:
        """What was counted since the last call, and which levels have changed; None if there is
        neither."""
        if not (self._counts or self._changed):  # as after most steps
            return None
        counts, self._counts = self._counts, collections.Counter()
        changed, self._changed = self._changed, {}
        self._taken.update(counts)
        return PipelineStats(data={**counts, **changed})

    def total(self, name: str) -> int:
        """Of `name`, since the start."""
        return self._taken[name] + self._counts[name]
