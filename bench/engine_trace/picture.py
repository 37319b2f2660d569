"""Draws the last steps of a trace: lanes over time, numbers of layers, waits hatched.

The look, and matplotlib, are those of `interlace.bench.step_trace.picture`. Equal traces give equal
files.
"""

from __future__ import annotations

from typing import Any

from interlace.bench.engine_trace.figures import rows_of
from interlace.bench.engine_trace.shape import window_of
from interlace.bench.engine_trace.text import titles
from interlace.bench.step_trace.picture import (
    ENDS,
    FIRST_TITLE,
    SECOND_TITLE,
    Drawing,
    Kind,
    draw,
    layer_colour,
    short_name,
    slice_colour,
)
from interlace.bench.step_trace.trace import Span
from interlace.engine.engine_trace import EngineTrace

_LEGEND = "numbers are layers; hatched: waiting at a gate; grey: before and after the layers"


def draw_picture(trace: EngineTrace, kind: Kind, step_id: int | None = None) -> bytes:
    """The content of a picture file: of one step, or of as many around the last one that loads as
    are readable. Raises: `ConfigError` without matplotlib, or if there is no such step."""
    window, facts = window_of(trace, step_id), trace.facts
    num_layers = max(facts.num_layers, 1)

    def colour(span: Span, ramps: Any) -> Any:
        if span.layer is not None:
            return layer_colour(span.layer, num_layers, ramps)
        return slice_colour(ramps) if span.part == "slice" else ENDS

    what, figures = titles(window, rows_of(trace))
    names = f"{short_name(facts.model)}, {facts.dtype}, {facts.machine or facts.device}"
    where = names.encode("utf-8", "replace").decode("utf-8")  # a path may be no text
    ids = [step.step_id for step in window.steps]
    marks = [(at, str(number)) for at, number in zip(window.begins, ids, strict=True)]
    drawing = Drawing(
        window.lanes,
        window.end_ns,
        colour,
        [(what, *FIRST_TITLE), (f"{where}; {figures}", *SECOND_TITLE)],
        _LEGEND if len(marks) == 1 else f"{_LEGEND}; dotted: a step begins, with its number",
        marks if len(marks) > 1 else (),
    )
    return draw(drawing, kind)
