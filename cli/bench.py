"""`interlace bench`: how fast the engine runs here, beside transformers and the device's limits.

Parses options only; `interlace.bench` measures. Imports no torch.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from interlace.cli.bench_options import (
    MAX_BATCH_SIZE,
    MAX_TOKENS,
    Against,
    BatchSizes,
    Contexts,
    Device,
    Dtype,
    GraphModeName,
    InflightSteps,
    JsonTarget,
    Live,
    MaxBatchedTokens,
    MaxModelLen,
    Model,
    New,
    OutputTokens,
    PromptTokens,
    Repeats,
    engine_settings,
    parse_contexts,
    parse_counts,
)
from interlace.cli.bench_output import StillProgress, check_json_target, show
from interlace.cli.bench_overlap import overlap
from interlace.cli.bench_run import compare
from interlace.cli.bench_run import run as run_grid
from interlace.cli.bench_store import store
from interlace.cli.kv_options import KVConfig, KVConnector, KVDir, kv_transfer_config
from interlace.cli.live.beside import check_terminal, screen_beside
from interlace.cli.metrics_option import MetricsPort, shared_metrics
from interlace.cli.own_process import frozen_heap
from interlace.cli.progress import progress_for
from interlace.cli.running import run
from interlace.cli.trace_option import TraceFile, tell_of_traces, trace_target

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from interlace.bench.apparatus import Bench, Outcome
    from interlace.bench.settings import Settings

app = typer.Typer(
    name="bench",
    help="Measure how fast the engine runs on this machine.",
    no_args_is_help=True,
)


@app.command()
def decode(
    model: Model = "smollm2-135m",
    batch_sizes: BatchSizes = "1,8",
    prompt_tokens: Contexts = "512",
    output_tokens: OutputTokens = 64,
    repeats: Repeats = 5,
    vs: Against = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    max_model_len: MaxModelLen = None,
    max_num_batched_tokens: MaxBatchedTokens = None,
    cudagraph_mode: GraphModeName = None,
    max_inflight_steps: InflightSteps = None,
    kv_connector: KVConnector = None,
    kv_transfer_config_json: KVConfig = None,
    kv_dir: KVDir = None,
    live: Live = False,
    metrics: MetricsPort = None,
    trace: TraceFile = None,
    json: JsonTarget = None,
) -> None:
    """Tokens per second from the first token to the last, prefill excluded.

    "of memory limit": the time to read weights and KV once, at the rate
    that this device reads with, by the median step.

    "kernels ms", "no kernel" (GPU): what kernels take in a step, and the
    share of the time in which none runs, in one more run that is traced.
    """
    from interlace.bench import experiments
    from interlace.bench.arms import Grid

    sizes = parse_counts("--batch-sizes", batch_sizes, MAX_BATCH_SIZE)
    grid = Grid(sizes, parse_contexts(prompt_tokens), output_tokens, repeats)
    settings = engine_settings(
        model,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        cudagraph_mode=cudagraph_mode,
        max_inflight_steps=max_inflight_steps,
        request_tokens=max(grid.prompt_tokens) + output_tokens,
        vs=vs,
        kv=kv_transfer_config(kv_connector, kv_transfer_config_json, kv_dir),
    )
    shape = {"prompt_tokens": _told(grid.prompt_tokens), "output_tokens": output_tokens}
    _measure(
        "decode",
        settings,
        lambda bench: experiments.decode(bench, grid),
        shape | {"repeats": repeats},
        json,
        live=live,
        metrics=metrics,
        trace=trace,
    )


@app.command()
def prefill(
    model: Model = "smollm2-135m",
    batch_sizes: BatchSizes = "1",
    prompt_tokens: Contexts = "512",
    repeats: Repeats = 5,
    vs: Against = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    max_model_len: MaxModelLen = None,
    max_num_batched_tokens: MaxBatchedTokens = None,
    cudagraph_mode: GraphModeName = None,
    max_inflight_steps: InflightSteps = None,
    kv_connector: KVConnector = None,
    kv_transfer_config_json: KVConfig = None,
    kv_dir: KVDir = None,
    live: Live = False,
    metrics: MetricsPort = None,
    trace: TraceFile = None,
    json: JsonTarget = None,
) -> None:
    """Time to the first token of prompts that were never seen before.

    "of matrix limit": the time to compute all products and attention, at
    the rate that this device reaches in a large product, by the time to the
    first token.

    "kernels ms", "no kernel" (GPU): what kernels take, and the share of the
    time in which none runs, in one more run that is traced.
    """
    from interlace.bench import experiments
    from interlace.bench.arms import Grid

    sizes = parse_counts("--batch-sizes", batch_sizes, MAX_BATCH_SIZE)
    grid = Grid(sizes, parse_contexts(prompt_tokens), 1, repeats)
    settings = engine_settings(
        model,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        cudagraph_mode=cudagraph_mode,
        max_inflight_steps=max_inflight_steps,
        request_tokens=max(grid.prompt_tokens) + 1,
        vs=vs,
        kv=kv_transfer_config(kv_connector, kv_transfer_config_json, kv_dir),
    )
    _measure(
        "prefill",
        settings,
        lambda bench: experiments.prefill(bench, grid),
        {"prompt_tokens": _told(grid.prompt_tokens), "repeats": repeats},
        json,
        live=live,
        metrics=metrics,
        trace=trace,
    )


@app.command()
def hit(
    model: Model = "smollm2-135m",
    prompt_tokens: PromptTokens = 1000,
    new: New = None,
    repeats: Repeats = 5,
    device: Device = "auto",
    dtype: Dtype = "auto",
    max_model_len: MaxModelLen = None,
    max_num_batched_tokens: MaxBatchedTokens = None,
    cudagraph_mode: GraphModeName = None,
    max_inflight_steps: InflightSteps = None,
    live: Live = False,
    metrics: MetricsPort = None,
    trace: TraceFile = None,
    json: JsonTarget = None,
) -> None:
    """Time to the first token of a prompt that is cached, in units of one decode step.

    With --new, of a prompt whose first part is cached, in milliseconds.

    "of limit": the time to read or to compute what must be, whichever takes
    longer, at the rates that this device reaches, by the time to the first
    token. "kernels ms", "no kernel" (GPU): as for prefill.
    """
    from interlace.bench import hits

    counts = None if new is None else parse_counts("--new", new, MAX_TOKENS)
    behind = hits.HIT_OUTPUT_TOKENS if counts is None else max(counts) + 1
    settings = engine_settings(
        model,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        cudagraph_mode=cudagraph_mode,
        max_inflight_steps=max_inflight_steps,
        request_tokens=prompt_tokens + behind,
    )
    shape: dict[str, object] = {"prompt_tokens": prompt_tokens}
    if counts is not None:
        shape["new"] = list(counts)

    async def experiment(bench: Bench) -> Outcome:
        if counts is None:
            return await hits.hit(bench, prompt_tokens, repeats)
        return await hits.hit_with_new(bench, prompt_tokens, counts, repeats)

    _measure(
        "hit",
        settings,
        experiment,
        shape | {"repeats": repeats},
        json,
        live=live,
        metrics=metrics,
        trace=trace,
    )


@app.command()
def schedule(
    requests: Annotated[
        int, typer.Option("--requests", min=1, max=4096, help="Requests that run.")
    ] = 256,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to time.")] = 200,
    json: JsonTarget = None,
) -> None:
    """Time that planning one step takes, with no model behind it."""
    from interlace.bench.machine import machine_facts
    from interlace.bench.report import Report
    from interlace.bench.schedule_cost import ScheduleLoad, measure_schedule
    from interlace.engine.clock import MonotonicClock

    check_json_target(json)
    load = ScheduleLoad(num_requests=requests, num_steps=steps)
    with StillProgress(sys.stderr).task("schedule", None):
        row, check = measure_schedule(load, MonotonicClock())
    settings = {"requests": requests, "steps": steps, "prompt_tokens": load.prompt_tokens}
    show(Report("schedule", settings, machine_facts(), (row,), (check,)), json)


@app.command()
def kv(
    model: Model = "smollm2-135m",
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", min=32, help="Tokens of a prompt to save or load.")
    ] = 960,
    repeats: Annotated[
        int,
        typer.Option(
            "--repeats",
            min=1,
            help="Measured rounds of loading. Saving is compared in 2 to 8 times as many pairs of "
            "runs, idling in 8 to 32 times, until the noise is small.",
        ),
    ] = 5,
    kv_dir: Annotated[
        str | None,
        typer.Option(
            "--kv-dir",
            metavar="DIR",
            help="Keep the files in a new folder in DIR, a few GB at most, removed at the end. "
            "Default: where temporary files go.",
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option("--only", metavar="NAME", help="reload, saving, idle or generating."),
    ] = None,
    trace: TraceFile = None,
    live: Live = False,
    metrics: MetricsPort = None,
    json: JsonTarget = None,
) -> None:
    """What KV in files brings and costs: loading and saving a prompt, a connector with no work,
    saving what is generated."""
    from interlace.bench.kv_experiments import Experiment
    from interlace.bench.kv_session import run_kv_benchmark
    from interlace.bench.scratch import scratch_folder
    from interlace.bench.session import prepare
    from interlace.bench.settings import Settings
    from interlace.bench.traces import Traces
    from interlace.engine.clock import MonotonicClock

    check_json_target(json)
    check_terminal(live)
    names = [experiment.value for experiment in Experiment]
    if only is not None and only not in names:
        raise typer.BadParameter(f"{only!r} is none of {', '.join(names)}.", param_hint="--only")
    experiment = None if only is None else Experiment(only)
    traces = Traces(trace_target(trace))
    with (
        scratch_folder(kv_dir, "--kv-dir") as folder,
        shared_metrics(metrics) as shared,
        contextlib.closing(prepare(Settings(model), progress_for(), shared, traces)) as prepared,
        screen_beside(live, StillProgress(sys.stderr)) as progress,
        frozen_heap(),
    ):
        shape = (prompt_tokens, repeats)
        report = run(
            lambda: run_kv_benchmark(
                prepared, folder, shape, MonotonicClock(), progress, experiment
            )
        )
    show(report, json)
    tell_of_traces(traces.written)


app.command(name="run")(run_grid)
app.command(name="compare")(compare)
app.command(name="overlap")(overlap)
app.command(name="store")(store)


def _told(counts: Sequence[int]) -> object:
    """One number as itself."""
    return counts[0] if len(counts) == 1 else list(counts)


def _measure(
    name: str,
    settings: Settings,
    experiment: Callable[[Bench], Awaitable[Outcome]],
    shape: dict[str, object],
    json: str | None,
    *,
    live: bool = False,
    metrics: int | None = None,
    trace: str | None = None,
) -> None:
    """Load, run one experiment on an event loop, show the report."""
    from interlace.bench.session import prepare, run_benchmark
    from interlace.bench.traces import Traces
    from interlace.engine.clock import MonotonicClock

    check_json_target(json)
    check_terminal(live)
    traces = Traces(trace_target(trace))
    with (
        shared_metrics(metrics) as shared,
        contextlib.closing(prepare(settings, progress_for(), shared, traces)) as prepared,
        screen_beside(live, StillProgress(sys.stderr)) as progress,
        frozen_heap(),
    ):
        report = run(
            lambda: run_benchmark(name, prepared, experiment, MonotonicClock(), progress, shape)
        )
    show(report, json)
    tell_of_traces(traces.written)
