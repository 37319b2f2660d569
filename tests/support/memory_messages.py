"""What the two sides of a `MemoryConnector` tell each other, and what it counts."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from memory_store import Record

from interlace.engine.kv_connector import KVConnectorMetadata, KVConnectorWorkerMetadata
from interlace.engine.kv_connector_stats import KVConnectorStats


class LoadBlock(NamedTuple):
    """One block to fill from the store."""

    key: bytes
    block_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class LoadOrder:
    """All that one request loads."""

    req_id: str
    is_async: bool
    blocks: tuple[LoadBlock, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class SaveOrder:
    """Copy this block in this step, after each layer's attention."""

    save_id: int
    req_id: str
    key: bytes
    block_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryMetadata(KVConnectorMetadata):
    """One step."""

    loads: tuple[LoadOrder, ...] = ()
    saves: tuple[SaveOrder, ...] = ()
    preempted: frozenset[str] = frozenset()
    """Requests whose blocks this step may hand on."""
    held: frozenset[str] = frozenset()
    """Of the ended requests that the step tells of, those whose end of sending is awaited."""
    is_idle: bool = False
    """See `KVConnectorMetadata`."""


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryReport(KVConnectorWorkerMetadata):
    """Copies that have ended since the last report."""

    copies: dict[int, dict[int, Record | None]]
    """Save -> rank -> the copy; None if it could not be made."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> MemoryReport:
        """The copies of both."""
        assert isinstance(other, MemoryReport)
        ids = self.copies.keys() | other.copies.keys()
        return MemoryReport({i: {**self.copies.get(i, {}), **other.copies.get(i, {})} for i in ids})


class MemoryStats(KVConnectorStats):
    """Blocks: each worker counts those `loaded`, `lost`, `copied`, the other side `published`."""

    def count(self, **added: int) -> None:
        """Add to the counts."""
        for name, number in added.items():
            if number:
                self.data[name] = self.data.get(name, 0) + number

    def reset(self) -> None:
        """See the base class."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> MemoryStats:
        """See the base class."""
        self.count(**other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """See the base class."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """See the base class."""
        return not self.data
