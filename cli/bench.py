"""`interlace bench`: how fast the engine runs here, and beside transformers.

Parses options only; `interlace.bench` measures. Imports no torch.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from interlace.cli.bench_output import StillProgress, check_json_target, show
from interlace.cli.kv_options import KVConfig, KVConnector, KVDir, kv_transfer_config
from interlace.cli.progress import progress_for
from interlace.cli.running import run

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from interlace.bench.experiments import Bench, Outcome
    from interlace.bench.session import Settings
    from interlace.engine.config import KVTransferConfig

app = typer.Typer(
    name="bench",
    help="Measure how fast the engine runs on this machine.",
    no_args_is_help=True,
)

MAX_BATCH_SIZE = 256

Model = Annotated[
    str, typer.Option("--model", help="A model's name, GGUF file or folder; as in chat.")
]
BatchSizes = Annotated[
    str, typer.Option("--batch-sizes", help="Requests at once, with commas: 1,8.")
]
PromptTokens = Annotated[int, typer.Option("--prompt-tokens", min=2, help="Tokens of a prompt.")]
OutputTokens = Annotated[
    int, typer.Option("--output-tokens", min=2, help="Tokens to generate for each request.")
]
Repeats = Annotated[
    int,
    typer.Option("--repeats", min=1, help="Measured rounds; one more before them warms up."),
]
Against = Annotated[
    Literal["transformers"] | None,
    typer.Option("--vs", help="Run transformers on the same weights in turns, and print ratios."),
]
InflightSteps = Annotated[
    str | None,
    typer.Option(
        "--max-inflight-steps",
        help="Steps in flight, with commas: 1,2 measures an engine of each. Default: the engine's.",
    ),
]
JsonTarget = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write all figures as JSON. With - they go to standard output, and the table to "
        "standard error.",
    ),
]


@app.command()
def decode(
    model: Model = "smollm2-135m",
    batch_sizes: BatchSizes = "1,8",
    prompt_tokens: PromptTokens = 512,
    output_tokens: OutputTokens = 64,
    repeats: Repeats = 5,
    vs: Against = None,
    max_inflight_steps: InflightSteps = None,
    kv_connector: KVConnector = None,
    kv_transfer_config_json: KVConfig = None,
    kv_dir: KVDir = None,
    json: JsonTarget = None,
) -> None:
    """Tokens per second from the first token to the last, prefill excluded."""
    from interlace.bench import experiments
    from interlace.bench.arms import Shape

    sizes = parse_counts("--batch-sizes", batch_sizes, MAX_BATCH_SIZE)
    shape = Shape(prompt_tokens, output_tokens, repeats)
    kv = kv_transfer_config(kv_connector, kv_transfer_config_json, kv_dir)
    _measure(
        "decode",
        _settings(model, max_inflight_steps, vs, kv),
        lambda bench: experiments.decode(bench, sizes, shape),
        {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "repeats": repeats},
        json,
    )


@app.command()
def prefill(
    model: Model = "smollm2-135m",
    batch_sizes: BatchSizes = "1",
    prompt_tokens: PromptTokens = 512,
    repeats: Repeats = 5,
    vs: Against = None,
    max_inflight_steps: InflightSteps = None,
    kv_connector: KVConnector = None,
    kv_transfer_config_json: KVConfig = None,
    kv_dir: KVDir = None,
    json: JsonTarget = None,
) -> None:
    """Time to the first token of prompts that were never seen before."""
    from interlace.bench import experiments
    from interlace.bench.arms import Shape

    sizes = parse_counts("--batch-sizes", batch_sizes, MAX_BATCH_SIZE)
    shape = Shape(prompt_tokens, 1, repeats)
    kv = kv_transfer_config(kv_connector, kv_transfer_config_json, kv_dir)
    _measure(
        "prefill",
        _settings(model, max_inflight_steps, vs, kv),
        lambda bench: experiments.prefill(bench, sizes, shape),
        {"prompt_tokens": prompt_tokens, "repeats": repeats},
        json,
    )


@app.command()
def hit(
    model: Model = "smollm2-135m",
    prompt_tokens: PromptTokens = 1000,
    repeats: Repeats = 5,
    max_inflight_steps: InflightSteps = None,
    json: JsonTarget = None,
) -> None:
    """Time to the first token of a prompt that is cached, in units of one decode step."""
    from interlace.bench import experiments

    _measure(
        "hit",
        _settings(model, max_inflight_steps, None),
        lambda bench: experiments.hit(bench, prompt_tokens, repeats),
        {"prompt_tokens": prompt_tokens, "repeats": repeats},
        json,
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
    json: JsonTarget = None,
) -> None:
    """What KV in files brings and costs: loading and saving a prompt, a connector with no work,
    saving what is generated."""
    from interlace.bench.kv_experiments import Experiment
    from interlace.bench.kv_session import run_kv_benchmark, scratch_folder
    from interlace.bench.session import prepare
    from interlace.engine.clock import MonotonicClock

    check_json_target(json)
    names = [experiment.value for experiment in Experiment]
    if only is not None and only not in names:
        raise typer.BadParameter(f"{only!r} is none of {', '.join(names)}.", param_hint="--only")
    experiment = None if only is None else Experiment(only)
    progress = StillProgress(sys.stderr)
    with (
        scratch_folder(kv_dir) as folder,
        contextlib.closing(prepare(_settings(model, None, None), progress_for())) as prepared,
    ):
        shape = (prompt_tokens, repeats)
        report = run(
            lambda: run_kv_benchmark(
                prepared, folder, shape, MonotonicClock(), progress, experiment
            )
        )
    show(report, json)


def parse_counts(option: str, text: str, most: int) -> tuple[int, ...]:
    """Different whole numbers from 1 to `most`, in the order given, as in 1,8.

    Raises: `typer.BadParameter`.
    """
    try:
        counts = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        counts = ()
    if not counts or not all(1 <= count <= most for count in counts):
        raise typer.BadParameter(
            f"{text!r} is not a list of numbers from 1 to {most}, as in 1,{min(8, most)}.",
            param_hint=option,
        )
    return counts


def _settings(
    model: str,
    max_inflight_steps: str | None,
    vs: str | None,
    kv: KVTransferConfig | None = None,
) -> Settings:
    from interlace.bench.session import Settings

    depths: tuple[int, ...] = ()
    if max_inflight_steps is not None:
        depths = parse_counts("--max-inflight-steps", max_inflight_steps, 2)
    if kv is not None and len(depths) > 1:
        raise typer.BadParameter(
            "with a KV connector one engine could load what the other has saved; give one depth.",
            param_hint="--max-inflight-steps",
        )
    return Settings(model, depths, against_transformers=vs is not None, kv_transfer_config=kv)


def _measure(
    name: str,
    settings: Settings,
    experiment: Callable[[Bench], Awaitable[Outcome]],
    shape: dict[str, object],
    json: str | None,
) -> None:
    """Load, run one experiment on an event loop, show the report."""
    from interlace.bench.session import prepare, run_benchmark
    from interlace.engine.clock import MonotonicClock

    check_json_target(json)
    progress = StillProgress(sys.stderr)
    with contextlib.closing(prepare(settings, progress_for())) as prepared:
        report = run(
            lambda: run_benchmark(name, prepared, experiment, MonotonicClock(), progress, shape)
        )
    show(report, json)
