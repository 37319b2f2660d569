"""Reads a timeline from JSON, and checks all of it. See `file.py`."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

from interlace.bench.step_trace.intervals import Interval
from interlace.bench.step_trace.trace import Piece, Span, StepTrace, TraceFacts
from interlace.engine.errors import ConfigError

FORMAT = "interlace step timeline 1"
TIDS = {"load": 1, "compute": 2}
"""Lane -> its thread in the file."""


def from_json(text: str) -> StepTrace:
    """The reverse of `to_json`, but for names of kernels that were cut off. Raises: `ConfigError`,
    which says what is wrong, and not where that came from."""
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
        return _trace(document)
    except RecursionError:
        raise ConfigError("it is nested too deep") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(f"{type(error).__name__}: {error}"[:200]) from error


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a number")


def _trace(document: Any) -> StepTrace:
    """Raises what a wrong shape raises by itself, or `ValueError`."""
    other = dict(document["otherData"])
    if other.pop("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT!r}")
    facts = _facts(other)
    builders: list[_Builder] = []
    for event in document["traceEvents"]:
        if event["ph"] != "X":
            continue
        if event["cat"] in TIDS:
            builders.append(_Builder(event))
        else:
            builders[_whole(event["args"]["of"])].add(event)
    spans = [builder.span() for builder in builders]
    load = tuple(span for span in spans if span.lane == "load")
    compute = tuple(span for span in spans if span.lane == "compute")
    _check_lanes(load, compute)
    return StepTrace(facts, load, compute)


def _facts(other: dict[str, Any]) -> TraceFacts:
    for field in dataclasses.fields(TraceFacts):
        is_number = field.type == "int"
        value = other[field.name]
        if is_number:
            _whole(value)
        elif not isinstance(value, str):
            raise ValueError(f"{field.name} is {value!r:.40}")
    facts = TraceFacts(**other)
    if facts.group_size < 1 or facts.clock not in ("device", "host"):
        raise ValueError(f"group_size is {facts.group_size} and clock is {facts.clock!r:.40}")
    return facts


class _Builder:
    """One span, whose nested events follow it."""

    def __init__(self, event: Any) -> None:
        self._event = event
        self._wait: Interval | None = None
        self._pieces: list[Piece] = []

    def add(self, event: Any) -> None:
        """An event within it."""
        when = _when(event)
        if event["cat"] == "wait":
            self._wait = when
        elif isinstance(event["name"], str):
            self._pieces.append(Piece(event["name"], *when))

    def span(self) -> Span:
        """With all that was added."""
        event, args = self._event, self._event["args"]
        begin, end = _when(event)
        layer, part = args["layer"], args["part"]
        if part not in ("embed", "layer", "head") or (layer is None) != (part != "layer"):
            raise ValueError(f"a block has the part {part!r:.40} and the layer {layer!r:.40}")
        inside = [Interval(piece.begin_ns, piece.end_ns) for piece in self._pieces]
        if self._wait is not None:
            inside.append(self._wait)
        for inner in inside:
            if inner.begin_ns < begin or inner.end_ns > end:
                raise ValueError(f"{event['name']!r:.40} does not hold what is nested in it")
        return Span(
            event["cat"],
            part,
            None if layer is None else _whole(layer),
            begin,
            end,
            _whole(args.get("bytes", 0)),
            self._wait,
            tuple(self._pieces),
        )


def _when(event: Any) -> Interval:
    begin, length = event["ts"], event["dur"]
    for number in (begin, length):
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise TypeError(f"a time is {number!r:.40}")
        if not 0 <= number < 1e12:
            raise ValueError(f"a time is {number!r:.40} us")
    begin_ns = round(begin * 1000)
    return Interval(begin_ns, begin_ns + round(length * 1000))


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r:.40} is not a whole number from 0 on")
    return value


def _check_lanes(load: tuple[Span, ...], compute: tuple[Span, ...]) -> None:
    """Both lanes have all layers in order, after each other."""
    layers = [*range(len(load))]
    parts = [span.part for span in compute]
    if not layers or [span.layer for span in load] != layers:
        raise ValueError("its load lane does not have one block for each layer, in order")
    if parts != ["embed", *(["layer"] * len(layers)), "head"]:
        raise ValueError("its compute lane is not embed, as many layers as are loaded, and head")
    if [span.layer for span in compute[1:-1]] != layers:
        raise ValueError("its compute lane does not have the layers in order")
    for lane in (load, compute):
        if any(a.end_ns > b.begin_ns for a, b in itertools.pairwise(lane)):
            raise ValueError(f"blocks of its {lane[0].lane} lane overlap")
