"""The KV benchmarks on arms of a known speed that keep what a real engine would keep."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from interlace.bench import kv_experiments
from interlace.bench.kv_experiments import KVBench, example_connector
from interlace.bench.paired import CachingArm
from interlace.bench.scratch import scratch_folder
from interlace.bench.timeline import Sample
from interlace.bench.workload import Work, WorkSource
from interlace.engine.config import KVTransferConfig
from interlace.engine.errors import ConfigError, InterlaceError
from interlace.layers.checkpoint.loading import Silent

Prompts = tuple[tuple[int, ...], ...]


@dataclasses.dataclass
class Speeds:
    """Seconds of what the fakes do."""

    prefill: float = 2.0
    load: float = 0.1
    saving: float = 0.04
    step: float = 0.05
    idle_step: float = 0.0004
    saving_step: float = 0.0006
    """More than an idle one, while an answer is saved."""


class FakeArm:
    """Computes a prompt, finds it on its device, or in its folder if it has a connector."""

    def __init__(self, name: str, config: KVTransferConfig | None, world: FakeWorld) -> None:
        self.name = name
        self._config = config
        self._world = world
        self._device: set[Prompts] = set()

    def forget(self) -> None:
        self._device.clear()

    async def run(self, work: Work) -> Sample:
        self._world.runs.append(self.name)
        speeds, config = self._world.speeds, self._config
        folder = "" if config is None else config.kv_connector_extra_config["shared_storage_path"]
        seconds = speeds.prefill
        cached = loaded = 0
        if work.prompts in self._device:
            cached = work.prompt_tokens - 1
        elif config is not None and (folder, work.prompts) in self._world.files:
            loaded, seconds = work.prompt_tokens - 16, speeds.load
        elif config is not None and config.is_kv_producer and self._world.saves:
            self._world.files.add((folder, work.prompts))
            seconds += speeds.saving
        self._device.add(work.prompts)
        steps = work.output_tokens - 1
        step_s = speeds.step
        if config is not None:
            step_s += speeds.idle_step + (speeds.saving_step if config.is_kv_producer else 0.0)
        return Sample(
            1,
            work.prompt_tokens,
            seconds,
            steps * step_s,
            steps,
            steps,
            median_step_s=step_s,
            cached_tokens=cached,
            loaded_tokens=loaded,
            idle_s=seconds + 0.01,
            worst_lag_s=0.002,
        )


class FakeWorld:
    """Opens fake arms over one disk, and writes down what happens."""

    def __init__(self, folder: Path, speeds: Speeds | None = None, *, saves: bool = True) -> None:
        self.speeds = speeds or Speeds()
        self.saves = saves
        self.runs: list[str] = []
        self.files: set[tuple[str, Prompts]] = set()
        self.configs: dict[str, KVTransferConfig | None] = {}
        self.open_arms = 0
        source = WorkSource(vocab_size=100, seed=0)
        self.bench = KVBench(self._open, folder, source, Silent())

    def files_left(self) -> list[Path]:
        return list(self.bench.folder.iterdir())

    @asynccontextmanager
    async def _open(self, name: str, config: KVTransferConfig | None) -> AsyncIterator[CachingArm]:
        self.configs[name] = config
        self.open_arms += 1
        yield FakeArm(name, config, self)
        self.open_arms -= 1


async def test_reload_compares_computed_with_both_ways_of_loading(tmp_path: Path) -> None:
    world = FakeWorld(tmp_path)
    rows, checks = await kv_experiments.reload(world.bench, 960, 3)
    assert [row.case for row in rows] == ["computed", "loaded, sync", "loaded, async"]
    assert world.runs == ["computed", *["loaded, sync"] * 2, *["loaded, async"] * 2] * 4
    assert rows[0].figures["first token ms"].samples == (2000.0,) * 3
    for row in rows[1:]:
        assert row.figures["first token ms"].samples == (100.0,) * 3
        assert row.figures["times sooner"].samples == (20.0,) * 3
        assert row.figures["loaded tokens"].median == 944
    assert [(c.value, c.at_least, c.met) for c in checks] == [(20.0, 8.0, True)] * 2
    extra = [c.kv_connector_extra_config for c in world.configs.values() if c is not None]
    assert [e.get("load_async", False) for e in extra] == [False, True]
    assert world.open_arms == 0
    assert not world.files_left()


async def test_a_prompt_that_does_not_come_back_is_an_error(tmp_path: Path) -> None:
    for measure in (kv_experiments.reload, kv_experiments.saving):
        world = FakeWorld(tmp_path, saves=False)
        with pytest.raises(InterlaceError, match="only 0 of 960 prompt tokens came from files"):
            await measure(world.bench, 960, 1)
        assert not world.files_left()


async def test_saving_is_a_cost_of_prefill(tmp_path: Path) -> None:
    world = FakeWorld(tmp_path)
    rows, checks = await kv_experiments.saving(world.bench, 960, 2)
    assert [row.case for row in rows] == ["prefill", "prefill, saving"]
    assert rows[1].figures["cost %"].median == pytest.approx(2.0)
    assert rows[1].figures["until idle ms"].median == pytest.approx(2050.0)
    assert [(c.value, c.at_most) for c in checks] == [(pytest.approx(2.0), 3.0), (0.0, 3.0)]
    slow = FakeWorld(tmp_path, Speeds(saving=0.08))
    _, (cost, _) = await kv_experiments.saving(slow.bench, 960, 2)
    assert not cost.met


async def test_an_idle_connector_is_a_cost_of_decoding(tmp_path: Path) -> None:
    world = FakeWorld(tmp_path)
    rows, checks = await kv_experiments.idle(world.bench, 2)
    config = world.configs["decode, idle connector"]
    assert config is not None
    assert config.kv_role == "kv_consumer"
    assert rows[0].figures["ms/step"].median == pytest.approx(50.0)
    assert rows[0].figures["tokens/s"].median == pytest.approx(20.0)
    assert rows[1].figures["cost %"].median == pytest.approx(0.8)
    assert [c.at_most for c in checks] == [1.0, 1.0]
    assert checks[0].met
    slow = FakeWorld(tmp_path, Speeds(idle_step=0.001))
    assert not (await kv_experiments.idle(slow.bench, 2))[1][0].met


async def test_saving_an_answer_is_shown_beside_decoding_without_a_bar(tmp_path: Path) -> None:
    world = FakeWorld(tmp_path)
    rows, checks = await kv_experiments.generating(world.bench)
    assert [row.case for row in rows] == ["long decode", "long decode, saving"]
    config = world.configs["long decode, saving"]
    assert config is not None
    assert config.kv_role == "kv_both"
    assert rows[1].figures["cost %"].median == pytest.approx(2.0)
    assert rows[1].figures["ms/step"].median == pytest.approx(51.0)
    assert checks == ()
    assert len(world.runs) == 2 * 5, "and a pair to warm up"
    assert not world.files_left()


async def test_one_of_them_alone(tmp_path: Path) -> None:
    world = FakeWorld(tmp_path)
    rows, checks = await kv_experiments.kv(world.bench, 64, 1, kv_experiments.Experiment.IDLE)
    assert (len(rows), len(checks)) == (2, 2)
    assert not world.files_left()


async def test_all_of_it_in_one_report(tmp_path: Path) -> None:
    rows, checks = await kv_experiments.kv(FakeWorld(tmp_path).bench, 64, 1)
    assert (len(rows), len(checks)) == (9, 6)
    assert len({check.name for check in checks}) == 6
    assert all(check.met for check in checks)


def test_files_lie_in_a_folder_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with scratch_folder(str(tmp_path), "--kv-dir") as folder:
        assert folder.parent == tmp_path
        (folder / "kv").mkdir()
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]
    with scratch_folder(None, "--kv-dir") as folder:
        assert folder.is_dir()
    for parent in (tmp_path / "none", tmp_path / "mine", Path("nul\0")):
        with (
            pytest.raises(ConfigError, match="by --path"),
            scratch_folder(str(parent), "--path"),
        ):
            pass


def test_the_connector_s_options_are_its_own() -> None:
    config = example_connector(Path("d"), "kv_consumer", load_async=True)
    assert (config.kv_connector, config.kv_role) == ("ExampleConnector", "kv_consumer")
    assert config.kv_connector_extra_config == {"shared_storage_path": "d", "load_async": True}
