"""Builds the arms of a benchmark from one loaded model, and turns the outcome into a report."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from interlace.bench.apparatus import Bench, Outcome, Yardstick
from interlace.bench.arms import Arm
from interlace.bench.bars import NO_BARS, Bars, bars_for
from interlace.bench.device_idle import KernelTracer
from interlace.bench.engine_arm import EngineArm
from interlace.bench.limits import Limits, measure_limits
from interlace.bench.machine import Facts, torch_facts
from interlace.bench.report import Report
from interlace.bench.settings import Settings, pick_device
from interlace.bench.shown import SharedMetrics, shown
from interlace.bench.traces import Traces
from interlace.bench.workload import WorkSource
from interlace.engine.device_thread import DeviceThread
from interlace.engine.ports import Clock, Progress

if TYPE_CHECKING:
    from interlace.layers.checkpoint import LoadedModel

SEED = 20240917
"""Of the prompts. Every run of a benchmark has the same ones."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """What takes long to make and every arm shares: the weights, once."""

    settings: Settings
    """With the device that was picked."""
    loaded: LoadedModel
    reference: Any
    """transformers' model over the same weights, None if it is not wanted."""
    machine: Mapping[str, object]
    """Facts for the report, gathered before the loop runs since they lie in files."""
    device: DeviceThread
    """The one thread that computes, whatever the arm."""
    limits: Limits | None = None
    """What the device can do, None if that is not wanted."""
    metrics: SharedMetrics | None = None
    """Where engines serve their metrics; None: nowhere."""
    traces: Traces = dataclasses.field(default_factory=Traces)
    """Of engines, if they are recorded."""

    @property
    def dtype(self) -> str:
        """Of weights and KV, as in `EngineConfig`."""
        return str(self.loaded.decoder.dtype).removeprefix("torch.")

    @property
    def gpu(self) -> str | None:
        """Name of the GPU, None on a CPU."""
        return str(self.machine["gpu"]) if self.settings.device == "cuda" else None

    def close(self) -> None:
        """End the thread; call it when nothing runs on it."""
        self.device.close()


def prepare(
    settings: Settings,
    progress: Progress,
    metrics: SharedMetrics | None = None,
    traces: Traces | None = None,
) -> Prepared:
    """Load the model, and wrap it for transformers if `settings` say so. Blocks: no loop yet.

    All of it on one device thread, which every arm computes on: see `DeviceThread`. Limits are
    measured here, since an engine on a GPU leaves no memory for that.
    Raises: `ModelError`; `ConfigError` for an option, or if transformers is wanted and not
    installed.
    """
    device = DeviceThread("bench-device")
    try:
        return device.call(prepare_on, settings, progress, device, metrics, traces)
    except BaseException:
        device.close()
        raise


def prepare_on(
    settings: Settings,
    progress: Progress,
    device: DeviceThread,
    metrics: SharedMetrics | None = None,
    traces: Traces | None = None,
) -> Prepared:
    """`prepare` for several models that share `device`: call it there. Closing one of them closes
    the thread of all."""
    settings = pick_device(settings, progress)
    settings.check()
    if settings.against_transformers:
        from interlace.bench.transformers_arm import import_transformers

        with progress.task("Importing transformers", None):  # a missing package shows at once
            import_transformers()
    loaded = _load(settings, progress)
    reference = None
    if settings.against_transformers:
        from interlace.bench.transformers_arm import build_model

        reference = build_model(loaded.architecture, loaded.weights)
    limits = None
    if settings.measure_limits:
        with progress.task("Measuring what the device can do", None):
            limits = measure_limits(loaded.decoder.device, loaded.decoder.dtype)
    facts: Facts = torch_facts(settings.device)  # the clocks of a GPU that has just worked
    return Prepared(settings, loaded, reference, facts, device, limits, metrics, traces or Traces())


def _load(settings: Settings, progress: Progress) -> LoadedModel:
    """The model, without its tokenizer."""
    from interlace.layers.checkpoint import load_checkpoint

    return load_checkpoint(
        settings.model,
        skip_tokenizer=True,
        dtype=settings.dtype,
        device=settings.device,
        max_model_len=settings.max_model_len,
        progress=progress,
    )


@asynccontextmanager
async def open_bench(prepared: Prepared, clock: Clock, progress: Progress) -> AsyncIterator[Bench]:
    """Engines and the other arms over one set of weights; all closed at the end.

    Raises: `ConfigError`. Cancelling closes what was opened.
    """
    on_gpu = prepared.settings.device == "cuda"
    async with AsyncExitStack() as stack:
        ours = await _open_engines(stack, prepared, clock, progress)
        theirs = None
        if prepared.reference is not None:
            from interlace.bench.transformers_arm import TransformersArm

            theirs = TransformersArm(prepared.reference, clock, prepared.device)
        yield Bench(
            ours,
            theirs,
            WorkSource(vocab_size=prepared.loaded.architecture.vocab_size, seed=SEED),
            progress,
            yardstick=_yardstick(prepared),
            tracer=KernelTracer(prepared.device) if on_gpu else None,
            on_gpu=on_gpu,
            bars=_bars(prepared),
        )


def _yardstick(prepared: Prepared) -> Yardstick | None:
    if prepared.limits is None:
        return None
    itemsize = prepared.loaded.decoder.dtype.itemsize
    return Yardstick(prepared.limits, prepared.loaded.architecture, itemsize)


def _bars(prepared: Prepared) -> Bars:
    if prepared.gpu is None:
        return NO_BARS
    return bars_for(prepared.gpu, prepared.settings.model, prepared.dtype)


async def _open_engines(
    stack: AsyncExitStack, prepared: Prepared, clock: Clock, progress: Progress
) -> list[Arm]:
    from interlace import AsyncEngine

    arms: list[Arm] = []
    for depth, config in prepared.settings.engine_configs():
        engine = await stack.enter_async_context(
            AsyncEngine.from_loaded(
                config, prepared.loaded, device=prepared.device, progress=progress, clock=clock
            )
        )
        name = "interlace" if depth is None else f"interlace, {depth} in flight"
        await stack.enter_async_context(shown(engine, name, prepared.metrics, prepared.traces))
        arms.append(EngineArm(engine, clock, name))
    return arms


async def run_benchmark(
    name: str,
    prepared: Prepared,
    experiment: Callable[[Bench], Awaitable[Outcome]],
    clock: Clock,
    progress: Progress,
    shape: dict[str, object],
) -> Report:
    """Open the arms, run an experiment on them, as those of `bench/experiments.py`, and report.

    `shape` is what the report shows beside the model. Raises: what the engine raises. Cancelling
    stops after the run in progress.
    """
    async with open_bench(prepared, clock, progress) as bench:
        rows, checks = await experiment(bench)
    notes: tuple[str, ...] = ()
    if isinstance(bench.tracer, KernelTracer) and bench.tracer.problem is not None:
        notes = (f"It is not known how long no kernel ran: {bench.tracer.problem}.",)
    return Report(
        name,
        prepared.settings.facts() | {"dtype": prepared.dtype} | shape,
        prepared.machine,
        rows,
        checks,
        limits={} if prepared.limits is None else prepared.limits.figures(),
        notes=notes,
    )
