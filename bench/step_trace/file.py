"""A timeline as a file for Perfetto and chrome://tracing, and back. JSON; knows no engine.

Each lane is a thread of one process. Its blocks are complete events, with gate waits and kernels
nested in them. `otherData` says what was run, and has the format, one for each kind of timeline.
Only files that were written here are read back.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

from interlace.bench.step_trace.intervals import Interval
from interlace.bench.step_trace.parse import HYBRID_FORMAT, STEP_FORMAT, TIDS, from_json
from interlace.bench.step_trace.trace import AnyTrace, Span, StepTrace
from interlace.engine.errors import ConfigError
from interlace.engine.file_access import refusing
from interlace.engine.perfetto import complete_event, metadata_event

MAX_FILE_BYTES = 64 << 20
_LONGEST_NAME = 120
"""Of a kernel: those of libraries are longer, and say little more."""


def to_json(trace: AnyTrace) -> str:
    """One event a line, with a final line break."""
    format_name = STEP_FORMAT if isinstance(trace, StepTrace) else HYBRID_FORMAT
    other = {"format": format_name, **dataclasses.asdict(trace.facts)}
    events = ",\n".join(json.dumps(event) for event in _events(trace))
    return (
        f'{{"displayTimeUnit": "ms",\n"otherData": {json.dumps(other)},\n'
        f'"traceEvents": [\n{events}\n]}}\n'
    )


def _events(trace: AnyTrace) -> Iterator[dict[str, object]]:
    yield metadata_event("process_name", 0, {"name": _title(trace)})
    for lane, tid in TIDS.items():
        yield metadata_event("thread_name", tid, {"name": lane})
        yield metadata_event("thread_sort_index", tid, {"sort_index": tid})
    for number, span in enumerate(trace.spans):
        args: dict[str, object] = {"layer": span.layer, "part": span.part}
        args |= {"request": trace.facts.request_id} | _step_of(trace, number)
        if span.lane == "load":
            args["bytes"] = span.num_bytes
        if span.blocks is not None:
            args["blocks"] = list(span.blocks)
        yield _complete(_name(span), span.lane, span, Interval(span.begin_ns, span.end_ns), args)
        if span.wait is not None:
            yield _complete("gate", "wait", span, span.wait, {"of": number, "layer": span.layer})
        for piece in span.pieces:
            when = Interval(piece.begin_ns, piece.end_ns)
            yield _complete(piece.name[:_LONGEST_NAME], "piece", span, when, {"of": number})


def _title(trace: AnyTrace) -> str:
    if isinstance(trace, StepTrace):
        return f"step {trace.facts.step_id}"
    return f"request {trace.facts.request_id}"


def _step_of(trace: AnyTrace, number: int) -> dict[str, object]:
    """The step that the span with this number is of; a slice is of none."""
    if isinstance(trace, StepTrace):
        return {"step": trace.facts.step_id}
    place = number - len(trace.load)
    if place < 0:
        return {}
    return {"step": trace.facts.steps[place // (trace.num_layers + 2)].step_id}


def _name(span: Span) -> str:
    if span.blocks is not None:
        return f"blocks {span.label}"
    return span.part if span.layer is None else f"layer {span.layer}"


def _complete(
    name: str, category: str, span: Span, when: Interval, args: dict[str, object]
) -> dict[str, object]:
    """An event on the lane of `span`."""
    return complete_event(name, category, TIDS[span.lane], when.begin_ns, when.end_ns, args)


def read_file(path: Path) -> AnyTrace:
    """The timeline in a file. Raises: `ConfigError` if it cannot be read, is larger than 64 MiB, or
    is not what `to_json` writes."""
    with (
        refusing(f"{path} cannot be read", "name what `interlace bench timeline --trace` wrote"),
        path.open("rb") as file,
    ):
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(
            f"{path} is larger than 64 MiB, which no timeline is: name a file that"
            " `interlace bench timeline --trace` wrote."
        )
    try:
        return from_json(content.decode("utf-8"))
    except (ConfigError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is no timeline of a step ({error}): name a file that `interlace bench timeline"
            " --trace` wrote."
        ) from error
