"""`interlace bench store`: what KV in files brings, and how near its reads come to the disk's rate.

Parses options only; `interlace.bench.store` measures. Imports no torch.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from interlace.bench.part_names import ALL
from interlace.bench.scratch import scratch_folder
from interlace.bench.store.names import DEFAULT_PARTS, Part
from interlace.cli.bench_options import (
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
    from interlace.bench.part_reports import Seen
    from interlace.bench.session import Prepared
    from interlace.engine.ports import Progress

StorePath: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--path",
        metavar="DIR",
        help="Keep the files in a new folder in DIR, removed at the end: some GB, more for a model "
        "with much KV. Default: where temporary files go.",
    ),
]
_HELP = f"Repeatable: {', '.join(Part)}, or {ALL}. Default: {ALL}."


def store(
    model: Model = "smollm2-135m",
    part: Annotated[list[str] | None, typer.Option("--part", metavar="NAME", help=_HELP)] = None,
    path: StorePath = None,
    prompt_tokens: PromptTokens = 960,
    new: Annotated[
        str, typer.Option("--new", help="New tokens behind the prompt, with commas: 1,16,128.")
    ] = "1,16,128",
    repeats: Repeats = 5,
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
    """What KV in files brings: reading, looking up, first tokens, saving.

    read: records of the model's size, as the store reads them, by the best
    rate of plain reads at several queue depths; from the page cache, and
    with it dropped for these files. lookup: a prefix of 2,000 blocks among
    100,000, and the first look of an engine that starts.

    first-token: --prompt-tokens and some --new ones behind them: cached on
    the device, from host memory, from files with host memory empty, or
    computed. cold: from files whose pages were dropped: the connector's
    choice against each way that it could be made to take. saving: a prefill
    with saving to files and without.
    """
    check_json_target(json)
    check_terminal(live)
    parts = parse_parts(Part, part or [], DEFAULT_PARTS)
    counts = parse_counts("--new", new, MAX_TOKENS)
    settings = engine_settings(
        model,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        cudagraph_mode=cudagraph_mode,
        max_inflight_steps=None,
        request_tokens=prompt_tokens + max(counts) + 1,
    )
    with scratch_folder(path, "--path") as folder:

        async def measure(prepared: Prepared, progress: Progress, seen: Seen) -> None:
            from interlace.bench.overlap.sizes import Sizes
            from interlace.bench.store.session import StoreWork, run_store
            from interlace.engine.clock import MonotonicClock

            # One request at a time: engines need no room for more.
            sizes = Sizes(prompt_tokens, counts, repeats, num_decoders=1)
            work = StoreWork(sizes, Path(folder))
            await run_store(prepared, parts, work, MonotonicClock(), progress, seen)

        measure_parts(
            "store",
            dataclasses.replace(settings, measure_limits=False),
            measure,
            json,
            live=live,
            trace=trace,
            metrics=metrics,
        )
