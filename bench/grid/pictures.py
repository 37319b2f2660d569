"""A run of a grid as SVG pictures: bars with spread; first token against prefix length.

Below the title stands what was run where. matplotlib is optional: `pip install interlace[plot]`.
Equal runs give equal files.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from interlace.bench.grid.axes import AXES, RECOMPUTE
from interlace.bench.grid.record import GridRun
from interlace.bench.grid.tables import Series, crossings, series_of
from interlace.bench.plotting import import_plotting
from interlace.bench.spread import Spread
from interlace.bench.step_trace.picture import short_name

WIDTH_INCHES = 9.0
BAR_INCHES = 0.26
_GAP = 0.6
"""Between bars whose names begin differently, in bars."""
_INK, _PAPER, _FAINT = "#1f2933", "#ffffff", "#616e7c"
_COLOURS = ("#4c8bbf", "#d9773f", "#4ca283", "#b86fa3", "#c2a02d", "#7b8794")
"""As bright as each other, and told apart by people who do not see red and green as others do."""
_DASHES: tuple[Any, ...] = ("-", "--", "-.", (0, (5, 1, 1, 1, 1, 1)))
_MARKERS = ("o", "s", "^", "D")
_SETTINGS = {
    "svg.hashsalt": "interlace",
    "text.parse_math": False,  # a dollar sign of a title is one
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}
_COUNTED = "{x:,g}"
"""Of an axis: `1,200`."""


def require_matplotlib() -> None:
    """Raises: `ConfigError` if it is not there."""
    _import("matplotlib")


def draw_bars(run: GridRun) -> bytes | None:
    """A bar for each arm: the median first token, with a line from the lowest to the highest. Those
    whose names begin alike have a colour in common. None if nothing was measured.

    Raises: `ConfigError` without matplotlib.
    """
    arms = [
        (arm.name, Spread.of(value * 1e3 for value in arm.measured("first_token_s")))
        for arm in run.arms
        if arm.measured("first_token_s")
    ]
    if not arms:
        return None
    places, colours = _bar_groups([name for name, _ in arms])

    def draw(axes: Any) -> None:
        medians = [spread.median for _, spread in arms]
        reach = [
            [spread.median - spread.low for _, spread in arms],
            [spread.high - spread.median for _, spread in arms],
        ]
        error = {"elinewidth": 1, "capsize": 2, "ecolor": _INK}
        axes.barh(places, medians, xerr=reach, color=colours, error_kw=error)
        for place, (_, spread) in zip(places, arms, strict=True):
            axes.annotate(
                _told(spread.median),
                (spread.high, place),
                xytext=(5, 0),
                textcoords="offset points",
                verticalalignment="center_baseline",
                fontsize=8,
            )
        axes.set_yticks(places, [name for name, _ in arms])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(places[-1] + 0.6, -0.6)
        axes.set_xlim(0, 1.08 * max(spread.high for _, spread in arms))
        axes.xaxis.set_major_formatter(_COUNTED)
        axes.set_xlabel("first token, ms: the median; a line from the lowest to the highest")

    return _picture(run, 1.1 + BAR_INCHES * (places[-1] + 1.2), draw)


def _bar_groups(names: Sequence[str]) -> tuple[list[float], list[str]]:
    """Where each bar is, and its colour, by how its name begins: up to a comma. Names of which no
    two begin alike are one group."""
    groups = [name.partition(",")[0] for name in names]
    if len(set(groups)) == len(groups):
        groups = [""] * len(groups)
    places = [0.0]
    for before, group in itertools.pairwise(groups):
        places.append(places[-1] + 1 + (_GAP if group != before else 0))
    kinds = list(dict.fromkeys(groups))
    return places, [_COLOURS[kinds.index(group) % len(_COLOURS)] for group in groups]


def _told(milliseconds: float) -> str:
    """With two digits at least."""
    return f"{milliseconds:,.0f}" if milliseconds >= 10 else f"{milliseconds:.2g}"


def draw_prefixes(run: GridRun) -> bytes | None:
    """First token against tokens of the prefix, a line for each way, with the lengths marked at
    which loading takes as long as computing again. None if no two lengths were measured.

    Raises: `ConfigError` without matplotlib.
    """
    series = [one for one in series_of(run) if len(one.first_tokens) > 1]
    if not series:
        return None
    looks = _looks_of(series)
    marks = [(one.name, one.tokens) for one in crossings(run) if one.tokens is not None]

    def draw(axes: Any) -> None:
        lines, colours = [], {}
        for one, look in zip(series, looks, strict=True):
            spreads = list(one.first_tokens.values())
            line = axes.errorbar(
                list(one.first_tokens),
                [spread.median * 1e3 for spread in spreads],
                yerr=[
                    [(spread.median - spread.low) * 1e3 for spread in spreads],
                    [(spread.high - spread.median) * 1e3 for spread in spreads],
                ],
                color=look.colour,
                linestyle=look.dash,
                marker=look.marker,
                markersize=4,
                capsize=2,
                elinewidth=0.8,
                label=one.name,
            )
            lines.append((spreads[-1].median, one.name, line))
            colours[one.name] = look.colour
        for name, tokens in marks:
            colour = colours.get(name, _FAINT)
            axes.axvline(tokens, color=colour, linestyle=":", linewidth=1)
            axes.annotate(
                f"{tokens:.0f}",
                (tokens, 1),
                xycoords=("data", "axes fraction"),
                xytext=(3, -9),
                textcoords="offset points",
                color=colour,
            )
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter(_COUNTED)
        axes.yaxis.set_major_formatter(_COUNTED)
        dotted = "; dotted: loading takes as long as computing again" if marks else ""
        axes.set_xlabel(f"tokens of the prefix{dotted}")
        axes.set_ylabel("first token, ms: median, lowest to highest")
        # In the order in which the lines end, so that the eye finds them; beside them, not on them.
        lines.sort(key=lambda line: -line[0])
        axes.legend(
            [line for *_, line in lines],
            [name for _, name, _ in lines],
            loc="center left",
            bbox_to_anchor=(1.01, 0.5),
            frameon=False,
            handlelength=3.2,
        )

    return _picture(run, 4.2, draw)


class _Look(NamedTuple):
    colour: str
    dash: Any
    marker: str


def _looks_of(series: Sequence[Series]) -> list[_Look]:
    """Of each line: its dashes say the load mode, its colour what else varies, or the mode too if
    nothing does. Computing again, which the others are held against, is dark."""
    own = [one for one in series if one.point.get("load_mode") != RECOMPUTE]
    modes = list(dict.fromkeys(one.point.get("load_mode") for one in own))
    others = [key for key in AXES if key not in ("load_mode", "prefix") and _varies(key, own)]
    rests = list(dict.fromkeys(tuple(one.point.get(key) for key in others) for one in own))
    looks = []
    for one in series:
        if one not in own:
            looks.append(_Look(_INK, "-", "o"))
            continue
        mode = modes.index(one.point.get("load_mode"))
        rest = rests.index(tuple(one.point.get(key) for key in others))
        colour = rest if len(rests) > 1 else mode
        looks.append(
            _Look(
                _COLOURS[colour % len(_COLOURS)],
                _DASHES[mode % len(_DASHES)],
                _MARKERS[mode % len(_MARKERS)],
            )
        )
    return looks


def _varies(key: str, series: Sequence[Series]) -> bool:
    """Among those to which it matters."""
    return len({one.point.get(key) for one in series} - {None}) > 1


def _where(run: GridRun) -> str:
    """Model, number type and machine, as far as all arms have them in common."""
    models = {short_name(str(arm.point.get("model"))) for arm in run.arms}
    dtypes = {arm.resolved.get("dtype") for arm in run.arms}
    facts = run.machine
    cores = f"{facts.get('cores')} cores of {facts.get('cpu')}"
    threads = facts.get("torch_threads")
    if threads is not None:
        cores += f", torch on {threads} thread{'' if threads == 1 else 's'}"
    is_on_gpu = all(arm.resolved.get("device") == "cuda" for arm in run.arms)
    pieces = [str(found.pop()) for found in (models, dtypes) if len(found) == 1]
    pieces.append(str(facts["gpu"]) if is_on_gpu and "gpu" in facts else cores)
    rounds = f"{run.rounds} of {run.repeats}" if run.is_partial else f"{run.rounds}"
    return f"{', '.join(pieces)}; {rounds} round{'' if run.rounds == 1 else 's'}"


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
        axes.set_title(run.title, fontsize=10.5, loc="left", pad=19)
        axes.annotate(
            _where(run),
            (0, 1),
            xycoords="axes fraction",
            xytext=(0, 6),
            textcoords="offset points",
            color=_FAINT,
            fontsize=8,
        )
        metadata = {"Date": None, "Creator": "interlace bench run"}
        figure.savefig(content, format="svg", metadata=metadata)
    return content.getvalue()


def _import(module: str) -> Any:
    return import_plotting(module, "--plot", or_else=", or leave --plot out.")
