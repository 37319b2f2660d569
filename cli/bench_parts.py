"""Benchmarks in parts: which ones are asked for, and each shown as soon as it is done.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import enum
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from interlace.bench.part_names import ALL, chosen
from interlace.cli.bench_output import StillProgress, print_table, write_json
from interlace.cli.live.beside import screen_beside
from interlace.cli.metrics_option import shared_metrics
from interlace.cli.own_process import frozen_heap
from interlace.cli.progress import progress_for
from interlace.cli.running import run
from interlace.cli.trace_option import tell_of_traces, trace_target

if TYPE_CHECKING:
    from interlace.bench.part_reports import Seen
    from interlace.bench.report import Report
    from interlace.bench.session import Prepared
    from interlace.bench.settings import Settings
    from interlace.engine.ports import Progress

P = TypeVar("P", bound=enum.StrEnum)


def parse_parts(parts: type[P], names: Sequence[str], default: Sequence[P]) -> tuple[P, ...]:
    """The parts of these names. Raises: `typer.BadParameter`."""
    try:
        return chosen(parts, names, default)
    except ValueError as error:
        known = ", ".join((*parts, ALL))
        raise typer.BadParameter(f"{error}: choose of {known}.", param_hint="--part") from error


def measure_parts(
    benchmark: str,
    settings: Settings,
    measure: Callable[[Prepared, Progress, Seen], Coroutine[Any, Any, None]],
    json: str | None,
    *,
    live: bool = False,
    trace: str | None = None,
    metrics: int | None = None,
) -> None:
    """Load, and let `measure` run on an event loop. What is done is written as JSON, whatever
    comes. With `live` tables come when all is done: until then the view has the terminal. `trace`
    is for its engines: see `Traces`."""
    from interlace.bench.part_reports import merged
    from interlace.bench.session import prepare
    from interlace.bench.traces import Traces

    done: list[Report] = []
    traces = Traces(trace_target(trace))

    def seen(report: Report) -> None:
        done.append(report)
        if not live:
            print_table(report, json)

    try:
        with (
            shared_metrics(metrics) as shared,
            contextlib.closing(prepare(settings, progress_for(), shared, traces)) as prepared,
            screen_beside(live, StillProgress(sys.stderr)) as progress,
            frozen_heap(),
        ):
            run(lambda: measure(prepared, progress, seen))
    finally:
        for report in done if live else ():
            print_table(report, json)
        if done:
            write_json(merged(benchmark, done), json)
        tell_of_traces(traces.written)
