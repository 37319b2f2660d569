"""What a meter tells of a request, and engines that are opened once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

import pytest

from interlace.bench.engine_arm import EngineArm
from interlace.bench.overlap.connector import METER, MeteredPipelineConnector
from interlace.bench.overlap.engines import Engines, Kind, OpenEngine
from interlace.bench.overlap.meter import Meter
from interlace.bench.overlap.pairs import Comparison, in_pairs
from interlace.bench.timeline import Sample
from interlace.bench.workload import Work
from interlace.connectors.pipeline.worker_times import ClockStopwatch, TransferStats
from interlace.engine.clock import MonotonicClock
from interlace.engine.config import EngineConfig, KVTransferConfig
from interlace.engine.errors import ConfigError
from interlace.engine.kv_connector import KVConnectorRole
from interlace.layers.checkpoint.loading import Silent


class FakeTransfer(NamedTuple):
    stats: TransferStats


def transfer(seconds: float | None) -> FakeTransfer:
    return FakeTransfer(TransferStats(frozenset(), 4, 1000, seconds))


def test_from_the_first_thing_to_the_last_sampling() -> None:
    moments = iter([1.0, 2.0, 3.0, 9.0])
    meter = Meter()
    meter.use(ClockStopwatch(lambda: next(moments)))
    meter.begin()
    meter.note_begin(0)
    meter.note_begin(40)
    meter.note_load(transfer(0.5), num_runs=2, submit_s=lambda: 0.01)
    meter.note_load(transfer(None), num_runs=1, submit_s=lambda: 0.01)
    meter.note_end()
    meter.note_end()
    device_s, (load,), (step,) = meter.take()
    assert device_s == 8.0
    assert step == (40, 1.0)
    assert load == (1000, 0.5, 0.01, 4, 2, 0.0)
    assert not meter.is_on
    meter.begin()
    assert meter.take() == (None, (), ())


def test_a_meter_must_be_given() -> None:
    config = EngineConfig(kv_transfer_config=KVTransferConfig(kv_connector="x", kv_role="kv_both"))
    with pytest.raises(ConfigError, match=f"needs a Meter as kv_connector_extra_config.'{METER}'"):
        MeteredPipelineConnector(config, KVConnectorRole.SCHEDULER)


class NoEngine:
    """Nothing is asked of it."""


async def test_engines_are_opened_once_and_closed_at_the_end() -> None:
    log: list[str] = []

    @asynccontextmanager
    async def open_kind(kind: Kind) -> AsyncIterator[OpenEngine]:
        log.append(f"open {kind.name}")
        arm = EngineArm(NoEngine(), MonotonicClock())  # type: ignore[arg-type]
        yield OpenEngine(NoEngine(), arm, Meter())  # type: ignore[arg-type]
        log.append(f"close {kind.name}")

    async with AsyncExitStack() as stack:
        engines = Engines(stack, open_kind)
        first = await engines.get(Kind.NONE)
        await engines.get(Kind.PIPELINE)
        assert await engines.get(Kind.NONE) is first
    assert log == ["open NONE", "open PIPELINE", "close PIPELINE", "close NONE"]


class SteadyArm:
    """Takes as long as said, one run after the other."""

    def __init__(self, seconds: list[float]) -> None:
        self.name = "steady"
        self._seconds = seconds
        self.num_runs = 0
        self.num_forgets = 0

    def forget(self) -> None:
        self.num_forgets += 1

    async def run(self, work: Work) -> Sample:
        taken = self._seconds[self.num_runs % len(self._seconds)]
        self.num_runs += 1
        return Sample(1, 1, taken, 0.0, 0, 0)


@pytest.mark.parametrize(
    ("seconds", "num_pairs"), [([1.0], 2 * 3), ([1.0, 2.0, 1.5, 0.7, 3.0], 4 * 3)]
)
async def test_pairs_go_on_until_the_noise_is_small(seconds: list[float], num_pairs: int) -> None:
    base, other = SteadyArm([1.0]), SteadyArm(seconds)
    what = Comparison(
        "what", lambda: Work(((1,),), 1), lambda s: s.first_token_s, forgets=True, at_most=1.01
    )
    row, (check,) = await in_pairs(what, (base, other), 3, Silent())
    assert len(row.figures["ratio"].samples) == num_pairs
    assert base.num_runs == other.num_runs == other.num_forgets == num_pairs + 1
    assert check.value == row.figures["ratio"].median
