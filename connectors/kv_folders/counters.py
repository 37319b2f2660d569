"""What happened to stored KV since the connector started, as numbers."""

from __future__ import annotations

import dataclasses
import threading


@dataclasses.dataclass(frozen=True, slots=True)
class KVFolderCounters:
    """Running totals of one side of a connector."""

    blocks_loaded: int = 0
    blocks_saved: int = 0
    """Published by us, or found published by another process when we came."""
    saves_dropped_queue_full: int = 0
    """Runs of blocks that were not saved since the writer was behind."""
    saves_dropped_error: int = 0
    """Runs that could not be written: full disk, no permission, and the like."""
    saves_dropped_bad_blocks: int = 0
    """Runs that stood on KV that a load had not brought."""
    damaged_folders: int = 0
    """Found damaged, and removed where possible."""
    foreign_folders: int = 0
    """Of the same model, but of another type, layout, block size or rank."""


class Tally:
    """Counters that several threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters = KVFolderCounters()

    def add(self, **added: int) -> None:
        """Add to the named fields."""
        with self._lock:
            changes = {name: getattr(self._counters, name) + n for name, n in added.items()}
            self._counters = dataclasses.replace(self._counters, **changes)

    @property
    def counters(self) -> KVFolderCounters:
        """The totals now."""
        return self._counters
