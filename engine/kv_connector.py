"""The KV-connector protocol's plain types: roles, metadata, outputs, block tables.

Names and fields are vLLM's (V1 protocol). The connector's base class is in `interlace.connectors`;
what the engine calls on it stands in `interlace.engine.ports`.
"""

from __future__ import annotations

import dataclasses
import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from interlace.engine.connector_errors import blaming
from interlace.engine.errors import ConnectorError
from interlace.engine.kv_connector_stats import KVConnectorStats
from interlace.engine.kv_events import KVConnectorKVEvents

if TYPE_CHECKING:
    from interlace.engine.block_pool import KVCacheBlock


class KVConnectorRole(enum.Enum):
    """Each role has an instance of its own; they share no memory but what metadata carries."""

    SCHEDULER = 0
    """On the event loop, beside the scheduler."""
    WORKER = 1
    """On the device thread, beside the runner."""


class KVConnectorMetadata(ABC):  # noqa: B024 - each connector has fields of its own
    """What a connector's scheduler side tells its worker side, once a step."""

    @property
    def is_idle(self) -> bool:
        """An extension of the protocol: whether the worker side has nothing to do in this step, and
        nothing under way of which to report. Then none of its hooks is called for the step, and it
        never sees these metadata. Not in a step that loads. No, unless a connector says otherwise.
        """
        return False


class KVConnectorHandshakeMetadata(ABC):  # noqa: B024 - a marker, as above
    """What a connector's worker side tells its scheduler side, once at the start."""


class KVConnectorWorkerMetadata(ABC):
    """What a connector's worker side tells its scheduler side with a step's output."""

    @abstractmethod
    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """What two ranks said of the same step, as one."""


@dataclasses.dataclass(slots=True)
class KVConnectorOutput:
    """What the worker side of a connector reports with one step."""

    finished_sending: set[str] | None = None
    """Ids of ended requests whose blocks are no longer read."""
    finished_recving: set[str] | None = None
    """Ids of requests whose asynchronous load has ended, well or badly."""
    kv_connector_stats: KVConnectorStats | None = None
    kv_cache_events: KVConnectorKVEvents | None = None
    kv_connector_worker_meta: KVConnectorWorkerMetadata | None = None
    invalid_block_ids: set[int] = dataclasses.field(default_factory=set)
    """Blocks that a load promised and did not fill."""
    expected_finished_count: int = 0
    """How many ranks report each id from now on; 0 keeps what was said before."""

    def is_empty(self) -> bool:
        """Whether nothing is reported. Raises: `ConnectorError` if statistics or events raise."""
        return not (
            self.finished_sending
            or self.finished_recving
            or self.kv_connector_worker_meta is not None
            or self.invalid_block_ids
            or self._has_news
        )

    @property
    def _has_news(self) -> bool:
        stats, events = self.kv_connector_stats, self.kv_cache_events
        if stats is not None:
            with blaming(stats, "is_empty"):
                if not stats.is_empty():
                    return True
        if events is None:
            return False
        with blaming(events, "get_all_events"):
            return len(events.get_all_events()) > 0

    @classmethod
    def merge(cls, *outputs: KVConnectorOutput) -> KVConnectorOutput:
        """What several parts reported of one step, as one.

        Sets by union, statistics and worker metadata by `aggregate`, events by `merge`, in the
        order of `outputs`; these may change what the first ones hold. Finished ids are united,
        not counted: that is `KVOutputAggregator`'s. Raises: `ConnectorError` if parts expect
        unequal finished counts, or their statistics are of different kinds.
        """
        merged = cls()
        counts = {output.expected_finished_count for output in outputs} - {0}
        if len(counts) > 1:
            raise ConnectorError(
                f"parts of one step expect unequal finished counts, {sorted(counts)}: let"
                " get_finished_count answer the same everywhere."
            )
        merged.expected_finished_count = counts.pop() if counts else 0
        for output in outputs:
            merged._add(output)
        return merged

    def _add(self, other: KVConnectorOutput) -> None:
        if other.finished_sending:
            self.finished_sending = (self.finished_sending or set()) | other.finished_sending
        if other.finished_recving:
            self.finished_recving = (self.finished_recving or set()) | other.finished_recving
        self.invalid_block_ids |= other.invalid_block_ids
        self.kv_connector_stats = merged_stats(self.kv_connector_stats, other.kv_connector_stats)
        if self.kv_cache_events is None:
            self.kv_cache_events = other.kv_cache_events
        elif other.kv_cache_events is not None:
            with blaming(self.kv_cache_events, "merge"):
                self.kv_cache_events = self.kv_cache_events.merge(other.kv_cache_events)
        if self.kv_connector_worker_meta is None:
            self.kv_connector_worker_meta = other.kv_connector_worker_meta
        elif other.kv_connector_worker_meta is not None:
            with blaming(self.kv_connector_worker_meta, "aggregate"):
                self.kv_connector_worker_meta = self.kv_connector_worker_meta.aggregate(
                    other.kv_connector_worker_meta
                )


def merged_stats(
    first: KVConnectorStats | None, second: KVConnectorStats | None
) -> KVConnectorStats | None:
    """Both as one, which may be the changed `first`. Raises: `ConnectorError` if they are of
    different kinds."""
    if first is None or second is None:
        return second if first is None else first
    if type(first) is not type(second):
        raise ConnectorError(
            f"statistics of different kinds cannot be one: {type(first).__name__} and"
            f" {type(second).__name__}; let get_kv_connector_stats always return the same kind."
        )
    with blaming(first, "aggregate"):
        return first.aggregate(second)


@dataclasses.dataclass(frozen=True, slots=True)
class KVCacheBlocks:
    """All blocks of one request, in order of position: one sequence per KV-cache group."""

    blocks: tuple[Sequence[KVCacheBlock], ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Their ids, per group."""
        return tuple([block.block_id for block in group] for group in self.blocks)

    def get_unhashed_block_ids(self) -> list[int]:
        """Ids of the blocks without a hash, of the one group.

        Those that an asynchronous load has to fill; what a synchronous one fills has a hash.
        """
        (group,) = self.blocks
        return [block.block_id for block in group if block.block_hash is None]

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """As `get_unhashed_block_ids`, per group; null blocks are left out."""
        return [
            [block.block_id for block in group if block.block_hash is None and not block.is_null]
            for group in self.blocks
        ]

    def new_empty(self) -> Self:
        """As many groups, and no blocks."""
        return type(self)(tuple(() for _ in self.blocks))


@dataclasses.dataclass(frozen=True, slots=True)
class FullAttentionSpec:
    """The KV of one layer whose tokens see all tokens before them."""

    block_size: int
    """Tokens per block."""
    num_kv_heads: int
    head_size: int
    dtype: Any
    """A `torch.dtype`."""
    page_size_bytes: int
    """Bytes of one block of one layer, K and V together."""


@dataclasses.dataclass(frozen=True, slots=True)
class KVCacheGroupSpec:
    """Layers that share one block table."""

    layer_names: tuple[str, ...]
    kv_cache_spec: FullAttentionSpec


@dataclasses.dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """How the KV cache lies on the device: the third argument of a connector's constructor."""

    num_blocks: int
    """The null block included."""
    kv_cache_groups: tuple[KVCacheGroupSpec, ...]
