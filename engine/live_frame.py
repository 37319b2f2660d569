"""What a live view is sent: frames, one JSON object a line, and how they are read again.

A frame is a snapshot of the engine, and rates made of its events. Both ends of the socket use this
module; it knows no socket. No object is made but those named here, whatever a line says.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

from interlace.engine.errors import LiveViewError
from interlace.engine.snapshot import EngineSnapshot

SCHEMA = 1
"""Of frames. It grows when something is renamed, goes, or means something else; a reader ignores
what was only added."""
MOST_RUNNING = 64
MOST_WAITING = 32
"""Requests that a frame names, of those that there are."""

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class EngineFacts:
    """What does not change while an engine is open."""

    pid: int
    model: str
    device: str
    dtype: str
    kv_connector: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """Of the last two seconds, or since somebody began to look; seconds, tokens. None: nothing
    happened by which it could be told."""

    window_s: float
    generated_per_s: float
    """Tokens that were sampled."""
    computed_per_s: float
    """Tokens that steps computed, those of prompts too."""
    steps_per_s: float
    step_s: float | None
    """The median step."""
    longest_step_s: float | None
    busy_share: float
    """Of the time, in which a step was under way."""
    first_token_s: float | None
    """From a request's arrival, the median of the newest 32."""
    newest_first_token_s: float | None
    loop_lag_s: float
    """By which the event loop was late, at most."""
    num_lost_events: int
    """That came too fast to be counted here, since somebody began to look."""


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """One picture. `snapshot` names some requests only: see `num_running` and `num_waiting`."""

    schema: int
    number: int
    """Counts up by one: what is missing in between was lost, since the viewer was too slow."""
    engine: EngineFacts
    rates: Rates
    num_running: int
    num_waiting: int
    snapshot: EngineSnapshot


def frame_of(number: int, engine: EngineFacts, rates: Rates, snapshot: EngineSnapshot) -> Frame:
    """With the requests that come first."""
    return Frame(
        SCHEMA,
        number,
        engine,
        rates,
        len(snapshot.running),
        len(snapshot.waiting),
        dataclasses.replace(
            snapshot,
            running=snapshot.running[:MOST_RUNNING],
            waiting=snapshot.waiting[:MOST_WAITING],
        ),
    )


def to_line(frame: Frame) -> bytes:
    """As it is sent, with its end of line."""
    return json.dumps(_plain(frame), separators=(",", ":"), ensure_ascii=True).encode() + b"\n"


def _plain(value: Any) -> Any:
    """As JSON knows it. Quicker than `dataclasses.asdict`, which copies."""
    names = getattr(value, "__dataclass_fields__", None)
    if names is not None:
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return value


class FrameReader:
    """Reads lines of one engine."""

    def __init__(self) -> None:
        self._fields: dict[type, dict[str, Any]] = {}  # of a class, the kinds of its fields

    def read(self, line: bytes) -> Frame:
        """The frame that the line is.

        Raises: `LiveViewError` if it is none, or of another version of Interlace.
        """
        try:
            said = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _unreadable("it is not JSON") from error
        schema = said.get("schema") if isinstance(said, dict) else None
        if isinstance(schema, int) and schema != SCHEMA:
            raise LiveViewError(
                f"the engine sends frames of version {schema}, and this interlace reads version"
                f" {SCHEMA}: watch it with the interlace that it runs on."
            )
        return self._read(Frame, said, "the frame")

    def _read(self, cls: type[T], said: Any, path: str) -> T:
        if not isinstance(said, dict):
            raise _unreadable(f"{path} is no object")
        values = {}
        for name, kind in self._kinds(cls).items():
            if name not in said:
                raise _unreadable(f"{path} lacks {name!r}")
            values[name] = self._value(kind, said[name], name)
        return cls(**values)

    def _kinds(self, cls: type) -> dict[str, Any]:
        if cls not in self._fields:
            self._fields[cls] = typing.get_type_hints(cls)
        names = getattr(cls, "__dataclass_fields__", {})
        return {name: kind for name, kind in self._fields[cls].items() if name in names}

    def _value(self, kind: Any, said: Any, name: str) -> Any:
        origin, inner = get_origin(kind), get_args(kind)
        if origin in (typing.Union, types.UnionType):
            if said is None and type(None) in inner:
                return None
            kinds = [one for one in inner if one is not type(None)]
            return self._value(float if float in kinds else kinds[0], said, name)
        if origin is tuple and isinstance(said, list):
            return tuple(self._value(inner[0], each, name) for each in said)
        if origin is collections.abc.Mapping and isinstance(said, dict):
            return {key: self._value(inner[1], each, name) for key, each in said.items()}
        if origin is Literal and said in inner:
            return said
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            return self._read(kind, said, name)
        if kind is float and isinstance(said, int | float) and not isinstance(said, bool):
            return said
        if kind in (int, str, bool) and type(said) is kind:
            return said
        raise _unreadable(f"{name} is {str(said)[:40]!r}")


def _unreadable(why: str) -> LiveViewError:
    return LiveViewError(
        f"what the engine sent is no frame ({why}): watch it with the interlace that it runs on."
    )
