"""What the two sides of a MultiConnector tell each other: a slot for each child, in their order."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeVar

from interlace.engine.errors import ConnectorError
from interlace.engine.kv_connector import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from interlace.engine.kv_events import KVCacheEvent, KVConnectorKVEvents

T = TypeVar("T")


class Hold(NamedTuple):
    """What is owed for a request that has ended before its blocks may go."""

    children: frozenset[int]
    """Those that asked for it: each has to report the request as sent."""
    loader: int | None
    """The child whose asynchronous load of the request had not been reported, if there is one."""


@dataclasses.dataclass(frozen=True, slots=True)
class MultiMetadata(KVConnectorMetadata):
    """One step's orders: the children's, and what their reports are measured against."""

    parts: tuple[KVConnectorMetadata, ...]
    loads: Mapping[str, int]
    """Request id -> the child whose asynchronous load begins with this step."""
    holds: Mapping[str, Hold]
    """Requests that ended since the step before and are held, by id."""

    @property
    def is_idle(self) -> bool:
        """See `KVConnectorMetadata`: whether all children are."""
        return not (self.loads or self.holds) and all(part.is_idle for part in self.parts)


@dataclasses.dataclass(frozen=True, slots=True)
class MultiWorkerMetadata(KVConnectorWorkerMetadata):
    """What the children report with a step; None for one that has nothing to say."""

    parts: tuple[KVConnectorWorkerMetadata | None, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> MultiWorkerMetadata:
        """Two ranks' reports, slot by slot."""
        assert isinstance(other, MultiWorkerMetadata)
        pairs = zip(self.parts, other.parts, strict=True)
        return MultiWorkerMetadata(tuple(_joined(a, b) for a, b in pairs))


def _joined(
    first: KVConnectorWorkerMetadata | None, second: KVConnectorWorkerMetadata | None
) -> KVConnectorWorkerMetadata | None:
    if first is None or second is None:
        return second if first is None else first
    return first.aggregate(second)


@dataclasses.dataclass(frozen=True, slots=True)
class MultiHandshakeMetadata(KVConnectorHandshakeMetadata):
    """What the children's workers tell at the start; None for one that has nothing to say."""

    parts: tuple[KVConnectorHandshakeMetadata | None, ...]


class MultiKVEvents(KVConnectorKVEvents):
    """The children's cache events of one step, so that each child gets its own back."""

    def __init__(self, parts: Sequence[KVConnectorKVEvents | None]) -> None:
        self.parts = list(parts)
        """By child; None for one that has none."""

    def _present(self) -> list[KVConnectorKVEvents]:
        return [part for part in self.parts if part is not None]

    def add_events(self, events: list[KVCacheEvent]) -> None:
        """Raises: `ConnectorError` unless there is nothing to add: nobody says whose they are."""
        if events:
            raise ConnectorError(
                "events of several children are put together by MultiKVEvents.merge, which knows"
                " whose they are; add_events does not."
            )

    def aggregate(self) -> Self:
        """Keep, of each child's, what every worker has reported."""
        self.parts = [None if part is None else part.aggregate() for part in self.parts]
        return self

    def increment_workers(self, count: int = 1) -> None:
        """So many more workers have reported, of every child."""
        for part in self._present():
            part.increment_workers(count)

    def get_all_events(self) -> list[KVCacheEvent]:
        """All children's, one child after the other."""
        return [event for part in self._present() for event in part.get_all_events()]

    def get_number_of_workers(self) -> int:
        """How many workers have reported, of the child that most have reported of."""
        return max((part.get_number_of_workers() for part in self._present()), default=1)

    def clear_events(self) -> None:
        """Forget every child's."""
        for part in self._present():
            part.clear_events()

    def merge(self, other: KVConnectorKVEvents) -> Self:
        """Take other workers' events of the same step, slot by slot; returns this object."""
        assert isinstance(other, MultiKVEvents)
        for index, part in enumerate(other.parts):
            own = self.parts[index]
            if own is None:
                self.parts[index] = part
            elif part is not None:
                self.parts[index] = own.merge(part)
        return self

    def __repr__(self) -> str:
        return f"MultiKVEvents({self.parts!r})"


def part_of(whole: Any, kind: type[Any], index: int) -> Any:
    """Slot `index` of a message of that kind; None if there is no such message."""
    return whole.parts[index] if isinstance(whole, kind) else None
