"""What is kept of a run of a grid: every sample, and what a figure means nothing without. As JSON.

A file is written under another name first, so that whoever reads it finds a whole one.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from interlace.bench.grid.axes import AXES, Value
from interlace.engine.errors import ConfigError
from interlace.engine.file_access import refusing, replacing

FORMAT: Final = "interlace bench run 1"
MAX_BYTES: Final = 64 << 20
"""Of a file that is read."""


@dataclasses.dataclass(frozen=True, slots=True)
class GridSample:
    """One arm in one round. Seconds; tokens of all its requests."""

    round: int
    """0 warmed up, and is in no figure."""
    place: int
    """In the round's order, from 0."""
    first_token_s: float
    """From the call until every request had its first token."""
    step_s: float | None
    """Between two tokens of a request, at the median; None if one token was asked for."""
    decode_tokens_per_s: float | None
    """Of all requests together; likewise."""
    cached_tokens: int
    """That the device held."""
    loaded_tokens: int
    """That the connector brought."""
    computed_tokens: int
    """The other ones of the prompts."""
    device_s: float | None = None
    """From what was queued first to the last sampled token; None where it is not told."""
    load_s: float | None = None
    """Of all loads, read and copied, without what was between them; likewise."""
    load_bytes: int | None = None
    worst_lag_s: float | None = None
    """Of the event loop."""


@dataclasses.dataclass(frozen=True, slots=True)
class ArmRun:
    """One arm, and what was measured of it so far."""

    name: str
    point: Mapping[str, Value]
    """Its values by key."""
    resolved: Mapping[str, str]
    """The device and dtype that came of "auto"."""
    samples: tuple[GridSample, ...] = ()

    def measured(self, field: str) -> list[float]:
        """That field of all measured rounds, where it is known."""
        found = (getattr(sample, field) for sample in self.samples if sample.round)
        return [float(value) for value in found if value is not None]


@dataclasses.dataclass(frozen=True, slots=True)
class GridRun:
    """A run, whole or as far as it came."""

    title: str
    file: str
    """Name of the grid's file, without its folders."""
    digest: str
    """SHA-256 of that file, in hexadecimal."""
    started: str
    """ISO 8601, UTC."""
    version: str
    """Of Interlace."""
    seed: int
    repeats: int
    """That were asked for."""
    rounds: int
    """Measured ones that are whole."""
    grid: Mapping[str, Any]
    """As the file says it."""
    machine: Mapping[str, str | int | None]
    arms: tuple[ArmRun, ...]

    @property
    def is_partial(self) -> bool:
        """Whether it was stopped before its end."""
        return self.rounds < self.repeats

    @property
    def has_samples(self) -> bool:
        """Whether anything was measured, be it to warm up."""
        return any(arm.samples for arm in self.arms)

    def to_json(self) -> str:
        """Indented JSON with a final line break."""
        record = {"format": FORMAT, "is_partial": self.is_partial, **dataclasses.asdict(self)}
        return json.dumps(record, indent=1, ensure_ascii=False, default=str) + "\n"


def digest_of(content: bytes) -> str:
    """Of a grid's file."""
    return hashlib.sha256(content).hexdigest()


def file_name(stem: str, started: datetime.datetime, digest: str) -> str:
    """`group-size-20260801-120000-1a2b3c4d.json`."""
    return f"{stem}-{started:%Y%m%d-%H%M%S}-{digest[:8]}.json"


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace `path` by a whole file, or leave it as it was. Blocks; any thread.

    Raises: `ConfigError` if it cannot be written.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    with (
        refusing(f"{path} cannot be written", "choose another folder by --out"),
        replacing(path) as file,
    ):
        file.write(data)
        os.fchmod(file.fileno(), 0o644)


def read_run(path: Path) -> GridRun:
    """A run that `interlace bench run` has written. Blocks.

    Raises: `ConfigError` if it cannot be read, or is something else.
    """
    with (
        refusing(f"{path} cannot be read", "name what `interlace bench run` wrote"),
        path.open("rb") as file,
    ):
        content = file.read(MAX_BYTES + 1)
    return parse_run(content, str(path))


def parse_run(content: bytes, name: str) -> GridRun:
    """`read_run` of a content; messages call it `name`. Raises: `ConfigError`."""
    try:
        if len(content) > MAX_BYTES:
            raise ValueError(f"it is longer than {MAX_BYTES >> 20} MiB")
        record = json.loads(content)
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        return _run_of(record)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{name} is no result of `interlace bench run`"
            f" ({type(error).__name__}: {error}): give a file that it has written."
        ) from error


def _run_of(record: Mapping[str, Any]) -> GridRun:
    fields = {name: record[name] for name in _names(GridRun) if name != "arms"}
    for name in ("title", "file", "digest", "started", "version"):
        _require(isinstance(fields[name], str), name)
    for name in ("seed", "repeats", "rounds"):
        _require(isinstance(fields[name], int), name)
    for name in ("grid", "machine"):
        _require(isinstance(fields[name], dict), name)
    return GridRun(**fields, arms=tuple(_arm_of(arm) for arm in record["arms"]))


def _arm_of(record: Mapping[str, Any]) -> ArmRun:
    point = record["point"]
    _require(isinstance(record["name"], str), "name")
    _require(isinstance(point, dict) and set(point) <= set(AXES), "point")
    _require(
        all(value is None or isinstance(value, str | int | float) for value in point.values()),
        "point",
    )
    _require(isinstance(record["resolved"], dict), "resolved")
    samples = tuple(_sample_of(one) for one in record["samples"])
    return ArmRun(record["name"], point, record["resolved"], samples)


def _sample_of(record: Mapping[str, Any]) -> GridSample:
    found = {name: record[name] for name in _names(GridSample)}
    for name, value in found.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        _require(is_number or (value is None and name not in _ALWAYS), name)
    return GridSample(**found)


_ALWAYS = ("round", "place", "first_token_s", "cached_tokens", "loaded_tokens", "computed_tokens")


def _names(cls: type) -> Iterable[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"{what} is not what it should be")


def with_samples(run: GridRun, samples: Sequence[Sequence[GridSample]], rounds: int) -> GridRun:
    """The same run with these samples of each arm."""
    arms = tuple(
        dataclasses.replace(arm, samples=tuple(taken))
        for arm, taken in zip(run.arms, samples, strict=True)
    )
    return dataclasses.replace(run, arms=arms, rounds=rounds)
