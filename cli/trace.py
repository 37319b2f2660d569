"""`interlace bench timeline` records one pipelined step, or one prompt from both ends; `interlace
trace` shows what was recorded.

Parses options only; `interlace.bench.step_trace` records, reads and draws. Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

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
)
from interlace.cli.bench_output import (
    StillProgress,
    check_json_target,
    check_target,
    show,
    writing,
)
from interlace.cli.live.beside import check_terminal, screen_beside
from interlace.cli.metrics_option import MetricsPort, shared_metrics
from interlace.cli.own_process import frozen_heap
from interlace.cli.progress import progress_for
from interlace.cli.running import run
from interlace.cli.screen import harmless

if TYPE_CHECKING:
    from typing import TextIO

    from interlace.bench.step_trace.trace import AnyTrace

MAX_GROUP_SIZE = 1024

NewTokens: TypeAlias = Annotated[
    int,
    typer.Option(
        "--new",
        min=1,
        max=MAX_TOKENS,
        help="New tokens behind the prompt; layer by layer in one step.",
    ),
]
LoadModeName: TypeAlias = Annotated[
    Literal["layerwise", "hybrid"],
    typer.Option(
        "--load-mode",
        help="layerwise: within one step; hybrid: from the back, while steps compute the front.",
    ),
]
GroupSize: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--group-size",
        min=1,
        max=MAX_GROUP_SIZE,
        help="Layerwise: layers that share a gate; the first and the last one wait alone. "
        "Default: 2.",
    ),
]
TraceTarget: TypeAlias = Annotated[
    str,
    typer.Option("--trace", metavar="FILE", help="Write the timeline here, as Perfetto reads it."),
]
TraceSource: TypeAlias = Annotated[
    Path, typer.Argument(metavar="FILE", help="What `interlace bench timeline --trace` wrote.")
]
PngTarget: TypeAlias = Annotated[
    str | None, typer.Option("--png", metavar="OUT", help="Draw a picture, 1800 pixels wide.")
]
SvgTarget: TypeAlias = Annotated[
    str | None,
    typer.Option("--svg", metavar="OUT", help="Draw a picture; equal timelines give equal files."),
]


def timeline(
    trace: TraceTarget,
    model: Model = "smollm2-135m",
    prompt_tokens: PromptTokens = 960,
    new: NewTokens = 128,
    repeats: Repeats = 5,
    load_mode: LoadModeName = "layerwise",
    group_size: GroupSize = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    max_model_len: MaxModelLen = None,
    max_num_batched_tokens: MaxBatchedTokens = None,
    cudagraph_mode: GraphModeName = None,
    live: Live = False,
    metrics: MetricsPort = None,
    json: JsonTarget = None,
) -> None:
    """Record one step that loads a prompt's KV layer by layer while it computes,
    or, with --load-mode hybrid, a prompt whose front is computed meanwhile.

    Of --repeats hits the one that took the median time is written to --trace:
    what the load lane and the compute lane did, layer by layer. On a GPU
    device times, inside CUDA graphs too; recording slows a step down a little.
    "both ms": in which both lanes worked; "hidden share": of the load lane's
    work, in a hybrid of the shorter lane's; "waits ms": in which computing
    stood at gates; "front tokens", "back tokens": of the prompt, computed and
    loaded, in so many "steps".
    """
    from interlace.bench.session import prepare
    from interlace.bench.step_trace.file import to_json
    from interlace.bench.step_trace.session import record_timeline
    from interlace.bench.step_trace.setup import TimelinePlan
    from interlace.engine.clock import MonotonicClock

    check_json_target(json)
    check_terminal(live)
    _check_target("--trace", trace)
    plan = TimelinePlan(prompt_tokens, new, repeats, group_size, load_mode)
    plan.check()
    settings = engine_settings(
        model,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        cudagraph_mode=cudagraph_mode,
        max_inflight_steps=None,
        request_tokens=prompt_tokens + new + 1,
    )
    settings = dataclasses.replace(settings, measure_limits=False)
    with (
        shared_metrics(metrics) as shared,
        contextlib.closing(prepare(settings, progress_for(), shared)) as prepared,
        screen_beside(live, StillProgress(sys.stderr)) as progress,
        frozen_heap(),
    ):
        found = run(lambda: record_timeline(prepared, plan, MonotonicClock(), progress))
    _write("--trace", trace, to_json(found.trace).encode())
    show(found.report, json)
    _tell(found.trace, sys.stderr if json == "-" else sys.stdout)


def trace(file: TraceSource, png: PngTarget = None, svg: SvgTarget = None) -> None:
    """Show a recorded timeline: its figures, both lanes as rows of blocks, a picture.

    Pictures need matplotlib: pip install interlace[plot].
    """
    from interlace.bench.step_trace.file import read_file

    for option, target in (("--png", png), ("--svg", svg)):
        if target is not None:
            _check_target(option, target)
    found = read_file(file)
    _tell(found, sys.stdout)
    if png is not None:
        _draw("--png", png, found)
    if svg is not None:
        _draw("--svg", svg, found)


def _draw(option: str, target: str, found: AnyTrace) -> None:
    from interlace.bench.step_trace.picture import draw_picture

    _write(option, target, draw_picture(found, "png" if option == "--png" else "svg"))


def _tell(found: AnyTrace, stream: TextIO) -> None:
    """The names in it may come from anywhere."""
    from interlace.bench.step_trace.text import lines

    for line in lines(found):
        typer.echo(harmless(line), file=stream)


def _check_target(option: str, target: str) -> None:
    """Before minutes are spent on its content. Raises: `ConfigError`."""
    check_target(option, target)


def _write(option: str, target: str, content: bytes) -> None:
    with writing(option, target):
        Path(target).write_bytes(content)
