"""Events about KV caches as connectors tell them: blocks stored, removed, all of them cleared.

Names and fields are vLLM's (`vllm.distributed.kv_events`). A connector's `take_events` returns
them, and the engine hands them on as its own events (`interlace.engine.events`), with the medium
that they name. Plain data.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

MEDIUM_GPU = "GPU"
"""The engine's own pool, on whatever device."""
MEDIUM_CPU = "CPU"
MEDIUM_STORAGE = "STORAGE"


@dataclasses.dataclass(frozen=True, slots=True)
class KVCacheEvent:
    """Root of the three."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockStored(KVCacheEvent):
    """Full blocks can be found from now on."""

    block_hashes: Sequence[bytes]
    """Consecutive ones of a chain."""
    parent_block_hash: bytes | None
    """Of the block before the first; None if it is the first of its chain or not known."""
    token_ids: Sequence[int]
    """Of all blocks, or empty if the connector does not keep them."""
    block_size: int
    """Tokens per block, 0 if `token_ids` is empty."""
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Sequence[Any] | None = None
    group_idx: int | None = None

    def __hash__(self) -> int:
        return hash((tuple(self.block_hashes), self.parent_block_hash, self.medium, self.group_idx))


@dataclasses.dataclass(frozen=True, slots=True)
class BlockRemoved(KVCacheEvent):
    """Blocks can be found no longer."""

    block_hashes: Sequence[bytes]
    medium: str | None = None
    group_idx: int | None = None

    def __hash__(self) -> int:
        return hash((tuple(self.block_hashes), self.medium, self.group_idx))


@dataclasses.dataclass(frozen=True, slots=True)
class AllBlocksCleared(KVCacheEvent):
    """No block can be found any more."""


class _Telling(NamedTuple):
    """An event that a worker told for the first, second ... time in one step."""

    event: KVCacheEvent
    number: int


class KVEventAggregator:
    """Counts which events how many workers have reported.

    The order of each worker's events is kept, and with it what holds in the end: a block may be
    stored, removed and stored again in one step. The second time is counted apart from the first.
    """

    def __init__(self, num_workers: int) -> None:
        """Raises: `ValueError` for less than one worker."""
        if num_workers < 1:
            raise ValueError("num_workers must be at least 1.")
        self._num_workers = num_workers
        self._counts: dict[_Telling, int] = {}  # in an order that fits that of each worker

    def add_events(self, events: Sequence[KVCacheEvent]) -> None:
        """Take all that one worker reported, in its order."""
        times = Counter[KVCacheEvent]()
        told: dict[_Telling, int] = {}
        for event in events:
            times[event] += 1
            told[_Telling(event, times[event])] = 1
        self._take(told)

    def merge(self, other: KVEventAggregator) -> None:
        """Take what other workers reported, each event by as many of them as did."""
        self._counts = self._capped()
        self._take(other._capped())
        self._num_workers += other._num_workers

    def _capped(self) -> dict[_Telling, int]:
        """The counts. No worker is two, if `add_events` was called more than once for it."""
        return {telling: min(n, self._num_workers) for telling, n in self._counts.items()}

    def _take(self, told: Mapping[_Telling, int]) -> None:
        self._counts = {
            telling: self._counts.get(telling, 0) + told.get(telling, 0)
            for telling in _woven(self._counts, told)
        }

    def get_common_events(self) -> list[KVCacheEvent]:
        """Those that every worker has reported, in the workers' order."""
        return [telling.event for telling, n in self._counts.items() if n >= self._num_workers]

    def get_all_events(self) -> list[KVCacheEvent]:
        """Those that any worker has reported, in the workers' order; as often as a worker did."""
        return [telling.event for telling in self._counts]

    def clear_events(self) -> None:
        """Forget them; the number of workers stays."""
        self._counts.clear()

    def increment_workers(self, count: int = 1) -> None:
        """So many more workers report. Raises: `ValueError` unless `count` is positive."""
        if count <= 0:
            raise ValueError("count must be positive.")
        self._num_workers += count

    def reset_workers(self) -> None:
        """Back to one worker."""
        self._num_workers = 1

    def get_number_of_workers(self) -> int:
        """How many workers report."""
        return self._num_workers


def _woven(first: Iterable[_Telling], second: Iterable[_Telling]) -> list[_Telling]:
    """Each of both once: `first` in its order, the others before what follows them in `second`."""
    known = dict.fromkeys(first)
    before: dict[_Telling, list[_Telling]] = {}
    new: list[_Telling] = []
    for telling in second:
        if telling in known:
            before[telling], new = new, []
        else:
            new.append(telling)
    woven = []
    for telling in known:
        woven += [*before.get(telling, ()), telling]
    return woven + new


class KVConnectorKVEvents(ABC):
    """The events of one step, of one worker or of several: what
    `get_kv_connector_kv_cache_events` returns."""

    @abstractmethod
    def add_events(self, events: list[KVCacheEvent]) -> None:
        """Take what one worker reported."""

    @abstractmethod
    def aggregate(self) -> Self:
        """Keep what every worker has reported."""

    @abstractmethod
    def increment_workers(self, count: int = 1) -> None:
        """So many more workers have reported."""

    @abstractmethod
    def get_all_events(self) -> list[KVCacheEvent]:
        """All that are kept."""

    @abstractmethod
    def get_number_of_workers(self) -> int:
        """How many workers have reported."""

    @abstractmethod
    def clear_events(self) -> None:
        """Forget them."""

    def merge(self, other: KVConnectorKVEvents) -> Self:
        """Take other workers' events of the same step; returns this object.

        This takes `other` as one worker's: a class whose merged objects are merged again must
        bring its own, which keeps the counts.
        """
        self.add_events(other.get_all_events())
        self.increment_workers(other.get_number_of_workers())
        return self


class CountedKVEvents(KVConnectorKVEvents):
    """Events kept by a `KVEventAggregator`: for connectors that need nothing of their own."""

    def __init__(self, events: Sequence[KVCacheEvent] = ()) -> None:
        self._aggregator = KVEventAggregator(1)
        self._aggregator.add_events(events)

    def add_events(self, events: list[KVCacheEvent]) -> None:
        """See the base class."""
        self._aggregator.add_events(events)

    def aggregate(self) -> Self:
        """See the base class; afterwards they count as one worker's."""
        common = self._aggregator.get_common_events()
        self._aggregator.clear_events()
        self._aggregator.reset_workers()
        self._aggregator.add_events(common)
        return self

    def increment_workers(self, count: int = 1) -> None:
        """See the base class."""
        self._aggregator.increment_workers(count)

    def merge(self, other: KVConnectorKVEvents) -> Self:
        """See the base class; the counts of what was merged before are kept."""
        if not isinstance(other, CountedKVEvents):
            return super().merge(other)
        self._aggregator.merge(other._aggregator)
        return self

    def get_all_events(self) -> list[KVCacheEvent]:
        """See the base class."""
        return self._aggregator.get_all_events()

    def get_number_of_workers(self) -> int:
        """See the base class."""
        return self._aggregator.get_number_of_workers()

    def clear_events(self) -> None:
        """See the base class."""
        self._aggregator.clear_events()
        self._aggregator.reset_workers()

    def __repr__(self) -> str:
        return f"CountedKVEvents({self.get_all_events()!r})"
