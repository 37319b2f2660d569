"""Opens the engines of `bench/kv_experiments.py`, which come and go, over one loaded model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from interlace.bench.engine_arm import EngineArm
from interlace.bench.kv_experiments import Experiment, KVBench, kv
from interlace.bench.paired import CachingArm
from interlace.bench.report import Report
from interlace.bench.session import SEED, Prepared
from interlace.bench.shown import shown
from interlace.bench.workload import WorkSource
from interlace.engine.config import KVTransferConfig
from interlace.engine.ports import Clock, Progress


async def run_kv_benchmark(
    prepared: Prepared,
    folder: Path,
    shape: tuple[int, int],
    clock: Clock,
    progress: Progress,
    only: Experiment | None = None,
) -> Report:
    """Run `kv` with files in `folder`, which is empty; `shape` is prompt tokens and repeats.

    `only` names one experiment of the four.

    Raises: what the engine raises. Cancelling stops after the run in progress.
    """
    source = WorkSource(vocab_size=prepared.loaded.architecture.vocab_size, seed=SEED)

    @asynccontextmanager
    async def open_arm(name: str, config: KVTransferConfig | None) -> AsyncIterator[CachingArm]:
        from interlace import AsyncEngine, EngineConfig

        engine_config = EngineConfig(
            model=prepared.settings.model,
            dtype="float32",
            skip_tokenizer_init=True,
            kv_transfer_config=config,
        )
        async with (
            AsyncEngine.from_loaded(
                engine_config, prepared.loaded, device=prepared.device, clock=clock
            ) as engine,
            shown(engine, name, prepared.metrics, prepared.traces),
        ):
            yield EngineArm(engine, clock, name)

    prompt_tokens, repeats = shape
    bench = KVBench(open_arm, folder, source, progress)
    rows, checks = await kv(bench, prompt_tokens, repeats, only)
    settings = {
        "model": prepared.settings.model,
        "prompt_tokens": prompt_tokens,
        "repeats": repeats,
    }
    return Report("kv", settings, prepared.machine, rows, checks)
