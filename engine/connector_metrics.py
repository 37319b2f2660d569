"""The statistics of a KV connector, kept for snapshots and for Prometheus. Loop thread."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from interlace.engine.config import EngineConfig
from interlace.engine.errors import ConnectorError
from interlace.engine.kv_connector import merged_stats
from interlace.engine.kv_connector_stats import KVConnectorStats
from interlace.engine.ports import Clock, SchedulerConnector

WINDOW_S = 10.0
"""Statistics are added up over windows of this length, so that they cannot grow for ever."""


class ConnectorMetrics:
    """Adds up what both sides of one connector report."""

    def __init__(self, connector: SchedulerConnector, config: EngineConfig, clock: Clock) -> None:
        """Raises: `ConnectorError` if the connector's exporter cannot be made."""
        self.registry = CollectorRegistry()
        """The engine's own; the exporter's metrics are in it."""
        self._connector = connector
        self._clock = clock
        self._began_s = clock.monotonic()
        self._window: KVConnectorStats | None = None
        self._last: KVConnectorStats | None = None
        kinds: Mapping[type[Any], Callable[..., Any]] = {
            kind: functools.partial(kind, registry=self.registry)
            for kind in (Gauge, Counter, Histogram)
        }
        try:
            self._exporter = connector.build_prom_metrics(config, kinds, ["engine"], {0: ["0"]})
        except Exception as error:
            name = type(connector).__name__
            raise ConnectorError(
                f"{name}.build_prom_metrics raised {type(error).__name__}: {error}"
            ) from error

    def observe(self, stats: KVConnectorStats) -> None:
        """Take one step's statistics. Raises: `ConnectorError` if they do not fit to others."""
        now_s = self._clock.monotonic()
        if now_s - self._began_s >= WINDOW_S:
            self._last, self._window, self._began_s = self._window, None, now_s
        # A copy through `data`: the connector may go on using its own object.
        copy = self._connector.build_kv_connector_stats(dict(stats.data))
        self._window = merged_stats(self._window, stats if copy is None else copy)
        if self._exporter is not None:
            self._exporter.observe(stats.data, 0)

    def reduce(self) -> dict[str, int | float]:
        """The numbers of the newest window that has any; empty if the connector has none."""
        newest = self._window or self._last
        return {} if newest is None else newest.reduce()
