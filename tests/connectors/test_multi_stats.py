"""Statistics of a MultiConnector's children, and their exporters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from multi_kit import multi_config, scripted
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from talker import (
    sides_of,
    talker,
)

from interlace.connectors.conformance import Script
from interlace.connectors.multi_connector import MultiConnector
from interlace.connectors.multi_stats import MultiKVConnectorStats
from interlace.engine.errors import ConnectorError

# --- statistics ----------------------------------------------------------------------------------


def test_statistics_of_children_of_one_class_do_not_collide() -> None:
    _, worker = sides_of(talker("a"), talker("bbb"), talker())
    stats = worker.get_kv_connector_stats()
    assert stats is not None
    keys = ["0:talker.Talker", "1:talker.Talker"]
    assert stats.data == dict(zip(keys, ({"words": 1}, {"words": 3}), strict=True))
    again = MultiConnector.build_kv_connector_stats(stats.data)
    assert again == stats
    third = "2:talker.Talker"
    again.aggregate(MultiKVConnectorStats({keys[1]: {"words": 4}, third: {"words": 9}}))
    words = {keys[0]: 1, keys[1]: 7, third: 9}
    assert again.reduce() == {f"{key}/words": number for key, number in words.items()}
    assert stats.data[keys[1]] == {"words": 3}, "a copy"
    assert not again.is_empty()
    again.reset()
    assert again.is_empty()
    assert MultiConnector.build_kv_connector_stats() == MultiKVConnectorStats()


@pytest.mark.parametrize(
    "data",
    [
        {"0:Nobody": {}},
        {"Talker": {}},
        {"x:ScriptedConnector": {}},
        {"0:os.path": {}},
        {"0:no.such.module.Thing": {}},
        {"0:ExampleConnector": 3},
    ],
)
def test_statistics_of_nobody_are_refused(data: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        MultiConnector.build_kv_connector_stats(data)


def test_a_child_that_cannot_remake_its_statistics_is_named() -> None:
    with pytest.raises(ConnectorError, match="child 0:ScriptedConnector: build_kv_connector_stats"):
        MultiConnector.build_kv_connector_stats({"0:ScriptedConnector": {"a": 1}})


def test_children_of_one_class_share_metrics_under_labels() -> None:
    registry = CollectorRegistry()
    kinds: dict[type[Any], Callable[..., Any]] = {
        kind: functools.partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)
    }
    config = multi_config([talker("a"), scripted(Script()), talker("bbb")])
    metrics = MultiConnector.build_prom_metrics(config, kinds, ["engine"], {0: ["e0"]})
    assert metrics is not None
    _, worker = sides_of(talker("a"), scripted(Script()), talker("bbb"))
    for _ in range(2):
        stats = worker.get_kv_connector_stats()
        assert stats is not None
        metrics.observe(stats.data)
    for index, words in ((0, 2), (2, 6)):
        labels = {"engine": "e0", "connector": f"{index}:talker.Talker"}
        assert registry.get_sample_value("words_total", labels) == words
    silent = multi_config([scripted(Script())])
    assert MultiConnector.build_prom_metrics(silent, kinds, ["engine"], {0: ["e0"]}) is None
