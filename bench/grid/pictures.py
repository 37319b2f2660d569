"""A run of a grid as SVG pictures: bars with spread; first token against prefix length.

matplotlib is optional: `pip install interlace[plot]`. Equal runs give equal files.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from interlace.bench.grid.record import GridRun
from interlace.bench.grid.tables import crossings, series_of
from interlace.bench.plotting import import_plotting
from interlace.bench.spread import Spread

WIDTH_INCHES = 9.0
BAR_INCHES = 0.3
_INK, _PAPER, _FAINT = "#1f2933", "#ffffff", "#7b8794"
_SETTINGS = {"svg.hashsalt": "interlace", "font.family": "DejaVu Sans", "font.size": 9}


def require_matplotlib() -> None:
    """Raises: `ConfigError` if it is not there."""
    _import("matplotlib")


def draw_bars(run: GridRun) -> bytes | None:
    """A bar for each arm: the median first token, with a line from the lowest to the highest. None
    if nothing was measured. Raises: `ConfigError` without matplotlib."""
    arms = [
        (arm.name, Spread.of(value * 1e3 for value in arm.measured("first_token_s")))
        for arm in run.arms
        if arm.measured("first_token_s")
    ]
    if not arms:
        return None

    def draw(axes: Any) -> None:
        places = range(len(arms))
        medians = [spread.median for _, spread in arms]
        reach = [
            [spread.median - spread.low for _, spread in arms],
            [spread.high - spread.median for _, spread in arms],
        ]
        axes.barh(places, medians, xerr=reach, color="#5b8fb9", ecolor=_INK, capsize=2)
        axes.set_yticks(list(places), [name for name, _ in arms])
        axes.invert_yaxis()
        axes.set_xlim(left=0)
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

    def draw(axes: Any) -> None:
        colours = {}
        for one in series:
            spreads = list(one.first_tokens.values())
            line = axes.errorbar(
                list(one.first_tokens),
                [spread.median * 1e3 for spread in spreads],
                yerr=[
                    [(spread.median - spread.low) * 1e3 for spread in spreads],
                    [(spread.high - spread.median) * 1e3 for spread in spreads],
                ],
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
        axes.legend(frameon=False)

    return _picture(run, 4.0, draw)


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
        axes.set_title(f"{run.title}{part}", color=_INK, fontsize=10, loc="left")
        metadata = {"Date": None, "Creator": "interlace bench run"}
        figure.savefig(content, format="svg", metadata=metadata)
    return content.getvalue()


def _import(module: str) -> Any:
    return import_plotting(module, "--plot", or_else=", or leave --plot out.")
