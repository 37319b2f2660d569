"""Rounds of a grid: turns, prefixes, what is kept when it is stopped. Engines of a known speed, and
real ones over a tiny model."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from bench_kit import CountingProgress, tiny_dummy

from interlace.bench.grid import session
from interlace.bench.grid.engines import Measured
from interlace.bench.grid.plan import order_of
from interlace.bench.grid.points import Point
from interlace.bench.grid.record import GridRun
from interlace.bench.grid.session import GridRunner, empty_run, prepare_grid
from interlace.bench.grid.spec import parse_grid
from interlace.bench.timeline import Sample
from interlace.bench.workload import Work, WorkSource
from interlace.engine.clock import MonotonicClock
from interlace.engine.errors import ConfigError, ModelError
from interlace.layers.checkpoint.loading import Silent


class LoggingArm:
    """Takes no time, and writes down what it is asked for. Stands still at its `stop`th run."""

    def __init__(self, log: list[tuple[str, int, int]], stop: int | None = None) -> None:
        self._log = log
        self._stop = stop

    async def keep(self, prefix: Work) -> None:
        self._log.append(("keep", prefix.prompt_tokens, prefix.batch_size))

    async def run(self, point: Point, prefix: Work | None, source: WorkSource) -> Measured:
        assert (0 if prefix is None else prefix.prompt_tokens) == point.prefix
        if len(self._log) == self._stop:
            await asyncio.sleep(60)
        self._log.append((str(point.load_mode), point.prefix, point.batch))
        sample = Sample(point.batch, point.prefix + point.new, 0.5, 0.0, 0, 0)
        return Measured(sample)


@contextlib.contextmanager
def runner_of(
    text: str, folder: Path, saved: list[GridRun], progress: CountingProgress | None = None
) -> Iterator[GridRunner]:
    model = tiny_dummy(folder)
    text = text.replace("[grid]", f'[grid]\nmodel = "{model}"\ndevice = "cpu"')
    spec = parse_grid(text.encode(), "my.toml")
    files = folder / "files"
    files.mkdir()
    with contextlib.closing(prepare_grid(spec, files, Silent())) as prepared:
        empty = empty_run(prepared, file="my.toml", digest="0", started="now", version="0")
        yield GridRunner(
            prepared, empty, MonotonicClock(), progress or CountingProgress(), saved.append
        )


def use(monkeypatch: pytest.MonkeyPatch, arm: LoggingArm) -> None:
    @contextlib.asynccontextmanager
    async def open_arm(*args: Any) -> AsyncIterator[LoggingArm]:
        yield arm

    monkeypatch.setattr(session, "open_arm", open_arm)


async def within(seconds: float, runner: GridRunner) -> None:
    async with asyncio.timeout(seconds):
        await runner.measure()


TURNS = """
repeats = 2
seed = 4
[grid]
connector = "PipelineConnector"
load_mode = ["recompute", "bulk"]
prefix = [32, 64]
"""


def test_arms_take_turns_in_the_seeds_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[tuple[str, int, int]] = []
    saved: list[GridRun] = []
    progress = CountingProgress()
    use(monkeypatch, LoggingArm(log))
    with runner_of(TURNS, tmp_path, saved, progress) as runner:
        asyncio.run(runner.measure())
    arms = [("recompute", 32, 1), ("recompute", 64, 1), ("bulk", 32, 1), ("bulk", 64, 1)]
    expected = [("keep", 32, 1), ("keep", 64, 1)]
    for number in range(3):
        expected += [arms[index] for index in order_of(4, number, 4)]
    assert log == expected
    assert [run.rounds for run in saved] == [0, 1, 2]
    assert [run.is_partial for run in saved] == [True, True, False]
    assert runner.run == saved[-1]
    assert (progress.tasks, progress.done) == ([("4 arms", 14)], 14)
    places = [[s.place for s in arm.samples] for arm in runner.run.arms]
    assert sorted(p for arm in places for p in arm) == sorted([0, 1, 2, 3] * 3)


def test_what_was_done_is_kept_when_it_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[tuple[str, int, int]] = []
    saved: list[GridRun] = []
    use(monkeypatch, LoggingArm(log, stop=2 + 4 + 4 + 1))  # in the second measured round
    with runner_of(TURNS, tmp_path, saved) as runner:
        with pytest.raises(TimeoutError):
            asyncio.run(within(0.5, runner))
        run = runner.run
    assert run.is_partial
    assert run.rounds == 1
    assert sum(len(arm.samples) for arm in run.arms) == 9
    assert json.loads(run.to_json())["is_partial"] is True


REAL = """
repeats = 1
[grid]
connector = ["none", "PipelineConnector", "files"]
load_mode = ["cached", "recompute", "bulk", "layerwise", "hybrid", "auto"]
prefix = 64
new = 8
output = 3
delay_ms = [0, 2]
[connectors.files]
kv_connector = "ExampleConnector"
kv_role = "kv_both"
kv_connector_extra_config = { shared_storage_path = "{scratch}" }
[[points]]
connector = "PipelineConnector"
load_mode = "layerwise"
store = "file"
prefix = 32
batch = 2
delay_ms = 0
[[points]]
connector = "none"
load_mode = "auto"
prefix = 0
delay_ms = 0
"""


def test_each_way_brings_what_it_says(tmp_path: Path) -> None:
    with runner_of(REAL, tmp_path, []) as runner:
        asyncio.run(runner.measure())
        run = runner.run
    found = {}
    for arm in run.arms:
        (one,) = (sample for sample in arm.samples if sample.round)
        key = (arm.point["connector"], arm.point["load_mode"], arm.point["delay_ms"])
        found[(*key, arm.point["prefix"])] = one
        if arm.point["output"] == 3:
            assert one.step_s is not None
            assert one.decode_tokens_per_s is not None
    tokens = {
        key: (one.cached_tokens, one.loaded_tokens, one.computed_tokens)
        for key, one in found.items()
        if key[1] not in ("hybrid", "auto")
    }
    pipeline = "PipelineConnector"
    assert tokens == {
        ("none", "cached", None, 64): (64, 0, 8),
        ("none", "recompute", None, 64): (0, 0, 72),
        (pipeline, "cached", None, 64): (64, 0, 8),
        (pipeline, "recompute", None, 64): (0, 0, 72),
        (pipeline, "bulk", 0, 64): (0, 64, 8),
        (pipeline, "bulk", 2, 64): (0, 64, 8),
        (pipeline, "layerwise", 0, 64): (0, 64, 8),
        (pipeline, "layerwise", 2, 64): (0, 64, 8),
        ("files", "cached", None, 64): (64, 0, 8),
        ("files", "own", None, 64): (0, 64, 8),
        (pipeline, "layerwise", 0, 32): (0, 64, 16),
        ("none", None, None, 0): (0, 0, 8),
    }
    for mode in ("bulk", "layerwise"):
        slow = found[pipeline, mode, 2, 64]
        assert slow.load_s is not None
        assert slow.load_s >= 4 * 0.002, "four blocks, each two milliseconds late"
        assert slow.first_token_s >= 0.008
        assert slow.device_s is not None
        assert slow.load_bytes == found[pipeline, mode, 0, 64].load_bytes
    assert found["none", "recompute", None, 64].device_s is None


def test_transformers_takes_its_turn(tmp_path: Path) -> None:
    text = '[grid]\nengine = ["interlace", "transformers"]\nnew = 12\noutput = 3'
    with runner_of("repeats = 1\n" + text, tmp_path, []) as runner:
        asyncio.run(runner.measure())
        theirs = runner.run.arms[1]
    assert theirs.name == "transformers"
    assert theirs.samples[1].computed_tokens == 12
    assert theirs.measured("step_s")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("prefix = 512", "prefix = 512, new = 16.*do not fit into 512.*choose smaller"),
        (
            'connector = "PipelineConnector"\nprefix = 16\ngroup_size = 3',
            "group_size = 3: .* has 2 layers; give at most so many",
        ),
        ('graph_mode = "FULL"', "needs a CUDA device; leave it out"),
        ('connector = "x"\n[connectors.x]\nkv_connector = "No"\nkv_role = "kv_both"', "No"),
        (
            (
                'connector = "x"\n[connectors.x]\nkv_connector = "PipelineConnector"\n'
                'kv_role = "kv_consumer"'
            ),
            "connectors.x.kv_role = 'kv_consumer'.*give kv_both",
        ),
        (
            (
                'connector = "x"\n[connectors.x]\nkv_connector = "PipelineConnector"\n'
                'kv_role = "kv_both"\nkv_connector_extra_config = { hostbytes = 5 }'
            ),
            "Did you mean 'host_bytes'",
        ),
    ],
)
def test_what_no_engine_takes_is_refused_before_a_model_is_loaded(
    lines: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(session, "prepare_on", fail)
    with pytest.raises(ConfigError, match=words), runner_of(f"[grid]\n{lines}", tmp_path, []):
        pass


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    spec = parse_grid(b'[grid]\nmodel = "no such"\ndevice = "cpu"', "my.toml")
    with pytest.raises(ModelError, match="there is no model 'no such'"):
        prepare_grid(spec, tmp_path, Silent())
