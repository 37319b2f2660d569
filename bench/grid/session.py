"""Loads the models of a grid, opens its engines, runs its rounds. Arms take turns in each round."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

from interlace.bench.grid.axes import TRANSFORMERS
from interlace.bench.grid.engines import GridArm, Measured, check_engine, open_arm
from interlace.bench.grid.plan import (
    EngineKey,
    ModelKey,
    Room,
    engine_key,
    engines_of,
    models_of,
    names_of,
    order_of,
)
from interlace.bench.grid.points import Point
from interlace.bench.grid.record import ArmRun, GridRun, GridSample, with_samples
from interlace.bench.grid.spec import GridSpec
from interlace.bench.session import Prepared, prepare_on
from interlace.bench.settings import Settings, pick_device
from interlace.bench.shown import SharedMetrics
from interlace.bench.workload import Work, WorkSource
from interlace.engine.device_thread import DeviceThread, finish_despite_cancel
from interlace.engine.errors import ConfigError
from interlace.engine.ports import Clock, Progress

Saved = Callable[[GridRun], None]
"""Gets the run when each round is whole. Called in a thread: it may block."""


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedGrid:
    """The models of all arms, on the one thread that computes."""

    spec: GridSpec
    models: Mapping[ModelKey, Prepared]
    device: DeviceThread
    folder: Path
    """Empty; for files."""

    def of(self, point: Point) -> Prepared:
        """The model of one arm."""
        return self.models[engine_key(self.spec, point).model]

    @property
    def machine(self) -> dict[str, str | int | None]:
        """Facts; of the GPU too, if one of the arms runs there."""
        facts: dict[str, str | int | None] = {}
        for prepared in self.models.values():
            new = {k: v for k, v in prepared.machine.items() if isinstance(v, str | int | None)}
            facts = {**facts, **new}
        return facts

    def close(self) -> None:
        """End the thread; call it when nothing runs on it."""
        self.device.close()


def prepare_grid(
    spec: GridSpec, folder: Path, progress: Progress, metrics: SharedMetrics | None = None
) -> PreparedGrid:
    """Load every model once. Blocks: no loop yet. What no engine takes is refused before that.

    Raises: `ConfigError`, `ModelError`.
    """
    device = DeviceThread("bench-device")
    try:
        models = device.call(_load_all, spec, folder, progress, device, metrics)
    except BaseException:
        device.close()
        raise
    return PreparedGrid(spec, models, device, folder)


def engine_folder(number: int) -> str:
    """Of one of the grid's engines, in their order."""
    return f"engine-{number}"


def _load_all(
    spec: GridSpec,
    folder: Path,
    progress: Progress,
    device: DeviceThread,
    metrics: SharedMetrics | None,
) -> dict[ModelKey, Prepared]:
    """Device thread."""
    picked = {
        key: pick_device(_settings(key, points), progress)
        for key, points in models_of(spec).items()
    }
    for key, settings in picked.items():
        _check_model(settings, models_of(spec)[key], progress)
    for number, (engine, points) in enumerate(engines_of(spec).items()):
        own = folder / engine_folder(number)
        own.mkdir()
        check_engine(picked[engine.model], spec, engine, Room.of(points), own)
    return {
        key: prepare_on(settings, progress, device, metrics) for key, settings in picked.items()
    }


def _settings(key: ModelKey, points: Sequence[Point]) -> Settings:
    return Settings(
        key.model,
        device=key.device,
        dtype=key.dtype,
        against_transformers=any(point.engine == TRANSFORMERS for point in points),
        request_tokens=max(point.request_tokens for point in points),
    )


def _check_model(settings: Settings, points: Sequence[Point], progress: Progress) -> None:
    """Raises: `ConfigError` for what no request of the model can be; `ModelError`."""
    from interlace.layers.checkpoint.resolve import open_checkpoint

    architecture = open_checkpoint(settings.model, progress).architecture
    limit = settings.max_model_len or architecture.max_position
    longest = max(points, key=lambda point: point.request_tokens)
    if longest.request_tokens > limit:
        raise ConfigError(
            f"prefix = {longest.prefix}, new = {longest.new}, output = {longest.output}: requests"
            f" of {longest.request_tokens} tokens do not fit into {limit}, the limit of"
            f" {settings.model}: choose smaller ones, or another model."
        )
    groups = max((point.group_size or 0 for point in points), default=0)
    if groups > architecture.num_layers:
        raise ConfigError(
            f"group_size = {groups}: {settings.model} has {architecture.num_layers} layers; give at"
            " most so many."
        )


class Kept(NamedTuple):
    """Prefixes that arms share."""

    batch: int
    prefix: int


class GridRunner:
    """Runs the rounds, and holds what was measured so far, whatever happens. Event loop."""

    def __init__(
        self, prepared: PreparedGrid, empty: GridRun, clock: Clock, progress: Progress, saved: Saved
    ) -> None:
        """`empty` is the run without samples: see `empty_run`."""
        self._prepared = prepared
        self._spec = prepared.spec
        self._empty = empty
        self._clock = clock
        self._progress = progress
        self._saved = saved
        self._samples: list[list[GridSample]] = [[] for _ in self._spec.points]
        self._rounds = 0

    @property
    def run(self) -> GridRun:
        """What there is by now. Any thread, while no round is in progress."""
        return with_samples(self._empty, self._samples, self._rounds)

    async def measure(self) -> None:
        """Open the engines, keep the prefixes, run all rounds.

        Raises: what the engines raise. Cancelling stops after the request in progress; `run` has
        what was done.
        """
        spec, engines = self._spec, engines_of(self._spec)
        sources = {
            key: WorkSource(vocab_size=one.loaded.architecture.vocab_size, seed=spec.seed)
            for key, one in self._prepared.models.items()
        }
        prefixes = {
            (key.model, kept): sources[key.model].make(*kept, 1)
            for key, points in engines.items()
            for kept in _kept_by(points)
        }
        num_kept = sum(len(_kept_by(points)) for points in engines.values())
        total = num_kept + len(spec.points) * (spec.repeats + 1)
        async with AsyncExitStack() as stack:
            arms = await self._open(stack, engines)
            with self._progress.task(f"{len(spec.points)} arms", total) as advance:
                for key, points in engines.items():
                    for kept in _kept_by(points):
                        await arms[key].keep(prefixes[key.model, kept])
                        advance(1)
                for number in range(spec.repeats + 1):
                    await self._round(number, arms, prefixes, sources, advance)
                    self._rounds = number
                    await _in_thread(self._saved, self.run)

    async def _open(
        self, stack: AsyncExitStack, engines: Mapping[EngineKey, Sequence[Point]]
    ) -> dict[EngineKey, GridArm]:
        found = {}
        for number, (key, points) in enumerate(engines.items()):
            folder = self._prepared.folder / engine_folder(number)
            found[key] = await stack.enter_async_context(
                open_arm(
                    self._prepared.models[key.model],
                    self._spec,
                    key,
                    Room.of(points),
                    folder,
                    self._clock,
                    self._progress,
                )
            )
        return found

    async def _round(
        self,
        number: int,
        arms: Mapping[EngineKey, GridArm],
        prefixes: Mapping[tuple[ModelKey, Kept], Work],
        sources: Mapping[ModelKey, WorkSource],
        advance: Callable[[float], None],
    ) -> None:
        points = self._spec.points
        for place, index in enumerate(order_of(self._spec.seed, number, len(points))):
            point = points[index]
            key = engine_key(self._spec, point)
            prefix = prefixes.get((key.model, Kept(point.batch, point.prefix)))
            measured = await arms[key].run(point, prefix, sources[key.model])
            self._samples[index].append(sample_of_round(number, place, measured))
            advance(1)


def _kept_by(points: Sequence[Point]) -> tuple[Kept, ...]:
    """Different ones, of arms that have a prefix."""
    return tuple(dict.fromkeys(Kept(p.batch, p.prefix) for p in points if p.prefix))


async def _in_thread(function: Saved, run: GridRun) -> None:
    """Call it beside the loop. Cancelling: it has returned before that is told."""
    loop = asyncio.get_running_loop()
    await finish_despite_cancel(loop.run_in_executor(None, function, run))


def sample_of_round(number: int, place: int, measured: Measured) -> GridSample:
    """What is kept of one run."""
    sample, loads = measured.sample, measured.loads
    decodes = sample.decode_steps > 0
    prompts = sample.batch_size * sample.prompt_tokens
    return GridSample(
        round=number,
        place=place,
        first_token_s=sample.first_token_s,
        step_s=sample.median_step_s if decodes else None,
        decode_tokens_per_s=sample.decode_tokens_per_s if decodes else None,
        cached_tokens=sample.cached_tokens,
        loaded_tokens=sample.loaded_tokens,
        computed_tokens=prompts - sample.cached_tokens - sample.loaded_tokens,
        device_s=measured.device_s,
        load_s=None if loads is None else sum(load.whole_s for load in loads),
        load_bytes=None if loads is None else sum(load.num_bytes for load in loads),
        worst_lag_s=sample.worst_lag_s,
    )


def empty_run(
    prepared: PreparedGrid, *, file: str, digest: str, started: str, version: str
) -> GridRun:
    """The run before its first sample."""
    spec = prepared.spec
    names = names_of(spec.points)
    arms = []
    for name, point in zip(names, spec.points, strict=True):
        one = prepared.of(point)
        resolved = {"device": one.settings.device, "dtype": one.dtype}
        arms.append(ArmRun(name, point.facts(), resolved))
    return GridRun(
        title=spec.title,
        file=file,
        digest=digest,
        started=started,
        version=version,
        seed=spec.seed,
        repeats=spec.repeats,
        rounds=0,
        grid=spec.grid,
        machine=prepared.machine,
        arms=tuple(arms),
    )
