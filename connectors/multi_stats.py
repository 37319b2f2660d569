"""Statistics of a MultiConnector: those of its children, under keys that tell children apart."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from interlace.connectors.multi_children import ChildSpec, class_of_key
from interlace.engine.config import EngineConfig
from interlace.engine.errors import ConfigError, ConnectorError
from interlace.engine.kv_connector_stats import KVConnectorPromMetrics, KVConnectorStats

CONNECTOR_LABEL = "connector"
"""The label by which two children's metrics of one name differ; its value is the child's key."""


class MultiKVConnectorStats(KVConnectorStats):
    """`data` is child key -> `data` of that child's statistics; two of a class do not collide."""

    @classmethod
    def of(cls, parts: Iterable[tuple[str, KVConnectorStats | None]]) -> MultiKVConnectorStats:
        """What children have counted: (child key, statistics or None)."""
        return cls({key: stats.data for key, stats in parts if stats is not None})

    @classmethod
    def rebuilt(cls, data: Mapping[str, Any] | None) -> MultiKVConnectorStats:
        """Each child's part anew by its own class; empty without `data`.

        Raises: `ConfigError`, a ValueError, for keys of no child and for parts that are no dicts.
        """
        if data is None:
            return cls()
        return cls({key: _part(key, part).data for key, part in data.items()})

    def part(self, key: str) -> KVConnectorStats | None:
        """One child's statistics; None if it has none."""
        return _part(key, self.data[key]) if key in self.data else None

    def _parts(self) -> dict[str, KVConnectorStats]:
        return {key: _part(key, data) for key, data in self.data.items()}

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> MultiKVConnectorStats:
        """Child by child; changes and returns this object."""
        assert isinstance(other, MultiKVConnectorStats)
        for key, theirs in other._parts().items():
            own = self.part(key)
            self.data[key] = (theirs if own is None else own.aggregate(theirs)).data
        return self

    def reduce(self) -> dict[str, int | float]:
        """ "child key/name" -> number."""
        return {
            f"{key}/{name}": number
            for key, part in self._parts().items()
            for name, number in part.reduce().items()
        }

    def is_empty(self) -> bool:
        """Whether no child has counted anything."""
        return all(part.is_empty() for part in self._parts().values())


def _part(key: str, data: Any) -> KVConnectorStats:
    if not isinstance(data, dict):
        raise ConfigError(f"MultiConnector: statistics of child {key} must be a dict: {data!r}.")
    cls = class_of_key(key)
    stats = cls.build_kv_connector_stats(data)
    if stats is None:
        raise ConnectorError(
            f"MultiConnector's child {key}: build_kv_connector_stats answered None, but the child"
            " reports statistics: let it make them of their data."
        )
    return stats


class MultiKVConnectorPromMetrics(KVConnectorPromMetrics):
    """One exporter for each child that has one. All their metrics have a label more than asked for,
    `CONNECTOR_LABEL`, so that children of one class can share them."""

    def __init__(
        self,
        vllm_config: EngineConfig,
        metric_types: Mapping[type[Any], Callable[..., Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        specs: Iterable[ChildSpec],
    ) -> None:
        """Makes the children's exporters."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        shared = _made_once(metric_types)
        self.exporters: dict[str, KVConnectorPromMetrics] = {}
        """By child key."""
        for spec in specs:
            exporter = spec.cls.build_prom_metrics(
                spec.engine_config(vllm_config),
                shared,
                [*labelnames, CONNECTOR_LABEL],
                {i: [*values, spec.key] for i, values in per_engine_labelvalues.items()},
            )
            if exporter is not None:
                self.exporters[spec.key] = exporter

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Give each child's exporter that child's part."""
        for key, data in transfer_stats_data.items():
            if key in self.exporters:
                self.exporters[key].observe(data, engine_idx)


def _made_once(
    metric_types: Mapping[type[Any], Callable[..., Any]],
) -> dict[type[Any], Callable[..., Any]]:
    """Makers of metrics that give the metric which exists to whoever asks for it again.

    A registry takes each name only once, and children of one class ask for the same names.
    """
    made: dict[str, Any] = {}

    def make(kind: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        if name not in made:
            made[name] = kind(name, *args, **kwargs)
        return made[name]

    return {key: functools.partial(make, kind) for key, kind in metric_types.items()}
