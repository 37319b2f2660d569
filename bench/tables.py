"""Draws a report for people. A pure function of the report; knows no file or terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from interlace.bench.report import Check, Report
from interlace.bench.spread import Spread


def draw(report: Report) -> Group:
    """The report as rich renderables: figures, checks, limits, settings, machine."""
    parts: list[Table | Text] = [_figures(report)]
    if report.checks:
        parts.append(_checks(report.checks))
    if report.limits:
        limits = ", ".join(f"{name} {_spread(s)}" for name, s in report.limits.items())
        parts.append(Text(f"limits in the same run: {limits}"))
    parts += [Text(note) for note in report.notes]
    parts.append(Text(_line(report.settings), style="dim"))
    parts.append(Text(_line(report.machine), style="dim"))
    return Group(*parts)


def _figures(report: Report) -> Table:
    names = list(dict.fromkeys(name for row in report.rows for name in row.figures))
    table = Table(title=f"{report.benchmark}: median (lowest to highest)", box=box.ASCII2)
    table.add_column("case", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right")
    for row in report.rows:
        cells = (row.figures.get(name) for name in names)
        table.add_row(row.case, *("-" if c is None else _spread(c) for c in cells))
    return table


def _checks(checks: tuple[Check, ...]) -> Table:
    table = Table(box=box.ASCII2)
    table.add_column("check", no_wrap=True)
    table.add_column("value", justify="right")
    table.add_column("to reach", justify="right")
    table.add_column("")
    for check in checks:
        mark = Text("met", "green") if check.met else Text("missed", "red")
        table.add_row(check.name, _number(check.value), _bar(check), mark)
    return table


def _bar(check: Check) -> str:
    if check.at_least is not None:
        return f">= {_number(check.at_least)}"
    return f"<= {_number(check.at_most)}" if check.at_most is not None else ""


def _spread(spread: Spread) -> str:
    if len(spread.samples) == 1:
        return _number(spread.median)
    return f"{_number(spread.median)} ({_number(spread.low)} to {_number(spread.high)})"


def _number(value: float) -> str:
    """Three figures, without an exponent."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _line(facts: Mapping[str, object]) -> str:
    return ", ".join(f"{k} {v}" for k, v in facts.items() if v is not None)
