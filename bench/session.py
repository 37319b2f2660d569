"""Builds the arms of a benchmark from one loaded model, and turns the outcome into a report."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from interlace.bench.arms import Arm
from interlace.bench.engine_arm import EngineArm
from interlace.bench.experiments import Bench, Outcome
from interlace.bench.machine import machine_facts
from interlace.bench.report import Report
from interlace.bench.workload import WorkSource
from interlace.engine.config import KVTransferConfig
from interlace.engine.device_thread import DeviceThread
from interlace.engine.ports import Clock, Progress

if TYPE_CHECKING:
    from interlace.layers.checkpoint import LoadedModel

SEED = 20240917
"""Of the prompts. Every run of a benchmark has the same ones."""


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """What is run, apart from the shape of the work."""

    model: str
    max_inflight_steps: tuple[int, ...] = ()
    """One engine for each; empty means one with the default."""
    against_transformers: bool = False
    kv_transfer_config: KVTransferConfig | None = None
    """Of each engine."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """What takes long to make and every arm shares: the weights, once."""

    settings: Settings
    loaded: LoadedModel
    reference: Any
    """transformers' model over the same weights, None if it is not wanted."""
    machine: Mapping[str, object]
    """Facts for the report, gathered before the loop runs since they lie in files."""
    device: DeviceThread
    """The one thread that computes, whatever the arm."""

    def close(self) -> None:
        """End the thread; call it when nothing runs on it."""
        self.device.close()


def prepare(settings: Settings, progress: Progress) -> Prepared:
    """Load the model, and wrap it for transformers if `settings` say so. Blocks: no loop yet.

    All of it on one device thread, which every arm computes on: see `DeviceThread`.
    Raises: `ModelError`; `ConfigError` if transformers is wanted and not installed.
    """
    device = DeviceThread("bench-device")
    try:
        return device.call(_prepare, settings, progress, device)
    except BaseException:
        device.close()
        raise


def _prepare(settings: Settings, progress: Progress, device: DeviceThread) -> Prepared:
    if not settings.against_transformers:
        loaded = _load(settings.model, progress)
        return Prepared(settings, loaded, None, torch_machine_facts(), device)
    from interlace.bench.transformers_arm import build_model, import_transformers

    with progress.task("Importing transformers", None):  # a missing package shows at once
        import_transformers()
    loaded = _load(settings.model, progress)
    reference = build_model(loaded.architecture, loaded.weights)
    return Prepared(settings, loaded, reference, torch_machine_facts(), device)


def _load(model: str, progress: Progress) -> LoadedModel:
    """The model in float32, without its tokenizer."""
    from interlace.layers.checkpoint import load_checkpoint

    return load_checkpoint(model, skip_tokenizer=True, dtype="float32", progress=progress)


@asynccontextmanager
async def open_bench(prepared: Prepared, clock: Clock, progress: Progress) -> AsyncIterator[Bench]:
    """Engines and the other arms over one set of weights; all closed at the end.

    Raises: `ConfigError`. Cancelling closes what was opened.
    """
    async with AsyncExitStack() as stack:
        ours = await _open_engines(stack, prepared, clock)
        theirs = None
        if prepared.reference is not None:
            from interlace.bench.transformers_arm import TransformersArm

            theirs = TransformersArm(prepared.reference, clock, prepared.device)
        source = WorkSource(vocab_size=prepared.loaded.architecture.vocab_size, seed=SEED)
        yield Bench(ours, theirs, source, progress)


async def _open_engines(stack: AsyncExitStack, prepared: Prepared, clock: Clock) -> list[Arm]:
    from interlace import AsyncEngine, EngineConfig

    arms: list[Arm] = []
    for depth in prepared.settings.max_inflight_steps or (None,):
        config = EngineConfig(
            model=prepared.settings.model,
            dtype="float32",
            skip_tokenizer_init=True,
            max_inflight_steps=depth,
            kv_transfer_config=prepared.settings.kv_transfer_config,
        )
        engine = await stack.enter_async_context(
            AsyncEngine.from_loaded(config, prepared.loaded, device=prepared.device, clock=clock)
        )
        name = "interlace" if depth is None else f"interlace, {depth} in flight"
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
    """Open the arms, run one of `bench/experiments.py` on them, and report.

    `shape` is what the report shows beside the model. Raises: what the engine raises. Cancelling
    stops after the run in progress.
    """
    async with open_bench(prepared, clock, progress) as bench:
        rows, checks = await experiment(bench)
    settings: dict[str, object] = {"model": prepared.settings.model} | shape
    if prepared.settings.kv_transfer_config is not None:
        settings["kv_connector"] = prepared.settings.kv_transfer_config.kv_connector
    return Report(name, settings, prepared.machine, rows, checks)


def torch_machine_facts() -> dict[str, str | int | None]:
    """`machine_facts` with the thread count of the torch in this process."""
    import torch

    return machine_facts(torch.get_num_threads())
