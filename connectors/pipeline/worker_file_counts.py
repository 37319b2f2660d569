"""What a store of files has read, written and removed since it was last asked. Device thread."""

from __future__ import annotations

from interlace.connectors.slab_store.directory import SlabDirectory
from interlace.connectors.slab_store.reading import Reads
from interlace.connectors.slab_store.writing import WriteBehind


class FileCounts:
    """Differences of what the parts of a store count since the start, by `PipelineStats`' names."""

    def __init__(
        self, reads: Reads, writes: WriteBehind, directory: SlabDirectory, record_bytes: int
    ) -> None:
        """Asks these, which begin with nothing."""
        self._record_bytes = record_bytes
        self._reads = reads
        self._writes = writes
        self._directory = directory
        self._last = self._totals()

    def take(self) -> tuple[tuple[str, int], ...]:
        """(name, how many more than at the last call), for those that there are."""
        last, self._last = self._last, self._totals()
        more = ((name, number - last[name]) for name, number in self._last.items())
        return tuple((name, number) for name, number in more if number > 0)

    def _totals(self) -> dict[str, int]:
        reads, writes, directory = self._reads.counts, self._writes.counts, self._directory
        return {
            "reads_late": reads.late,
            "reads_failed": reads.failed,
            "reads_damaged": reads.damaged,
            "blocks_written": writes.written,
            "writes_dropped_queue_full": writes.dropped_queue_full,
            "writes_dropped_no_room": writes.dropped_no_room,
            "writes_dropped_error": writes.dropped_error,
            "write_us": round(self._writes.busy_s * 1e6),
            "write_timed_bytes": writes.written * self._record_bytes,
            "slabs_evicted": directory.num_evicted,
            "slabs_undeletable": directory.num_undeletable,
        }
