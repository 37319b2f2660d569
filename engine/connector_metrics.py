"""The statistics of a KV connector, kept for snapshots and for Prometheus. Loop thread."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from interlace.engine.config import EngineConfig
from interlace.engine.connector_errors import blaming
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
        with blaming(connector, "build_prom_metrics"):
            self._exporter = connector.build_prom_metrics(config, kinds, ["engine"], {0: ["0"]})

    def observe(self, stats: KVConnectorStats) -> None:
        """Take one step's statistics. Raises: `ConnectorError` if they do not fit to others."""
        self._turn_window()
        # A copy through `data`: the connector may go on using its own object.
        with blaming(self._connector, "build_kv_connector_stats"):
            copy = self._connector.build_kv_connector_stats(dict(stats.data))
        self._window = merged_stats(self._window, stats if copy is None else copy)
        if self._exporter is not None:
            with blaming(self._exporter, "observe"):
                self._exporter.observe(stats.data, 0)

    def reduce(self) -> dict[str, int | float]:
        """The numbers of the newest window that has any, at most 20 seconds old.

        Empty if there is none. Raises: `ConnectorError`.
        """
        self._turn_window()
        newest = self._last if self._window is None else self._window
        if newest is None:
            return {}
        with blaming(newest, "reduce"):
            return newest.reduce()

    def _turn_window(self) -> None:
        now_s = self._clock.monotonic()
        if now_s - self._began_s < WINDOW_S:
            return
        is_next = now_s - self._began_s < 2 * WINDOW_S
        self._last = self._window if is_next else None
        self._window, self._began_s = None, now_s
