"""A run of a grid as SVG pictures: bars with spread; first token against prefix length.

matplotlib is optional: `pip install interlace[plot]`. Equal runs give equal files.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from interlace.bench.grid.axes import Value
from interlace.bench.grid.record import GridRun
from interlace.bench.grid.tables import crossings, series_of
from interlace.bench.plotting import import_plotting
from interlace.bench.spread import Spread

K = TypeVar("K")

WIDTH_INCHES = 9.0
BAR_INCHES = 0.3
_INK, _PAPER, _FAINT = "#1f2933", "#ffffff", "#7b8794"
_COLOURS = ("#5b8fb9", "#d9822b", "#3f9b63", "#a45a9c", "#b8860b", "#c0504d", "#4f6d7a")
"""Told apart without red and green side by side."""
_STYLES = ("-", "--", "-.", ":")
_SETTINGS = {"svg.hashsalt": "interlace", "font.family": "DejaVu Sans", "font.size": 9}


def require_matplotlib() -> None:
    """Raises: `ConfigError` if it is not there."""
    _import("matplotlib")


def draw_bars(run: GridRun) -> bytes | None:
    """A bar for each arm: the median first token, with a line from the lowest to the highest. None
    if nothing was measured. Raises: `ConfigError` without matplotlib."""
    measured = [arm for arm in run.arms if arm.measured("first_token_s")]
    arms = [
        (arm.name, Spread.of(value * 1e3 for value in arm.measured("first_token_s")))
        for arm in measured
    ]
    if not arms:
        return None
    colours = _by_value((_way(arm.point) for arm in measured), _COLOURS)

    def draw(axes: Any) -> None:
        places = range(len(arms))
        medians = [spread.median for _, spread in arms]
        reach = [
            [spread.median - spread.low for _, spread in arms],
            [spread.high - spread.median for _, spread in arms],
        ]
        shades = [colours[_way(arm.point)] for arm in measured]
        axes.barh(places, medians, xerr=reach, color=shades, ecolor=_INK, capsize=2)
        for place, (_, spread) in zip(places, arms, strict=True):
            axes.annotate(
                _number(spread.median),
                (spread.high, place),
                xytext=(4, 0),
                textcoords="offset points",
                verticalalignment="center",
            )
        axes.set_yticks(list(places), [name for name, _ in arms])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.08 * max(spread.high for _, spread in arms))  # room for a number
        axes.set_xlabel("first token, ms: median, lowest and highest")

    return _picture(run, 1.1 + BAR_INCHES * len(arms), draw)


def draw_prefixes(run: GridRun) -> bytes | None:
    """First token against tokens of the prefix, a line for each way, with the lengths marked at
    which loading takes as long as computing again. None if no two lengths were measured.

    Raises: `ConfigError` without matplotlib.
    """
    series = [one for one in series_of(run) if len(one.first_tokens) > 1]
    if not series:
        return None

    # The way is the line's style and what else varies its colour: many lines lie close together.
    styles = _by_value((_way(one.point) for one in series), _STYLES)
    shades = _by_value((_others(one.point) for one in series), _COLOURS)

    def draw(axes: Any) -> None:
        colours = {}
        series.sort(key=lambda one: -list(one.first_tokens.values())[-1].median)
        for one in series:
            spreads = list(one.first_tokens.values())
            line = axes.errorbar(
                list(one.first_tokens),
                [spread.median * 1e3 for spread in spreads],
                yerr=[
                    [(spread.median - spread.low) * 1e3 for spread in spreads],
                    [(spread.high - spread.median) * 1e3 for spread in spreads],
                ],
                color=shades[_others(one.point)],
                linestyle=styles[_way(one.point)],
                marker="o",
                markersize=3,
                capsize=2,
                label=one.name,
            )
            colours[one.name] = line.lines[0].get_color()
        for crossing in crossings(run):
            if crossing.tokens is not None:
                colour = colours.get(crossing.name, _FAINT)
                axes.axvline(crossing.tokens, color=colour, linestyle=":", linewidth=1)
                axes.annotate(
                    f"{crossing.tokens:.0f}",
                    (crossing.tokens, 1),
                    xycoords=("data", "axes fraction"),
                    xytext=(2, -9),
                    textcoords="offset points",
                    color=colour,
                )
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens of the prefix; dotted: loading takes as long as computing again")
        axes.set_ylabel("first token, ms")
        # Beside the lines, in the order in which they end.
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1), handlelength=3)

    return _picture(run, 4.0, draw)


def _way(point: Mapping[str, Value]) -> Value:
    """By which KV comes, or the engine is told apart where it does not."""
    return point.get("load_mode") or point.get("connector") or point.get("engine")


def _others(point: Mapping[str, Value]) -> tuple[Value, ...]:
    """What varies beside the way, and the prefix."""
    return tuple(
        value
        for key, value in point.items()
        if key not in ("load_mode", "prefix") and value is not None
    )


def _by_value(values: Iterable[K], looks: tuple[str, ...]) -> dict[K, str]:
    """A look for each different value, in order; from the first one again if there are many."""
    return dict(zip(dict.fromkeys(values), itertools.cycle(looks)))


def _number(milliseconds: float) -> str:
    return f"{milliseconds:,.{0 if milliseconds >= 100 else 1}f}"


def _machine(facts: Mapping[str, str | int | None]) -> list[str]:
    """What it was measured on, without which the figures mean nothing."""
    cores, threads = facts.get("cores"), facts.get("torch_threads")
    told = [str(facts["gpu"])] if facts.get("gpu") else []
    if facts.get("cpu"):
        told.append(f"{cores} cores of {facts['cpu']}" if cores else str(facts["cpu"]))
    if facts.get("torch"):
        by = f" on {threads} thread{'' if threads == 1 else 's'}" if threads else ""
        told.append(f"torch {facts['torch']}{by}")
    return told


def _picture(run: GridRun, height: float, draw: Callable[[Any], None]) -> bytes:
    matplotlib = _import("matplotlib")
    backend = _import("matplotlib.backends.backend_svg")
    content = io.BytesIO()
    with matplotlib.rc_context(_SETTINGS):
        figure = _import("matplotlib.figure").Figure(
            (WIDTH_INCHES, height), facecolor=_PAPER, layout="constrained"
        )
        backend.FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        draw(axes)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        part = f" ({run.rounds} of {run.repeats} rounds)" if run.is_partial else ""
        figure.suptitle(
            f"{run.title}{part}", color=_INK, fontsize=10, x=0.01, horizontalalignment="left"
        )
        rounds = f"{run.rounds} round{'' if run.rounds == 1 else 's'}"
        axes.set_title(
            ", ".join([*_machine(run.machine), rounds]), color=_FAINT, fontsize=8, loc="left"
        )
        metadata = {"Date": None, "Creator": "interlace bench run"}
        figure.savefig(content, format="svg", metadata=metadata)
    return content.getvalue()


def _import(module: str) -> Any:
    return import_plotting(module, "--plot", or_else=", or leave --plot out.")
