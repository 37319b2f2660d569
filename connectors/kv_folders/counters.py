"""What happened to stored KV since the connector started, as numbers."""

from __future__ import annotations

import dataclasses
import threading


@dataclasses.dataclass(frozen=True, slots=True)
class KVFolderCounters:
    """Running totals of one side of a connector.

    Of several workers each counts what it did: a block of which each of them has a part counts
    once for each. The scheduler side counts whole blocks.
    """

    blocks_loaded: int = 0
    bytes_loaded: int = 0
    blocks_failed: int = 0
    """Promised and not loaded: they were computed, or their request ended."""
    blocks_saved: int = 0
    """Published by us, or found published by another process when we came."""
    bytes_saved: int = 0
    saves_dropped_queue_full: int = 0
    """Runs of blocks that were not saved since the writer was behind."""
    saves_dropped_error: int = 0
    """Runs that could not be written: full disk, no permission, and the like."""
    saves_dropped_bad_blocks: int = 0
    """Runs that stood on KV that a load had not brought, or that another worker could not save."""
    damaged_folders: int = 0
    """Found damaged, and removed where possible."""
    foreign_folders: int = 0
    """Of the same model, but of another type, layout, block size or number of workers."""
    events_dropped: int = 0
    """Events of stored and lost blocks that nobody took in time."""


class Tally:
    """Counters that several threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters = KVFolderCounters()
        self._taken = KVFolderCounters()

    def add(self, **added: int) -> None:
        """Add to the named fields."""
        with self._lock:
            changes = {name: getattr(self._counters, name) + n for name, n in added.items()}
            self._counters = dataclasses.replace(self._counters, **changes)

    @property
    def counters(self) -> KVFolderCounters:
        """The totals now."""
        return self._counters

    def take_new(self) -> dict[str, int]:
        """What was added since the last call: name -> number, without zeros. One thread."""
        now, before = self._counters, self._taken
        self._taken = now
        if now is before:
            return {}
        names = [field.name for field in dataclasses.fields(now)]
        new = {name: getattr(now, name) - getattr(before, name) for name in names}
        return {name: number for name, number in new.items() if number}
