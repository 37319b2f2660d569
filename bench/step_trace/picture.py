"""Draws a timeline with matplotlib: two lanes, a colour for each layer or slice, waits hatched.

About 900 pixels wide, on white, so that it can be read on light and on dark pages. Equal traces
give equal files. matplotlib is optional: `pip install interlace[plot]`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from interlace.bench.plotting import import_plotting
from interlace.bench.step_trace.figures import figures_of
from interlace.bench.step_trace.intervals import merged
from interlace.bench.step_trace.trace import AnyTrace, HybridTrace, Span, StepTrace

Kind = Literal["png", "svg"]

WIDTH_INCHES, HEIGHT_INCHES = 9.0, 2.6
_AXES = (0.078, 0.215, 0.91, 0.535)
"""Left, bottom, width, height, as parts of the figure."""
_PNG_DPI = 200
"""Twice 900 pixels, for sharp screens."""
_ABOVE_INCHES = (1 - _AXES[1] - _AXES[3]) * HEIGHT_INCHES
"""Of the axes, for titles."""
_LANE_INCHES = _AXES[3] * HEIGHT_INCHES / 2
"""For each lane beyond the second one."""
FIRST_TITLE, SECOND_TITLE = (0.025 * HEIGHT_INCHES, 11.0), (0.135 * HEIGHT_INCHES, 7.5)
"""(below the top in inches, points)."""
_BAR = 0.76
_INK, _FAINT, _PAPER, ENDS = "#1f2933", "#7b8794", "#ffffff", "#cbd2d9"
"""Text; waits; the ground; what is no layer."""
_DIGIT_INCHES = 0.065
"""About the width of a digit of a block's label."""
_HAIR_INCHES = 0.014
"""Two lines of the width of a span's edge."""
_RESOLUTION = 2000
"""Gaps shorter than this part of the width are not drawn."""
_LEGEND = "numbers are layers; hatched: waiting at a gate; grey: before and after the layers"
_HYBRID_LEGEND = (
    "numbers are blocks of the prompt above, layers below; grey: before and after the layers"
)
_LAYER_RAMP, _SLICE_RAMP = "viridis", "plasma"
_SETTINGS = {
    "svg.hashsalt": "interlace",
    "text.parse_math": False,
    "hatch.linewidth": 0.7,
    "font.family": "DejaVu Sans",
}
"""Ids within an SVG file come from a salt, and not from chance; a dollar sign in a model's name is
one; the font comes with matplotlib."""


class Drawing(NamedTuple):
    """What is drawn."""

    lanes: Mapping[str, Sequence[Span]]
    """From above."""
    end_ns: int
    colour: Callable[[Span, Any], Any]
    """Of a span, with matplotlib's ramps."""
    titles: Sequence[tuple[str, float, float]]
    """(text, how far below the top of the figure in inches, points)."""
    legend: str
    marks: Sequence[tuple[int, str]] = ()
    """(time, text) of vertical lines."""


def draw_picture(trace: AnyTrace, kind: Kind) -> bytes:
    """The content of a picture file. Raises: `ConfigError` without matplotlib."""
    drawing = Drawing(
        {"load": trace.load, "compute": trace.compute},
        trace.end_ns,
        lambda span, ramps: _colour(span, ramps, trace),
        _titles(trace),
        _HYBRID_LEGEND if isinstance(trace, HybridTrace) else _LEGEND,
    )
    return draw(drawing, kind)


def draw(drawing: Drawing, kind: Kind) -> bytes:
    """Likewise, of any lanes."""
    matplotlib = _require("matplotlib")
    backend = _require(f"matplotlib.backends.backend_{'agg' if kind == 'png' else 'svg'}")
    content = io.BytesIO()
    height = HEIGHT_INCHES + _LANE_INCHES * (len(drawing.lanes) - 2)
    # The salt can be given nowhere else; the settings are as before when this ends.
    with matplotlib.rc_context(_SETTINGS):
        figure = _require("matplotlib.figure").Figure((WIDTH_INCHES, height))
        figure.set_facecolor(_PAPER)
        _draw(figure, matplotlib.colormaps, drawing, height)
        if kind == "png":
            backend.FigureCanvasAgg(figure)
            figure.savefig(content, format="png", dpi=_PNG_DPI, metadata={"Software": None})
        else:
            backend.FigureCanvasSVG(figure)
            metadata = {"Date": None, "Creator": "interlace trace"}
            figure.savefig(content, format="svg", metadata=metadata)
    return content.getvalue()


def _require(module: str) -> Any:
    return import_plotting(module, "a picture")


def _draw(figure: Any, ramps: Any, drawing: Drawing, height: float) -> None:
    left, bottom, width, _ = _AXES
    above = _ABOVE_INCHES / height
    below = bottom * HEIGHT_INCHES / height
    axes = figure.add_axes((left, below, width, 1 - above - below))
    axes.set_facecolor(_PAPER)
    axes.set_xlim(0, max(drawing.end_ns, 1) / 1e6)
    axes.set_ylim(-0.5, len(drawing.lanes) - 0.5)
    heights = {name: float(len(drawing.lanes) - 1 - i) for i, name in enumerate(drawing.lanes)}
    for name, spans in drawing.lanes.items():
        for span in spans:
            _draw_span(axes, span, drawing.colour(span, ramps), drawing.end_ns, heights[name])
    for time_ns, text in drawing.marks:
        axes.axvline(time_ns / 1e6, color=_FAINT, linewidth=0.6, linestyle=(0, (2, 2)), zorder=0)
        axes.text(time_ns / 1e6, len(drawing.lanes) - 0.5, f" {text}", color=_FAINT, fontsize=6.5,
                  verticalalignment="top")  # fmt: skip
    axes.set_yticks(list(heights.values()), list(heights))
    axes.tick_params(colors=_INK, labelsize=9, length=3)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("ms", color=_INK, fontsize=9, labelpad=2)
    for name, spine in axes.spines.items():
        spine.set_visible(name == "bottom")
        spine.set_color(_INK)
    for text, down, size in drawing.titles:
        at = 1 - down / height
        figure.text(left, at, text, color=_INK, fontsize=size, verticalalignment="top")
    right, lowest = left + width, 0.03 * HEIGHT_INCHES / height
    figure.text(
        right, lowest, drawing.legend, color=_INK, fontsize=7.5, horizontalalignment="right"
    )


def _titles(trace: AnyTrace) -> list[tuple[str, float, float]]:
    """See `Drawing`."""
    facts, figures = trace.facts, figures_of(trace)
    where = f"{short_name(facts.model)}, {facts.dtype}, {facts.machine}"
    load = f"load {figures.load_s * 1e3:.1f} ms at {figures.load_gb_per_s:.1f} GB/s"
    of_what = "it beside computing" if isinstance(trace, StepTrace) else "the shorter lane hidden"
    hidden = f"{figures.hidden_share:.0%} of {of_what}"
    return [
        (f"{_what(trace)}: {figures.total_s * 1e3:.1f} ms", *FIRST_TITLE),
        (f"{where}; {load}, {hidden}", *SECOND_TITLE),
    ]


def _what(trace: AnyTrace) -> str:
    if isinstance(trace, StepTrace):
        loaded, new = trace.facts.loaded_tokens, trace.facts.new_tokens
        return f"{loaded:,} tokens loaded beside computing {new:,} more"
    facts = trace.facts
    ends = f"{facts.front_tokens:,} tokens computed, {facts.loaded_tokens:,} loaded from the back"
    return f"{ends}, {facts.new_tokens:,} more"


def short_name(model: str) -> str:
    """A model without the folders of its path: they are nobody's business. A hub id is whole."""
    return model if model.count("/") <= 1 else model.rsplit("/", 1)[1]


def _colour(span: Span, ramps: Any, trace: AnyTrace) -> Any:
    """Along a ramp without its darkest and its palest end: by the layer, or by where in the prompt
    a slice is."""
    if span.blocks is not None and isinstance(trace, HybridTrace):
        place, last, ramp = span.blocks.first, trace.facts.num_blocks - 1, ramps[_SLICE_RAMP]
    elif span.layer is not None:
        place, last, ramp = span.layer, trace.num_layers - 1, ramps[_LAYER_RAMP]
    else:
        return ENDS
    return _along(ramp, place, last)


def _draw_span(axes: Any, span: Span, colour: Any, total_ns: int, middle: float) -> None:
    place = (middle - _BAR / 2, _BAR)
    if span.wait is not None:
        wait = [(span.wait.begin_ns / 1e6, span.wait.length_ns / 1e6)]
        axes.broken_barh(
            wait, place, facecolor=_PAPER, edgecolor=_FAINT, hatch="/////", linewidth=0
        )
    busy = merged(span.busy, tolerance_ns=total_ns // _RESOLUTION)
    if not busy:
        return
    bars = [(part.begin_ns / 1e6, part.length_ns / 1e6) for part in busy]
    longest = max(busy, key=lambda part: part.length_ns)
    room = longest.length_ns / total_ns * _AXES[2] * WIDTH_INCHES
    edge = _PAPER if room > _HAIR_INCHES else colour  # or nothing would be left of it
    axes.broken_barh(bars, place, facecolor=colour, edgecolor=edge, linewidth=0.5)
    if len(span.label) * _DIGIT_INCHES < room:
        axes.text(
            (longest.begin_ns + longest.end_ns) / 2e6,
            middle,
            span.label,
            color=_INK if _is_pale(colour) else _PAPER,
            fontsize=7,
            horizontalalignment="center",
            verticalalignment="center_baseline",
        )


def layer_colour(layer: int, num_layers: int, ramps: Any) -> Any:
    """Along the ramp of layers."""
    return _along(ramps[_LAYER_RAMP], layer, num_layers - 1)


def slice_colour(ramps: Any) -> Any:
    """Of a slice whose place in its prompt is not known."""
    return _along(ramps[_SLICE_RAMP], 1, 2)


def _along(ramp: Any, place: int, last: int) -> Any:
    """Without its darkest and its palest end."""
    return ramp(0.12 + 0.76 * place / max(last, 1))


def _is_pale(colour: Any) -> bool:
    if isinstance(colour, str):
        return True
    red, green, blue = colour[:3]
    return bool(0.3 * red + 0.59 * green + 0.11 * blue > 0.5)
