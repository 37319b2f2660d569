"""A trace of an engine as a file for Perfetto and chrome://tracing. JSON; knows no engine.

Lanes are threads of one process: compute, load, bulk, store, whatever else connectors call theirs,
and host, which is the event loop. A step is a complete event on "compute", with its layers nested
in it and gate waits in those; requests are asynchronous events. `otherData` says what was recorded.
`interlace.bench.engine_trace` reads it back, and only what is written here.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from interlace.engine.engine_trace import EngineTrace, TracedRequest, TracedStep
from interlace.engine.errors import ConfigError
from interlace.engine.file_access import reason_of, replacing
from interlace.engine.options import is_path
from interlace.engine.perfetto import complete_event, metadata_event
from interlace.engine.step_timings import LayerTiming, StepTiming, TransferTiming

FORMAT = "interlace engine trace 1"
_LANES = ("compute", "load", "bulk", "store")
"""Those that there always are, from above."""
_HOST_TID = 1000
"""Below all lanes."""


def to_json(trace: EngineTrace) -> Iterator[str]:
    """The file's text, a part at a time: one event a line, with a final line break."""
    facts, left_out = dataclasses.asdict(trace.facts), dataclasses.asdict(trace.left_out)
    other = {"format": FORMAT, **facts, "left_out": left_out}
    yield f'{{"displayTimeUnit": "ms",\n"otherData": {json.dumps(other)},\n"traceEvents": [\n'
    yield json.dumps(metadata_event("process_name", 0, {"name": f"interlace {trace.facts.model}"}))
    for event in _events(trace):
        yield ",\n" + json.dumps(event)
    yield "\n]}\n"


def _events(trace: EngineTrace) -> Iterator[dict[str, object]]:
    tids = _tids(trace.transfers)
    for name, tid in tids.items():
        yield metadata_event("thread_name", tid, {"name": name})
        yield metadata_event("thread_sort_index", tid, {"sort_index": tid})
    for step in trace.steps:
        yield from _host_events(step)
        if step.timing is not None:
            yield from _compute_events(step.timing)
    for piece in trace.transfers:
        yield _transfer(piece, tids[piece.lane])
    for number, request in enumerate(trace.requests):
        yield from _request_events(request, number)


def _tids(transfers: Iterable[TransferTiming]) -> dict[str, int]:
    """Lane -> its thread in the file."""
    others = sorted({piece.lane for piece in transfers}.difference(_LANES))
    tids = {name: tid for tid, name in enumerate((*_LANES, *others), start=1)}
    return {**tids, "host": _HOST_TID}


def _compute_events(step: StepTiming) -> Iterator[dict[str, object]]:
    args: dict[str, object] = {
        "step": step.step_id,
        "tokens": dict(step.num_scheduled_tokens),
        "mode": step.mode,
        "gated": step.is_gated,
        "layers": len(step.layers),
    }
    yield _complete(f"step {step.step_id}", "step", 1, step.begin_s, step.end_s, args)
    if not step.layers:
        return
    within = {"step": step.step_id}
    yield _complete("embed", "part", 1, step.begin_s, step.layers[0].arrived_s, within)
    for layer in step.layers:
        yield from _layer_events(layer, step.step_id)
    yield _complete("head", "part", 1, step.layers[-1].end_s, step.end_s, within)


def _layer_events(layer: LayerTiming, step_id: int) -> Iterator[dict[str, object]]:
    args: dict[str, object] = {"step": step_id, "layer": layer.layer}
    args["passed"] = _us(layer.passed_s)
    yield _complete(f"layer {layer.layer}", "layer", 1, layer.arrived_s, layer.end_s, args)
    if layer.passed_s > layer.arrived_s:
        yield _complete("gate", "wait", 1, layer.arrived_s, layer.passed_s, args)


def _host_events(step: TracedStep) -> Iterator[dict[str, object]]:
    host = step.host
    times = (host.scheduled_s, host.launched_s, host.tokens_s, host.done_s)
    known = [one for one in times if one is not None]
    begin = min(known, default=0.0)
    launched = begin if host.launched_s is None else max(begin, host.launched_s)
    args: dict[str, object] = {
        "step": step.step_id,
        "tokens": dict(step.num_scheduled_tokens),
        "times": [None if one is None else _us(one) for one in times],
    }
    yield _complete(f"launch {step.step_id}", "host", _HOST_TID, begin, launched, args)
    if host.tokens_s is not None and host.done_s is not None and host.tokens_s <= host.done_s:
        within = {"step": step.step_id}
        times_of = (host.tokens_s, host.done_s)
        yield _complete(f"apply {step.step_id}", "apply", _HOST_TID, *times_of, within)


def _transfer(piece: TransferTiming, tid: int) -> dict[str, object]:
    args = dataclasses.asdict(piece)
    for name in ("begin_s", "end_s"):
        del args[name]
    first, last = piece.first_layer, piece.end_layer - 1
    name = f"layer {first}" if first >= last else f"layers {first}-{last}"
    return _complete(name, piece.way, tid, piece.begin_s, piece.end_s, args)


def _request_events(request: TracedRequest, number: int) -> Iterator[dict[str, object]]:
    """From queued to finished, with instants between; what is not known is left out."""
    args = dataclasses.asdict(request)
    times = {
        name.removesuffix("_s"): args.pop(name)
        for name in ("queued_s", "scheduled_s", "first_token_s", "finished_s")
    }
    args["times"] = {name: None if at is None else _us(at) for name, at in times.items()}
    known = {name: at for name, at in times.items() if at is not None}
    begin, end = min(known.values(), default=0.0), max(known.values(), default=0.0)
    base: dict[str, object] = {"cat": "request", "id": number, "pid": 1, "tid": 0}
    base["name"] = request.request_id
    yield {**base, "ph": "b", "ts": _us(begin), "args": args}
    for name in ("scheduled", "first_token"):
        if name in known:
            yield {**base, "ph": "n", "ts": _us(known[name]), "args": {"what": name}}
    yield {**base, "ph": "e", "ts": _us(end)}


def _complete(
    name: str, category: str, tid: int, begin_s: float, end_s: float, args: Mapping[str, object]
) -> dict[str, object]:
    """An event with a begin and a length."""
    return complete_event(name, category, tid, round(begin_s * 1e9), round(end_s * 1e9), args)


def _us(time_s: float) -> float:
    """Microseconds, as the format has it, to the nanosecond."""
    return round(time_s * 1e9) / 1000


# ---------------------------------------------------------------- the file


def check_target(path: Path) -> None:
    """Refuse what cannot be written, before anything is recorded; nothing is left behind. Blocks.

    What is there and is no file, a device for instance, would be replaced by one: it is refused.
    Raises: `ConfigError`.
    """
    try:
        _refuse_others(path)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error


def write_trace(path: Path, trace: EngineTrace) -> None:
    """Write `path`, which others see whole or not at all, readable by its owner alone. Blocks: the
    text of a long trace takes a second to make.

    Raises: `ConfigError`.
    """
    try:
        _refuse_others(path)
        with replacing(path) as file:
            file.writelines(part.encode("utf-8") for part in to_json(trace))
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error


def _refuse_others(path: Path) -> None:
    """Raises: `OSError` for what is neither a file nor a link to one, `ValueError` for what no file
    can be called."""
    if not is_path(path):
        raise ValueError("no file can be called that")
    if path.is_dir():
        raise IsADirectoryError("it is a folder")
    if path.exists() and not path.is_file():
        raise OSError("it is no file")


def _unwritable(path: Path, error: OSError | ValueError) -> ConfigError:
    return ConfigError(
        f"the trace {path} cannot be written: {reason_of(error)}. Name a file in an existing"
        " folder."
    )
