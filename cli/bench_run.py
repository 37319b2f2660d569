"""`interlace bench run` and `interlace bench compare`: a grid of arms from a file, and two runs.

Reads options and files only; `interlace.bench.grid` measures. Imports no torch.
"""

from __future__ import annotations

import contextlib
import datetime
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from interlace.cli.bench_options import JsonTarget, Live
from interlace.cli.bench_output import (
    PIPE_WIDTH,
    StillProgress,
    check_json_target,
    print_table,
    write_text,
)
from interlace.cli.live.beside import check_terminal, screen_beside
from interlace.cli.metrics_option import MetricsPort, shared_metrics
from interlace.cli.own_process import frozen_heap
from interlace.cli.progress import progress_for
from interlace.cli.running import run as run_coroutine
from interlace.cli.screen import harmless
from interlace.engine.clock import MonotonicClock
from interlace.engine.errors import ConfigError, InterlaceError
from interlace.engine.file_access import refusing

if TYPE_CHECKING:
    from interlace.bench.grid.compare import Comparison
    from interlace.bench.grid.record import GridRun
    from interlace.bench.grid.session import PreparedGrid
    from interlace.bench.grid.spec import GridSpec

MAX_FILE_BYTES = 1 << 20

GridFile = Annotated[
    Path,
    typer.Argument(metavar="FILE.toml", help="The grid; bench/runs/ has some."),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="Write the result, and pictures, here; made if it is missing. Default: results/ beside"
        " FILE.",
    ),
]
ScratchPath = Annotated[
    str | None,
    typer.Option(
        "--path",
        metavar="DIR",
        help="Where the stores of arms keep files: in a new folder in DIR, removed at the end."
        " Default: where temporary files go.",
    ),
]
Plot = Annotated[
    bool,
    typer.Option(
        "--plot",
        help="Draw pictures beside the result. Needs matplotlib: pip install interlace\\[plot].",
    ),
]


def run(
    file: GridFile,
    out: Out = None,
    path: ScratchPath = None,
    plot: Plot = False,
    live: Live = False,
    metrics: MetricsPort = None,
    json: JsonTarget = None,
) -> None:
    """Measure the arms of a grid in turns, and keep every sample.

    \b
        repeats = 5
        \\[grid]
        connector = "PipelineConnector"
        load_mode = ["cached", "recompute", "bulk", "layerwise"]
        prefix = [256, 512]
        new = 16

    A list is an axis; the arms are the product. Keys: engine, model, device,
    dtype, connector, store, load_mode, graph_mode, group_size, delay_ms,
    max_num_batched_tokens, max_inflight_steps, prefix, new, batch, output.
    docs/run-experiments.md says what they mean, and shows [\\[exclude]],
    [\\[points]] and \\[connectors.NAME].

    Ctrl-C keeps the rounds that are whole, and what there is of the next one.
    """
    from interlace.bench.grid.record import digest_of
    from interlace.bench.grid.spec import parse_grid
    from interlace.bench.scratch import scratch_folder

    check_json_target(json)
    check_terminal(live)
    content = _read(file)
    spec = parse_grid(content, file.name)
    if plot:
        from interlace.bench.grid.pictures import require_matplotlib

        require_matplotlib()
    from interlace.bench.grid.session import prepare_grid  # torch comes with it

    folder = _result_folder(file, out)
    target = _free_name(folder, file.stem, digest_of(content))
    with (
        scratch_folder(path, "--path") as scratch,
        shared_metrics(metrics) as shared,
        contextlib.closing(prepare_grid(spec, scratch, progress_for(), shared)) as prepared,
        frozen_heap(),
    ):
        found = _measure(prepared, file.name, digest_of(content), target, json, live=live)
        if plot:
            _draw(prepared, spec, found, target, json, live=live)


def _measure(
    prepared: PreparedGrid,
    name: str,
    digest: str,
    target: Path,
    json: str | None,
    *,
    live: bool,
) -> GridRun:
    """Run the rounds; whatever comes, what was measured is shown, and written."""
    from interlace import __version__
    from interlace.bench.grid.record import write_atomically
    from interlace.bench.grid.session import GridRunner, empty_run
    from interlace.bench.grid.tables import report_of

    clock = MonotonicClock()
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    empty = empty_run(prepared, file=name, digest=digest, started=started, version=__version__)
    found = empty

    def saved(so_far: GridRun) -> None:
        write_atomically(target, so_far.to_json())

    try:
        with screen_beside(live, StillProgress(sys.stderr, clock)) as progress:
            runner = GridRunner(prepared, empty, clock, progress, saved)
            try:
                run_coroutine(runner.measure)
            finally:
                found = runner.run
    finally:
        if found.has_samples:
            report = report_of(found)
            if report.rows:
                print_table(report, json)
            if json is not None:
                write_text(found.to_json(), json)
            write_atomically(target, found.to_json())
            _tell(f"{'so far' if found.is_partial else 'written'}: {target}", json)
    return found


def _draw(
    prepared: PreparedGrid,
    spec: GridSpec,
    found: GridRun,
    target: Path,
    json: str | None,
    *,
    live: bool,
) -> None:
    from interlace.bench.grid.pictures import draw_bars, draw_prefixes
    from interlace.bench.grid.record import write_atomically
    from interlace.bench.grid.timelines import record_median, timeline_plan
    from interlace.bench.step_trace.picture import draw_picture

    def write(kind: str, content: bytes | None) -> None:
        if content is not None:
            place = target.with_name(f"{target.stem}-{kind}.svg")
            write_atomically(place, content)
            _tell(f"written: {place}", json)

    write("bars", draw_bars(found))
    write("prefix", draw_prefixes(found))
    planned = timeline_plan(spec, found)
    if isinstance(planned, str):
        _tell(f"no timeline: {planned}", json)
        return
    try:
        with screen_beside(live, StillProgress(sys.stderr)) as progress:
            timeline = run_coroutine(
                lambda: record_median(prepared, planned, MonotonicClock(), progress)
            )
    except InterlaceError as error:  # what was measured stands without it
        _tell(f"no timeline: {error}", json)
    else:
        write("timeline", draw_picture(timeline, "svg"))  # fonts are files: no loop runs now


def compare(
    a: Annotated[Path, typer.Argument(metavar="A.json", help="What `bench run` has written.")],
    b: Annotated[Path, typer.Argument(metavar="B.json", help="Another one, of the same grid.")],
    json: JsonTarget = None,
) -> None:
    """Ratios B / A of the medians of two runs, arm by arm, with their range.

    The range holds 95% of the ratios that come of resampling the rounds of
    each run. "within noise": it holds 1. Arms are matched by their values, so
    runs of different grids are compared where they have the same arms; what
    differs, and other machines, are named.
    """
    from interlace.bench.grid.compare import compare_runs
    from interlace.bench.grid.record import read_run

    check_json_target(json)
    found = compare_runs(read_run(a), read_run(b))
    _show(found, json)
    if json is not None:
        write_text(found.to_json(), json)


def _show(found: Comparison, json: str | None) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title="B / A: ratio of medians (95% of resampled ones)", box=box.ASCII2)
    table.add_column("arm", no_wrap=True)
    for name in ("figure", "A ms", "B ms", "B / A"):
        table.add_column(name, justify="right" if name != "figure" else "left")
    table.add_column("B is")
    for one in found.compared:
        ratio = one.ratio
        table.add_row(
            Text(harmless(one.arm)),
            one.figure,
            f"{one.a.median * 1e3:,.2f}",
            f"{one.b.median * 1e3:,.2f}",
            f"{ratio.ratio:.3f} ({ratio.low:.3f} to {ratio.high:.3f})",
            one.verdict,
        )
    stream = sys.stderr if json == "-" else sys.stdout
    console = Console(file=stream, width=None if stream.isatty() else PIPE_WIDTH, highlight=False)
    console.print(table)
    for title, lines in (
        ("the grids differ", found.differences),
        ("the machines differ", found.machines),
    ):
        for line in lines:
            _tell(f"{title}: {line}", json)


def _tell(line: str, json: str | None) -> None:
    """Beside the table."""
    typer.echo(harmless(line), err=json == "-")


def _read(file: Path) -> bytes:
    """Raises: `ConfigError`."""
    with (
        refusing(f"{file} cannot be read", "name a grid's file; bench/runs/ has some"),
        file.open("rb") as stream,
    ):
        content = stream.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{file} is longer than {MAX_FILE_BYTES >> 20} MiB: that is no grid.")
    return content


def _result_folder(file: Path, out: Path | None) -> Path:
    """Made if it is missing; something can be written there. Raises: `ConfigError`."""
    from interlace.bench.scratch import scratch_folder

    folder = file.parent / "results" if out is None else out
    with refusing(f"{folder} cannot be made", "name a folder for results by --out"):
        folder.mkdir(parents=True, exist_ok=True)
    with scratch_folder(str(folder), "--out"):
        pass
    return folder


def _free_name(folder: Path, stem: str, digest: str) -> Path:
    """Of a file that is not there yet."""
    from interlace.bench.grid.record import file_name

    target = folder / file_name(stem, datetime.datetime.now(datetime.UTC), digest)
    number = 1
    while target.exists():
        number += 1
        target = target.with_name(f"{target.stem.partition('+')[0]}+{number}.json")
    return target
