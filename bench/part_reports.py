"""Reports of a benchmark's parts, each shown when it is done, and all of them as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from interlace.bench.report import Report
from interlace.engine.errors import InterlaceError

Seen = Callable[[Report], None]
"""Gets the report of each part when it is done."""


@contextmanager
def naming(part: str) -> Iterator[None]:
    """Let what could not be measured say in which part that was."""
    try:
        yield
    except InterlaceError as error:
        if type(error) is not InterlaceError:  # it says itself what it is about
            raise
        raise InterlaceError(f"{part}: {error}") from error


def part_title(benchmark: str, part: str) -> str:
    """What the report of one part is called."""
    return f"{benchmark}: {part}"


def merged(benchmark: str, reports: Sequence[Report]) -> Report:
    """All parts as one, at least one; each row and check says of which part it is."""
    replace, first = dataclasses.replace, reports[0]
    names = [report.benchmark.removeprefix(part_title(benchmark, "")) for report in reports]
    named = list(zip(names, reports, strict=True))
    return replace(
        first,
        benchmark=benchmark,
        rows=tuple(replace(r, case=f"{name}: {r.case}") for name, one in named for r in one.rows),
        checks=tuple(
            replace(c, name=f"{name}: {c.name}") for name, one in named for c in one.checks
        ),
    )
