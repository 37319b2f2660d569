"""`interlace bench overlap`: how much of a load hides behind computing, and what loads cost others.

Parses options only; `interlace.bench.overlap` measures. Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from interlace.bench.overlap.names import ALL, DEFAULT_PARTS, Part, chosen
from interlace.cli.bench_options import (
    MAX_BATCH_SIZE,
    MAX_TOKENS,
    Device,
    Dtype,
    GraphModeName,
    JsonTarget,
    MaxBatchedTokens,
    MaxModelLen,
    Model,
    PromptTokens,
    Repeats,
    engine_settings,
    parse_counts,
)
from interlace.cli.bench_output import StillProgress, check_json_target, print_table, write_json
from interlace.cli.own_process import frozen_heap
from interlace.cli.progress import progress_for
from interlace.cli.running import run

if TYPE_CHECKING:
    from interlace.bench.overlap.sizes import Sizes
    from interlace.bench.report import Report
    from interlace.bench.settings import Settings

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
    device: Device = "auto",
    dtype: Dtype = "auto",
    max_model_len: MaxModelLen = None,
    max_num_batched_tokens: MaxBatchedTokens = None,
    cudagraph_mode: GraphModeName = None,
    json: JsonTarget = None,
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
    """
    check_json_target(json)
    parts = _parts(part or [])
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
    _run(dataclasses.replace(settings, measure_limits=False), parts, sizes, json)


def _parts(names: list[str]) -> tuple[Part, ...]:
    """Raises: `typer.BadParameter`."""
    try:
        return chosen(names)
    except ValueError as error:
        known = ", ".join((*Part, ALL))
        raise typer.BadParameter(f"{error}: choose of {known}.", param_hint="--part") from error


def _sizes(prompt_tokens: int, new: tuple[int, ...], repeats: int, decoders: int) -> Sizes:
    from interlace.bench.overlap.sizes import Sizes

    return Sizes(prompt_tokens, new, repeats, num_decoders=decoders)


def _run(settings: Settings, parts: tuple[Part, ...], sizes: Sizes, json: str | None) -> None:
    """Show each part as soon as it is done; what is done is written as JSON, whatever comes."""
    from interlace.bench.overlap.session import merged, run_overlap
    from interlace.bench.session import prepare
    from interlace.engine.clock import MonotonicClock

    progress = StillProgress(sys.stderr)
    done: list[Report] = []

    def seen(report: Report) -> None:
        done.append(report)
        print_table(report, json)

    try:
        with contextlib.closing(prepare(settings, progress_for())) as prepared, frozen_heap():
            run(lambda: run_overlap(prepared, parts, sizes, MonotonicClock(), progress, seen))
    finally:
        if done:
            write_json(merged(done), json)
