"""Reads a timeline from JSON, and checks all of it. See `file.py`."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from interlace.bench.step_trace.intervals import Interval
from interlace.bench.step_trace.parse_facts import hybrid_facts, step_facts, whole
from interlace.bench.step_trace.parse_lanes import check_hybrid_lanes, check_step_lanes
from interlace.bench.step_trace.trace import AnyTrace, Blocks, HybridTrace, Piece, Span, StepTrace
from interlace.engine.errors import ConfigError, InterlaceError

STEP_FORMAT = "interlace step timeline 1"
"""Of a step that loads layer by layer."""
HYBRID_FORMAT = "interlace hybrid timeline 1"
"""Of a prompt from both ends."""
TIDS = {"load": 1, "compute": 2}
"""Lane -> its thread in the file."""


def from_json(text: str) -> AnyTrace:
    """The reverse of `to_json`, but for names of kernels that were cut off. Raises: `ConfigError`,
    which says what is wrong, and not where that came from."""
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
        return _trace(document)
    except RecursionError:
        raise ConfigError("it is nested too deep") from None
    except InterlaceError as error:
        raise ConfigError(str(error)[:200]) from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(f"{type(error).__name__}: {error}"[:200]) from error


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a number")


def _trace(document: Any) -> AnyTrace:
    """Raises what a wrong shape raises by itself, `ValueError` or `InterlaceError`."""
    other = dict(document["otherData"])
    format_name = other.pop("format")
    if format_name == STEP_FORMAT:
        facts = step_facts(other)
        lanes = _lanes(document["traceEvents"])
        check_step_lanes(lanes.load, lanes.compute)
        return StepTrace(lanes.load, lanes.compute, facts)
    if format_name == HYBRID_FORMAT:
        both_ends = hybrid_facts(other)
        lanes = _lanes(document["traceEvents"])
        check_hybrid_lanes(lanes.load, lanes.compute, both_ends)
        return HybridTrace(lanes.load, lanes.compute, both_ends)
    raise ValueError(f"its format is neither {STEP_FORMAT!r} nor {HYBRID_FORMAT!r}")


class _Lanes(NamedTuple):
    load: tuple[Span, ...]
    compute: tuple[Span, ...]


def _lanes(events: Any) -> _Lanes:
    builders: list[_Builder] = []
    for event in events:
        if event["ph"] != "X":
            continue
        if event["cat"] in TIDS:
            builders.append(_Builder(event))
        else:
            builders[whole(event["args"]["of"])].add(event)
    spans = [builder.span() for builder in builders]
    return _Lanes(
        tuple(span for span in spans if span.lane == "load"),
        tuple(span for span in spans if span.lane == "compute"),
    )


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
        if part not in ("embed", "layer", "head", "slice") or (layer is None) != (part != "layer"):
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
            None if layer is None else whole(layer),
            begin,
            end,
            whole(args.get("bytes", 0)),
            self._wait,
            tuple(self._pieces),
            _blocks(args["blocks"]) if part == "slice" else None,
        )


def _blocks(value: Any) -> Blocks:
    first, end = value
    return Blocks(whole(first), whole(end))


def _when(event: Any) -> Interval:
    begin, length = event["ts"], event["dur"]
    for number in (begin, length):
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise TypeError(f"a time is {number!r:.40}")
        if not 0 <= number < 1e12:
            raise ValueError(f"a time is {number!r:.40} us")
    begin_ns = round(begin * 1000)
    return Interval(begin_ns, begin_ns + round(length * 1000))
