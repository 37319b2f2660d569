"""`interlace bench timeline` records one pipelined step, or one prompt from both ends; `interlace
trace` shows what was recorded.

Parses options only; `interlace.bench.step_trace` records, reads and draws. Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json as json_module
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
    from collections.abc import Callable, Iterable, Mapping
    from typing import TextIO

    from interlace.bench.step_trace.trace import AnyTrace
    from interlace.engine.engine_trace import EngineTrace

MAX_GROUP_SIZE = 1024
Kind: TypeAlias = Literal["png", "svg"]
"""Of a picture."""

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
    Path,
    typer.Argument(
        metavar="FILE", help="What --trace of `chat` or a benchmark wrote, or of `bench timeline`."
    ),
]
Steps: TypeAlias = Annotated[
    int, typer.Option("--steps", min=1, metavar="N", help="Rows: the last N steps of an engine.")
]
OneStep: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--step",
        min=0,
        metavar="ID",
        help="Show, and draw, this step of an engine. Default: pictures are of the last one that "
        "loads, and of its neighbours.",
    ),
]
AsJson: TypeAlias = Annotated[
    bool, typer.Option("--json", help="The figures of an engine's steps as JSON.")
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
    check_target("--trace", trace)
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


def trace(
    file: TraceSource,
    png: PngTarget = None,
    svg: SvgTarget = None,
    steps: Steps = 20,
    step: OneStep = None,
    as_json: AsJson = False,
) -> None:
    """Show a recorded timeline, or the steps of an engine that was recorded with --trace.

    Of an engine: a row for each of the last --steps steps, with what it
    waited for and what was loaded beside it, then where the time went; one
    step with --step. "pause": before the step the device had none. Pictures
    need matplotlib: pip install interlace\\[plot].
    """
    targets: dict[Kind, str | None] = {"png": png, "svg": svg}
    for kind, target in targets.items():
        if target is not None:
            check_target(f"--{kind}", target)
    from interlace.bench.engine_trace.parse import read_file as read_engine_file

    engine = read_engine_file(file)
    if engine is not None:
        from interlace.bench.engine_trace import picture as engine_picture

        _show_engine(engine, steps, step, as_json=as_json)
        _draw(targets, lambda kind: engine_picture.draw_picture(engine, kind, step))
        return
    if step is not None or as_json:
        raise typer.BadParameter(
            "--step and --json are for files that `--trace` of an engine wrote."
        )
    from interlace.bench.step_trace import picture
    from interlace.bench.step_trace.file import read_file

    found = read_file(file)
    _tell(found, sys.stdout)
    _draw(targets, lambda kind: picture.draw_picture(found, kind))


def _show_engine(found: EngineTrace, num_steps: int, step: int | None, *, as_json: bool) -> None:
    from interlace.bench.engine_trace.text import lines, step_view, to_dict

    if as_json:
        typer.echo(json_module.dumps(to_dict(found, num_steps, step), indent=1))
    elif step is None:
        _echo(lines(found, num_steps), sys.stdout)
    else:
        _echo(step_view(found, step), sys.stdout)


def _draw(targets: Mapping[Kind, str | None], draw: Callable[[Kind], bytes]) -> None:
    """`draw` makes the content of a picture."""
    for kind, target in targets.items():
        if target is not None:
            _write(f"--{kind}", target, draw(kind))


def _tell(found: AnyTrace, stream: TextIO) -> None:
    """The names in it may come from anywhere."""
    from interlace.bench.step_trace.text import lines

    _echo(lines(found), stream)


def _echo(lines: Iterable[str], stream: TextIO) -> None:
    for line in lines:
        typer.echo(harmless(line), file=stream)


def _write(option: str, target: str, content: bytes) -> None:
    with writing(option, target):
        Path(target).write_bytes(content)
