"""Statistics of a KV connector: what they must be able to do, and how the engine keeps them.

Names are vLLM's (`v1/metrics`). Plain Python; loop thread unless said otherwise.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from interlace.engine.config import EngineConfig


@dataclasses.dataclass
class KVConnectorStats(ABC):
    """What a connector has counted since it was last asked.

    `data` is all that it consists of: `type(connector).build_kv_connector_stats(data)` makes an
    equal object of it.
    """

    data: dict[str, Any] = dataclasses.field(default_factory=dict)

    @abstractmethod
    def reset(self) -> None:
        """Forget everything."""

    @abstractmethod
    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """This and `other`, of the same kind, as one; may change and return this object."""

    @abstractmethod
    def reduce(self) -> dict[str, int | float]:
        """Name -> number, for people."""

    @abstractmethod
    def is_empty(self) -> bool:
        """Whether nothing was counted."""


class CountingStats(KVConnectorStats):
    """Statistics that are numbers by name and add up, also over workers."""

    def reset(self) -> None:
        """Forget everything."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> Self:
        """Add `other`'s numbers to these."""
        for name, number in other.data.items():
            self.data[name] = self.data.get(name, 0) + number
        return self

    def reduce(self) -> dict[str, int | float]:
        """The numbers as they are."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())


class KVConnectorPromMetrics(ABC):
    """A Prometheus exporter of one connector's statistics (vLLM's class of that name).

    `metric_types` maps `prometheus_client`'s Gauge, Counter and Histogram to what makes metrics of
    these kinds in the engine's own registry.
    """

    def __init__(
        self,
        vllm_config: EngineConfig,
        metric_types: Mapping[type[Any], Callable[..., Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self._vllm_config = vllm_config
        self._gauge_cls = metric_types[Gauge]
        self._counter_cls = metric_types[Counter]
        self._histogram_cls = metric_types[Histogram]
        self._labelnames = labelnames
        self.per_engine_labelvalues = per_engine_labelvalues

    @abstractmethod
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take the `data` of one step's statistics."""
