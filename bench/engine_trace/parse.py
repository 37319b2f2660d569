"""Reads a trace of an engine from JSON, and checks all of it. See `interlace.engine.trace_file`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args

from interlace.engine.engine_trace import (
    EngineTrace,
    EngineTraceFacts,
    HostTimes,
    LeftOut,
    TracedRequest,
    TracedStep,
)
from interlace.engine.errors import ConfigError
from interlace.engine.file_access import refusing
from interlace.engine.outputs import FinishReason
from interlace.engine.step_timings import MOST, LayerTiming, StepTiming, TransferTiming
from interlace.engine.trace_file import FORMAT

MAX_FILE_BYTES = 256 << 20
_HEAD_BYTES = 4096
"""In which a file says what it is."""
_MOST_LAYERS = 1024
_MODES = ("NONE", "PIECEWISE", "FULL")


def from_json(text: str) -> EngineTrace:
    """The reverse of `to_json`. Raises: `ConfigError`, which says what is wrong, and not where the
    text came from."""
    try:
        return _trace(json.loads(text, parse_constant=_refuse_constant))
    except RecursionError:
        raise ConfigError("it is nested too deep") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(f"{type(error).__name__}: {error}"[:200]) from error


def read_file(path: Path) -> EngineTrace | None:
    """The trace in a file; None if it does not say that it is one.

    Raises: `ConfigError` if it says so, and is damaged, or larger than 256 MiB.
    """
    with (
        refusing(f"{path} cannot be read", "name what --trace wrote"),
        path.open("rb") as file,
    ):
        head = file.read(_HEAD_BYTES)
        if FORMAT.encode() not in head:
            return None
        content = head + file.read(MAX_FILE_BYTES + 1 - len(head))
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(
            f"{path} is larger than 256 MiB, which no trace is: name what --trace wrote."
        )
    try:
        return from_json(content.decode("utf-8"))
    except (ConfigError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is a damaged trace of an engine ({error}): name a file that --trace wrote."
        ) from error


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a number")


def _trace(document: Any) -> EngineTrace:
    """Raises what a wrong shape raises by itself, or `ValueError`."""
    other = document["otherData"]
    if other["format"] != FORMAT:
        raise ValueError(f"its format is not {FORMAT!r}")
    facts = _facts(other)
    reader = _Reader(facts.num_layers)
    for event in document["traceEvents"]:
        reader.take(event)
    return reader.trace(facts, _left_out(other["left_out"]))


def _facts(other: Any) -> EngineTraceFacts:
    connector = other["kv_connector"]
    facts = EngineTraceFacts(
        model=_text(other["model"]),
        dtype=_text(other["dtype"]),
        device=_text(other["device"]),
        machine=_text(other["machine"]),
        clock=_one_of(other["clock"], ("device", "host")),
        num_layers=_whole(other["num_layers"]),
        kv_connector=None if connector is None else _text(connector),
        interlace=_text(other["interlace"]),
        torch=_text(other["torch"]),
    )
    if facts.num_layers > _MOST_LAYERS:
        raise ValueError(f"num_layers is {facts.num_layers}")
    return facts


def _left_out(other: Any) -> LeftOut:
    return LeftOut(
        steps=_whole(other["steps"]),
        transfers=_whole(other["transfers"]),
        requests=_whole(other["requests"]),
        timings=_whole(other["timings"]),
        events=_whole(other["events"]),
    )


class _Reader:
    """Takes one event after another; those that only viewers need are left out."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._steps: dict[int, TracedStep] = {}
        self._timings: dict[int, StepTiming] = {}
        self._layers: dict[int, list[LayerTiming]] = {}
        self._num_layers_of: dict[int, int] = {}
        self._transfers: list[TransferTiming] = []
        self._requests: list[TracedRequest] = []

    def take(self, event: Any) -> None:
        """One event of the file."""
        kind = (event["ph"], event.get("cat"))
        match kind:
            case ("X", "host"):
                step = _host_step(event)
                _add(self._steps, step.step_id, step)
            case ("X", "step"):
                self._take_step(event)
            case ("X", "layer"):
                self._layers.setdefault(_whole(event["args"]["step"]), []).append(_layer(event))
            case ("X", "load" | "save"):
                self._transfers.append(_transfer(event, self._num_layers))
            case ("b", "request"):
                self._requests.append(_request(event["args"]))

    def _take_step(self, event: Any) -> None:
        args = event["args"]
        begin_s, end_s = _span(event)
        timing = StepTiming(
            step_id=_whole(args["step"]),
            num_scheduled_tokens=_tokens(args["tokens"]),
            mode=_one_of(args["mode"], _MODES),
            is_gated=_flag(args["gated"]),
            begin_s=begin_s,
            end_s=end_s,
        )
        _add(self._timings, timing.step_id, timing)
        self._num_layers_of[timing.step_id] = _whole(args["layers"])

    def trace(self, facts: EngineTraceFacts, left_out: LeftOut) -> EngineTrace:
        """All of it. Raises: `ValueError` if parts do not fit each other."""
        if not self._timings.keys() <= self._steps.keys():
            raise ValueError("a step was timed of which the event loop knows nothing")
        if not self._layers.keys() <= self._timings.keys():
            raise ValueError("a layer is of a step that was not timed")
        return EngineTrace(
            facts,
            tuple(self._step(self._steps[step_id]) for step_id in sorted(self._steps)),
            tuple(self._transfers),
            tuple(self._requests),
            left_out,
        )

    def _step(self, step: TracedStep) -> TracedStep:
        timing = self._timings.get(step.step_id)
        if timing is None:
            return step
        layers = tuple(self._layers.get(step.step_id, ()))
        _check_layers(timing, layers, self._num_layers_of[step.step_id], self._num_layers)
        whole = StepTiming(
            timing.step_id,
            timing.num_scheduled_tokens,
            timing.mode,
            timing.is_gated,
            timing.begin_s,
            timing.end_s,
            layers,
        )
        return TracedStep(step.step_id, step.num_scheduled_tokens, step.host, whole)


def _check_layers(
    step: StepTiming, layers: tuple[LayerTiming, ...], told: int, num_layers: int
) -> None:
    """Raises: `ValueError`."""
    name = f"step {step.step_id}"
    if len(layers) != told or told not in (0, num_layers):
        raise ValueError(f"{name} has {len(layers)} layers of {told}, the model {num_layers}")
    if [layer.layer for layer in layers] != list(range(told)):
        raise ValueError(f"the layers of {name} are not each there once, in order")
    times = [step.begin_s]
    for layer in layers:
        times += [layer.arrived_s, layer.passed_s, layer.end_s]
    if any(before > after for before, after in itertools.pairwise([*times, step.end_s])):
        raise ValueError(f"{name} runs backwards")
    if any(one.end_s != after.arrived_s for one, after in itertools.pairwise(layers)):
        raise ValueError(f"a layer of {name} does not begin where the one before it ends")


def _host_step(event: Any) -> TracedStep:
    args = event["args"]
    scheduled, launched, tokens, done = args["times"]
    host = HostTimes(_maybe_s(scheduled), _maybe_s(launched), _maybe_s(tokens), _maybe_s(done))
    return TracedStep(_whole(args["step"]), _tokens(args["tokens"]), host)


def _layer(event: Any) -> LayerTiming:
    arrived_s, end_s = _span(event)
    args = event["args"]
    return LayerTiming(_whole(args["layer"]), arrived_s, _seconds(args["passed"]), end_s)


def _transfer(event: Any, num_layers: int) -> TransferTiming:
    args = event["args"]
    begin_s, end_s = _span(event)
    step_id, error = args["step_id"], args["error"]
    piece = TransferTiming(
        lane=_text(args["lane"]),
        way=_way(event["cat"]),
        request_ids=tuple(_text(one) for one in _list(args["request_ids"])),
        first_layer=_whole(args["first_layer"]),
        end_layer=_whole(args["end_layer"]),
        num_blocks=_whole(args["num_blocks"]),
        num_bytes=_whole(args["num_bytes"]),
        copied_by=_text(args["copied_by"]),
        begin_s=begin_s,
        end_s=end_s,
        step_id=None if step_id is None else _whole(step_id),
        error=None if error is None else _text(error),
        failed_ids=tuple(_text(one) for one in _list(args["failed_ids"])),
        transfer=_text(args["transfer"]),
    )
    if not piece.first_layer < piece.end_layer <= max(num_layers, piece.first_layer + 1):
        raise ValueError(f"a transfer has layers {piece.first_layer} to {piece.end_layer}")
    return piece


def _request(args: Any) -> TracedRequest:
    times, reason = args["times"], args["finish_reason"]
    numbers = {
        name: None if args[name] is None else _whole(args[name])
        for name in (
            "num_prompt_tokens",
            "num_generated_tokens",
            "num_local_cached_tokens",
            "num_external_cached_tokens",
        )
    }
    return TracedRequest(
        request_id=_text(args["request_id"]),
        queued_s=_maybe_s(times["queued"]),
        scheduled_s=_maybe_s(times["scheduled"]),
        first_token_s=_maybe_s(times["first_token"]),
        finished_s=_maybe_s(times["finished"]),
        finish_reason=None if reason is None else _reason(reason),
        num_preemptions=_whole(args["num_preemptions"]),
        **numbers,
    )


def _add(known: dict[int, Any], step_id: int, value: object) -> None:
    if step_id in known:
        raise ValueError(f"step {step_id} is there twice")
    known[step_id] = value


def _tokens(value: Any) -> tuple[tuple[str, int], ...]:
    return tuple((_text(request_id), _whole(number)) for request_id, number in value.items())


def _span(event: Any) -> tuple[float, float]:
    """(begin, end) in seconds."""
    begin, length = _ns(event["ts"]), _ns(event["dur"])
    return begin / 1e9, (begin + length) / 1e9


def _seconds(value: object) -> float:
    return _ns(value) / 1e9


def _maybe_s(value: object) -> float | None:
    return None if value is None else _seconds(value)


def _ns(value: object) -> int:
    """Of microseconds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"a time is {value!r:.40}")
    if not 0 <= value < 1e12:
        raise ValueError(f"a time is {value!r:.40} us")
    return round(value * 1000)


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST:
        raise ValueError(f"{value!r:.40} is not a whole number from 0 to {MOST}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r:.40} is neither true nor false")
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.40} is no list")
    return value


def _one_of(value: object, known: Iterable[str]) -> str:
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{value!r:.40} is none of {', '.join(known)}")
    return value


def _way(value: object) -> Literal["load", "save"]:
    return "load" if _one_of(value, ("load", "save")) == "load" else "save"


def _reason(value: object) -> FinishReason:
    for reason in get_args(FinishReason):
        if value == reason:
            found: FinishReason = reason
            return found
    raise ValueError(f"{value!r:.40} is no reason to finish")
