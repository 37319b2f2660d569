"""`interlace bench overlap`: how much of a load hides behind computing, and what loads cost others.

Parses options only; `interlace.bench.overlap` measures. Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from interlace.bench.overlap.names import DEFAULT_PARTS, FROM_FILES, Part
from interlace.bench.part_names import ALL
from interlace.bench.scratch import scratch_folder
from interlace.cli.bench_options import (
    MAX_BATCH_SIZE,
    MAX_TOKENS,
    Device,
    Dtype,
    GraphModeName,
    JsonTarget,
    Live,
    MaxBatchedTokens,
    MaxModelLen,
    Model,
    PromptTokens,
    Repeats,
    engine_settings,
    parse_counts,
)
from interlace.cli.bench_output import check_json_target
from interlace.cli.bench_parts import measure_parts, parse_parts
from interlace.cli.live.beside import check_terminal
from interlace.cli.metrics_option import MetricsPort
from interlace.cli.trace_option import TraceFile

if TYPE_CHECKING:
    from interlace.bench.overlap.sizes import Sizes
    from interlace.bench.part_reports import Seen
    from interlace.bench.session import Prepared
    from interlace.engine.ports import Progress

_DEFAULT = " and ".join(sorted(DEFAULT_PARTS))
_HELP = (
    f"Repeatable: {', '.join(Part)}, or {ALL}. Default: {_DEFAULT}. Parts share engines, so more "
    "than one in a command takes less than one after the other."
)
_DECODERS_HELP = (
    "Requests that decode beside loads, in the parts mixed, beside, gaps, saving and idle."
)


def overlap(
    model: Model = "smollm2-135m",
    part: Annotated[list[str] | None, typer.Option("--part", metavar="NAME", help=_HELP)] = None,
    prompt_tokens: PromptTokens = 960,
    new: Annotated[
        str, typer.Option("--new", help="New tokens behind the prompt, with commas: 16,128,688.")
    ] = "16,128",
    decoders: Annotated[
        int, typer.Option("--decoders", min=1, max=MAX_BATCH_SIZE, help=_DECODERS_HELP)
    ] = 32,
    repeats: Repeats = 5,
    store: Annotated[
        Literal["memory", "file"],
        typer.Option("--store", help="Where prompts are loaded from, in first-token and modes."),
    ] = "memory",
    path: Annotated[
        str | None,
        typer.Option(
            "--path",
            metavar="DIR",
            help="With --store file: keep the files in a new folder in DIR, removed at the end. "
            "Default: where temporary files go.",
        ),
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    max_model_len: MaxModelLen = None,
    max_num_batched_tokens: MaxBatchedTokens = None,
    cudagraph_mode: GraphModeName = None,
    json: JsonTarget = None,
    live: Live = False,
    trace: TraceFile = None,
    metrics: MetricsPort = None,
) -> None:
    """How much of loading a prompt's KV from host memory hides behind computing.

    first-token: --prompt-tokens and some --new ones behind them: cached on
    the device, loaded in bulk and then computed on, loaded layer by layer
    while computing, as the connector chooses, or computed again. Beside
    these, times of the device: load, compute, their sum "serial", and
    "pipelined"; "hidden share" is (serial - pipelined) by the shorter of
    loading and computing.

    crossover: the same with as many new tokens as take as long to compute
    as the prompt takes to load. modes: the connector's choice against each
    way, for prompts and new tokens of several lengths. split: the same over
    links that are made slower, where loads from both ends pay, against what
    the connector's rates predict. link: copies alone.

    mixed: a load within a step of a batch that decodes. beside: loads beside
    its steps, in a row. gaps: four long hits a second. saving, idle: what
    saving, and a connector with nothing to do, add to a step.

    With --store file, first-token and modes load from files, with host
    memory empty before each load: "read ms" is what reading takes of a load.
    """
    check_json_target(json)
    check_terminal(live)
    parts = _parts(part or [], store, path)
    counts = parse_counts("--new", new, MAX_TOKENS)
    sizes = _sizes(prompt_tokens, counts, repeats, decoders)
    settings = engine_settings(
        model,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        cudagraph_mode=cudagraph_mode,
        max_inflight_steps=None,
        request_tokens=sizes.longest + 1,
    )

    async def measure(prepared: Prepared, progress: Progress, seen: Seen) -> None:
        from interlace.bench.overlap.session import run_overlap
        from interlace.engine.clock import MonotonicClock

        folder = scratch if store == "file" else None
        await run_overlap(prepared, parts, sizes, MonotonicClock(), progress, seen, folder)

    with scratch_folder(path, "--path") if store == "file" else contextlib.nullcontext() as scratch:
        measure_parts(
            "overlap",
            dataclasses.replace(settings, measure_limits=False),
            measure,
            json,
            live=live,
            trace=trace,
            metrics=metrics,
        )


def _parts(names: list[str], store: str, path: str | None) -> tuple[Part, ...]:
    """Raises: `typer.BadParameter`."""
    if store == "memory":
        if path is not None:
            raise typer.BadParameter("it goes with --store file.", param_hint="--path")
        return parse_parts(Part, names, DEFAULT_PARTS)
    parts = parse_parts(Part, names, (Part.FIRST_TOKEN,))
    others = [part for part in parts if part not in FROM_FILES]
    if others:
        raise typer.BadParameter(
            f"{', '.join(others)}: with --store file there are {', '.join(sorted(FROM_FILES))}"
            " only; `interlace bench store` has more about files.",
            param_hint="--part",
        )
    return parts


def _sizes(prompt_tokens: int, new: tuple[int, ...], repeats: int, decoders: int) -> Sizes:
    from interlace.bench.overlap.sizes import Sizes

    return Sizes(prompt_tokens, new, repeats, num_decoders=decoders)
