"""What a connector tells the engine's readers: statistics, Prometheus metrics, cache events."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from connected import NOTHING, connected_stepper, scripted_sides
from prometheus_client import Counter, generate_latest
from scheduling import ManualClock, Stepper, launched, make_scheduler

from interlace.connectors.conformance import Rule, Script, ScriptedConnector
from interlace.engine import events
from interlace.engine.config import EngineConfig
from interlace.engine.connector_metrics import WINDOW_S, ConnectorMetrics
from interlace.engine.errors import ConnectorError
from interlace.engine.events import EventBus
from interlace.engine.kv_connector import KVConnectorRole
from interlace.engine.kv_connector_stats import (
    CountingStats,
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from interlace.engine.kv_events import (
    MEDIUM_CPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CountedKVEvents,
    KVCacheEvent,
    KVConnectorKVEvents,
)


@dataclasses.dataclass
class Steps(CountingStats):
    """Numbers of these tests."""


class StepsExporter(KVConnectorPromMetrics):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        counter = self._counter_cls("worker_steps", "Steps seen", self._labelnames)
        self._steps = {i: counter.labels(*v) for i, v in self.per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._steps[engine_idx].inc(transfer_stats_data.get("worker_steps", 0))


class Talkative(ScriptedConnector):
    """Counts its calls, and tells of blocks as `news` has it."""

    news: list[KVCacheEvent]
    worker_news: list[KVCacheEvent]
    mine: Steps

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.news, self.worker_news, self.mine = [], [], Steps()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        name = "worker_steps" if self.role is KVConnectorRole.WORKER else "applied_steps"
        self.mine.data = {name: 1}  # the same object each time
        return self.mine

    def get_kv_connector_kv_cache_events(self) -> KVConnectorKVEvents | None:
        news, self.worker_news = self.worker_news, []
        return CountedKVEvents(news) if news else None

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        if connector_output.kv_cache_events is not None:
            self.news += connector_output.kv_cache_events.get_all_events()

    def take_events(self) -> Iterable[KVCacheEvent]:
        news, self.news = self.news, []
        return news

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return Steps(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: EngineConfig,
        metric_types: Mapping[type[Any], Callable[..., Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return StepsExporter(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class _Told:
    """A stepper over a `Talkative` connector, its metrics, and the events that a reader gets."""

    def __init__(self, kind: type[Talkative] = Talkative) -> None:
        scheduler_side, worker_side = scripted_sides(Script(default=NOTHING), kind=kind)
        assert isinstance(scheduler_side, Talkative)
        assert isinstance(worker_side, Talkative)
        self.scheduler_side, self.worker_side = scheduler_side, worker_side
        self.clock = ManualClock()
        self.bus = EventBus()
        self.stream = self.bus.subscribe()
        self.metrics = ConnectorMetrics(scheduler_side, EngineConfig(), self.clock)
        scheduler = make_scheduler(connector=scheduler_side, events=self.bus, metrics=self.metrics)
        self.stepper = Stepper(scheduler, worker_side)

    def step(self) -> None:
        self.stepper.add([1, 2, 3], max_tokens=1)
        launched(self.stepper)
        self.stepper.apply()

    async def events(self) -> list[events.Event]:
        self.stream.close()
        of_blocks = (events.BlockStored, events.BlockRemoved, events.BlockCleared)
        return [event async for event in self.stream if isinstance(event, of_blocks)]


def test_statistics_of_both_sides_are_added_up() -> None:
    told = _Told()
    assert told.metrics.reduce() == {}
    for _ in range(3):
        told.step()
    assert told.metrics.reduce() == {"worker_steps": 3, "applied_steps": 3}


def test_statistics_are_of_late_and_do_not_grow_for_ever() -> None:
    told = _Told()
    told.step()
    told.clock.now_s = WINDOW_S
    assert told.metrics.reduce() == {"worker_steps": 1, "applied_steps": 1}
    told.step()
    told.step()
    assert told.metrics.reduce() == {"worker_steps": 2, "applied_steps": 2}


def test_the_exporter_keeps_totals_in_a_registry_of_the_engines_own() -> None:
    one, other = _Told(), _Told()
    for _ in range(2):
        one.step()
    assert b'worker_steps_total{engine="0"} 2.0' in generate_latest(one.metrics.registry)
    assert b'worker_steps_total{engine="0"} 0.0' in generate_latest(other.metrics.registry)


async def test_events_of_a_connector_reach_the_engines_readers() -> None:
    told = _Told()
    told.scheduler_side.news = [
        BlockStored([b"a", b"b"], b"root", [1, 2, 3, 4], 2, medium=MEDIUM_CPU),
        BlockStored([b"c"], None, [], 0, medium="elsewhere"),
        BlockRemoved([b"a", b"c"], medium=MEDIUM_CPU),
        AllBlocksCleared(),
    ]
    told.step()
    told.step()  # each is told once
    assert await told.events() == [
        events.BlockStored(0.0, None, b"a", b"root", (1, 2), MEDIUM_CPU),
        events.BlockStored(0.0, None, b"b", b"a", (3, 4), MEDIUM_CPU),
        events.BlockStored(0.0, None, b"c", None, (), "elsewhere"),
        events.BlockRemoved(0.0, None, b"a", MEDIUM_CPU),
        events.BlockRemoved(0.0, None, b"c", MEDIUM_CPU),
        events.BlockCleared(0.0, None),
    ]


async def test_events_of_a_worker_come_by_way_of_the_scheduler_side() -> None:
    told = _Told()
    told.worker_side.worker_news = [BlockRemoved([b"lost"], medium=MEDIUM_CPU)]
    told.step()
    assert await told.events() == [events.BlockRemoved(0.0, None, b"lost", MEDIUM_CPU)]


class WrongStats(Talkative):
    def get_kv_connector_stats(self) -> Any:
        return {"worker_steps": 1}


class WrongEvents(Talkative):
    def take_events(self) -> Any:
        return ["stored"]


class WrongWorkerEvents(Talkative):
    def get_kv_connector_kv_cache_events(self) -> Any:
        return [AllBlocksCleared()]


class WrongWorkerMeta(Talkative):
    def build_connector_worker_meta(self) -> Any:
        return {"copied": 1}


class WrongExporter(Talkative):
    @classmethod
    def build_prom_metrics(cls, *args: Any) -> Any:
        raise KeyError("engine")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (WrongStats, "get_kv_connector_stats answered .* must be a KVConnectorStats or None"),
        (WrongEvents, "take_events gave 'stored', but they must be of interlace.engine.kv_events"),
        (WrongWorkerEvents, "kv_cache_events answered .* must be a KVConnectorKVEvents or None"),
        (WrongWorkerMeta, "worker_meta answered .* must be a KVConnectorWorkerMetadata or None"),
        (WrongExporter, "WrongExporter.build_prom_metrics raised KeyError: 'engine'"),
    ],
)
def test_news_of_a_wrong_kind_are_refused_by_name(kind: type[Talkative], message: str) -> None:
    with pytest.raises(ConnectorError, match=message):
        _Told(kind).step()


def test_counts_that_are_no_numbers_are_refused() -> None:
    class Unsure(ScriptedConnector):
        def get_finished_count(self) -> Any:
            return "all"

    sides = scripted_sides(Script(), kind=Unsure)
    with pytest.raises(ConnectorError, match="get_finished_count answered 'all'"):
        Stepper(make_scheduler(connector=sides[0]), sides[1])


def test_a_connector_may_hold_blocks_of_the_pool() -> None:
    """Nothing is handed out that it holds, and the engine waits rather than fails."""
    stepper, sides = connected_stepper(Script(default=NOTHING), num_blocks=6)
    pool = stepper.scheduler.kv_cache.pool
    held = pool.get_new_blocks(2)
    pool.touch(held[:1])
    assert pool.get_num_free_blocks() == 4
    request = stepper.add(list(range(18)), max_tokens=2)  # five blocks
    for _ in range(3):
        stepper.step()
    assert not request.is_finished
    assert stepper.scheduler.awaits_connector
    pool.free_blocks(held[:1])
    pool.free_blocks(held)
    stepper.run()
    assert len(stepper.outputs[request.request_id]) == 2
    stepper.assert_idle()
    assert sides[0].is_idle


def test_statistics_of_a_connector_survive_json() -> None:
    """`snapshot()` is for viewers in other processes too."""
    told = _Told()
    told.step()
    assert json.loads(json.dumps(told.metrics.reduce())) == told.metrics.reduce()


def test_metric_types_are_those_of_prometheus() -> None:
    kinds: list[type[Any]] = []

    class Curious(Talkative):
        @classmethod
        def build_prom_metrics(cls, vllm_config: Any, metric_types: Any, *rest: Any) -> None:
            kinds.extend(metric_types)

    _Told(Curious).step()
    assert Counter in kinds
    assert {kind.__name__ for kind in kinds} == {"Counter", "Gauge", "Histogram"}


def test_held_and_awaited_requests_are_told_apart_from_the_pool() -> None:
    """A held request frees its blocks by itself: nobody has to be asked for more."""
    script = Script(default=Rule(answers=((0, False),), hold=True, send_delay=3))
    stepper, _ = connected_stepper(script, num_blocks=4)
    first, second = stepper.add([1] * 14, max_tokens=1), stepper.add([2] * 14, max_tokens=1)
    stepper.run()
    assert first.is_finished
    assert second.is_finished
    stepper.assert_idle()
