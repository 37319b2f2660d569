"""What KV in files brings and costs: reloading a prompt, saving it, a connector with no work, and
saving what is generated.

Knows arms, not engines: `bench/kv_session.py` opens those. Files are read soon after they were
written, so from the system's page cache.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

from interlace.bench.apparatus import Outcome
from interlace.bench.arms import Shape
from interlace.bench.experiments import refuse_cached
from interlace.bench.paired import CachingArm, Comparison, Paired, compare
from interlace.bench.report import Check, Row
from interlace.bench.spread import Spread
from interlace.bench.timeline import Sample
from interlace.bench.workload import Work, WorkSource
from interlace.engine.config import KVRole, KVTransferConfig
from interlace.engine.errors import InterlaceError
from interlace.engine.ports import Progress

RELOAD_BAR = 8.0
"""Least times that the first token comes sooner when the prompt's KV is loaded."""
SAVING_BAR = 3.0
"""Most percent that saving adds to a prefill."""
IDLE_BAR = 1.0
"""Most percent that a connector with nothing to do adds to a decode step."""
MAX_UNLOADED_TOKENS = 16
"""Of a saved prompt: the last block, since its last token is computed in any case."""
IDLE_PROMPT_TOKENS = 32
IDLE_OUTPUT_TOKENS = 17
"""Of the comparison of decode steps. Many short runs: the machine changes less within a pair."""
SAVED_OUTPUT_TOKENS = 145
"""Long enough for the connector to save a gathered run of blocks while decoding goes on."""
SAVED_PAIRS = 4
"""Few, since each takes two long runs and nothing is held against a bar."""

OpenArm = Callable[[str, KVTransferConfig | None], AbstractAsyncContextManager[CachingArm]]
"""Opens an engine with a name for tables, and a connector or none."""


@dataclasses.dataclass(frozen=True, slots=True)
class KVBench:
    """What opens engines, where they may keep files, and what feeds and shows them."""

    open_arm: OpenArm
    folder: Path
    """Exists and is empty; each experiment removes what it keeps there."""
    source: WorkSource
    progress: Progress


class Experiment(enum.StrEnum):
    """What `kv` consists of, in this order."""

    RELOAD = "reload"
    SAVING = "saving"
    IDLE = "idle"
    GENERATING = "generating"


async def kv(
    bench: KVBench, prompt_tokens: int, repeats: int, only: Experiment | None = None
) -> Outcome:
    """All four experiments, or one, one after the other, each with engines of its own.

    Raises: `InterlaceError` if KV was not saved or not loaded, and what the engine raises.
    Cancelling stops after the run in progress.
    """
    experiments: dict[Experiment, Callable[[], Awaitable[Outcome]]] = {
        Experiment.RELOAD: lambda: reload(bench, prompt_tokens, repeats),
        Experiment.SAVING: lambda: saving(bench, prompt_tokens, repeats),
        Experiment.IDLE: lambda: idle(bench, repeats),
        Experiment.GENERATING: lambda: generating(bench),
    }
    parts = [await experiment() for name, experiment in experiments.items() if only in (None, name)]
    rows = tuple(row for part, _ in parts for row in part)
    return rows, tuple(check for _, part in parts for check in part)


async def reload(bench: KVBench, prompt_tokens: int, repeats: int) -> Outcome:
    """Time to the first token of a prompt, computed, and loaded from files in two ways.

    In each round a new prompt is computed by all engines, and saved by those that can; these then
    forget all KV on the device and get the prompt again.
    """
    async with _folder(bench, "reload") as folder, AsyncExitStack() as stack:
        plain = await stack.enter_async_context(bench.open_arm("computed", None))
        loaders = [
            await stack.enter_async_context(bench.open_arm(f"loaded, {way}", config))
            for way, config in (
                ("sync", example_connector(folder / "sync")),
                ("async", example_connector(folder / "async", load_async=True)),
            )
        ]
        taken: list[list[Sample]] = [[] for _ in (plain, *loaders)]
        with bench.progress.task("reload", repeats + 1) as advance:
            for _ in range(repeats + 1):
                work = bench.source.make(1, prompt_tokens, 1)
                taken[0].append(await _computed(plain, work))
                for samples, loader in zip(taken[1:], loaders, strict=True):
                    samples.append(await _reloaded(loader, work))
                advance(1)
    computed, *loaded = (samples[1:] for samples in taken)  # the first round warms up
    rows = [Row(plain.name, _first_token(computed) | _lag(computed))]
    checks = []
    for loader, samples in zip(loaders, loaded, strict=True):
        pairs = zip(computed, samples, strict=True)
        sooner = Spread.of(a.first_token_s / b.first_token_s for a, b in pairs)
        tokens = {"loaded tokens": Spread.of(s.loaded_tokens for s in samples)}
        figures = _first_token(samples) | tokens | {"times sooner": sooner} | _lag(samples)
        rows.append(Row(loader.name, figures))
        name = f"first token of {prompt_tokens}: computed / {loader.name}"
        checks.append(Check(name, sooner.median, at_least=RELOAD_BAR))
    return tuple(rows), tuple(checks)


async def saving(bench: KVBench, prompt_tokens: int, repeats: int) -> Outcome:
    """Time to the first token of new prompts, with a connector that saves them and without."""
    what = Comparison("saving", lambda sample: sample.first_token_s, SAVING_BAR)
    shape = Shape(prompt_tokens, 1, repeats)
    async with (
        _folder(bench, "saving") as folder,
        bench.open_arm("prefill", None) as plain,
        bench.open_arm("prefill, saving", example_connector(folder)) as saver,
    ):
        paired = await compare(what, (plain, saver), shape, bench.source, bench.progress)
        await _reloaded(saver, bench.source.make(1, prompt_tokens, 1))
    refuse_cached([*paired.base, *paired.other])
    rows = _compared_rows((plain, saver), paired, _saving_figures)
    return rows, paired.checks("saving, % of a prefill", SAVING_BAR)


async def idle(bench: KVBench, repeats: int) -> Outcome:
    """Decode steps, with a connector that finds nothing to load and saves nothing, and without."""
    what = Comparison(
        "idle connector", lambda sample: sample.median_step_s, IDLE_BAR, least=8, most=32
    )
    shape = Shape(IDLE_PROMPT_TOKENS, IDLE_OUTPUT_TOKENS, repeats)
    async with (
        _folder(bench, "idle") as folder,
        bench.open_arm("decode", None) as plain,
        bench.open_arm("decode, idle connector", example_connector(folder, "kv_consumer")) as other,
    ):
        paired = await compare(what, (plain, other), shape, bench.source, bench.progress)
    refuse_cached([*paired.base, *paired.other])
    rows = _compared_rows((plain, other), paired, _decode_figures)
    return rows, paired.checks("idle connector, % of a decode step", IDLE_BAR)


async def generating(bench: KVBench) -> Outcome:
    """Decode steps, with a connector that saves what is generated and without: a row, no bar."""
    what = Comparison(
        "saving an answer", lambda sample: sample.step_s, IDLE_BAR, SAVED_PAIRS, SAVED_PAIRS
    )
    shape = Shape(IDLE_PROMPT_TOKENS, SAVED_OUTPUT_TOKENS, 1)
    async with (
        _folder(bench, "generating") as folder,
        bench.open_arm("long decode", None) as plain,
        bench.open_arm("long decode, saving", example_connector(folder)) as saver,
    ):
        paired = await compare(what, (plain, saver), shape, bench.source, bench.progress)
    refuse_cached([*paired.base, *paired.other])
    return _compared_rows((plain, saver), paired, _decode_figures), ()


def example_connector(folder: Path, role: KVRole = "kv_both", **extra: object) -> KVTransferConfig:
    """ExampleConnector on `folder`; `extra` are options of its own."""
    return KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role=role,
        kv_connector_extra_config={"shared_storage_path": str(folder), **extra},
    )


@asynccontextmanager
async def _folder(bench: KVBench, name: str) -> AsyncIterator[Path]:
    """A folder for one experiment, removed at the end. Cancelling removes it too."""
    folder = bench.folder / name
    await asyncio.to_thread(folder.mkdir)
    try:
        yield folder
    finally:
        await asyncio.shield(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))


async def _computed(arm: CachingArm, work: Work) -> Sample:
    """Run `work`, no part of which may be known."""
    arm.forget()
    sample = await arm.run(work)
    refuse_cached([sample])
    return sample


async def _reloaded(arm: CachingArm, work: Work) -> Sample:
    """Compute and save `work`, forget it on the device, and time it again.

    Raises: `InterlaceError` if it was not loaded.
    """
    await _computed(arm, work)
    arm.forget()
    sample = await arm.run(work)
    if sample.loaded_tokens < work.prompt_tokens - MAX_UNLOADED_TOKENS:
        raise InterlaceError(
            f"{arm.name}: only {sample.loaded_tokens} of {work.prompt_tokens} prompt tokens came "
            "from files the second time; is the disk full, or too slow to save all of them?"
        )
    return sample


def _compared_rows(
    arms: Sequence[CachingArm],
    paired: Paired,
    figures: Callable[[Sequence[Sample]], dict[str, Spread]],
) -> tuple[Row, Row]:
    return (
        Row(arms[0].name, figures(paired.base)),
        Row(arms[1].name, figures(paired.other) | {"cost %": paired.cost}),
    )


def _first_token(samples: Sequence[Sample]) -> dict[str, Spread]:
    return {"first token ms": Spread.of(s.first_token_s * 1e3 for s in samples)}


def _lag(samples: Sequence[Sample]) -> dict[str, Spread]:
    lags = [s.worst_lag_s * 1e3 for s in samples if s.worst_lag_s is not None]
    return {"worst lag ms": Spread.of(lags)} if lags else {}


def _saving_figures(samples: Sequence[Sample]) -> dict[str, Spread]:
    idle = [s.idle_s * 1e3 for s in samples if s.idle_s is not None]
    until_idle = {"until idle ms": Spread.of(idle)} if idle else {}
    return _first_token(samples) | until_idle | _lag(samples)


def _decode_figures(samples: Sequence[Sample]) -> dict[str, Spread]:
    rate = Spread.of(s.decode_tokens_per_s for s in samples)
    steps = Spread.of(s.median_step_s * 1e3 for s in samples)
    return {"tokens/s": rate, "ms/step": steps} | _lag(samples)
