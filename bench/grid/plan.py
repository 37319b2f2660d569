"""Names of a grid's arms, the order of each round, and which arms share an engine. Pure."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from interlace.bench.grid.axes import AXES, TRANSFORMERS
from interlace.bench.grid.points import Point
from interlace.bench.grid.spec import GridSpec
from interlace.bench.kv_blocks import BLOCK_SIZE

ROOM_FACTOR = 4
"""The pool, and host memory beside the prefixes, in the requests of the largest arm: what was
computed in between must not push a prefix out."""


class ModelKey(NamedTuple):
    """What is loaded once."""

    model: str
    device: str
    dtype: str


@dataclasses.dataclass(frozen=True, slots=True)
class EngineKey:
    """What an engine is made with: all that cannot be changed from request to request."""

    model: ModelKey
    engine: str
    connector: str | None = None
    store: str | None = None
    graph_mode: str | None = None
    group_size: int | None = None
    max_num_batched_tokens: int | None = None
    max_inflight_steps: int | None = None

    @property
    def is_theirs(self) -> bool:
        """Whether it is transformers."""
        return self.engine == TRANSFORMERS

    @property
    def label(self) -> str:
        """What it is, for people: engines on other models may have the same."""
        facts = {
            "graph_mode": self.graph_mode,
            "group_size": self.group_size,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_inflight_steps": self.max_inflight_steps,
        }
        told = [f"{name} {value}" for name, value in facts.items() if value is not None]
        return ", ".join([*(x for x in (self.connector, self.store) if x), *told]) or self.engine


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """What the arms of one engine need, in tokens unless a name says otherwise."""

    pool_tokens: int
    record_tokens: int
    """In host memory."""
    num_seqs: int
    """Requests at once."""

    @classmethod
    def of(cls, points: Sequence[Point]) -> Room:
        """For all of them in turns, at least one: between two uses of a prefix each of the others
        may have saved its own tokens twice."""
        largest = max(point.tokens for point in points)
        prefixes = {(point.batch, point.prefix) for point in points}
        kept = sum(batch * prefix for batch, prefix in prefixes)
        saved = sum(point.batch * (point.new + point.output + BLOCK_SIZE) for point in points)
        return cls(
            pool_tokens=ROOM_FACTOR * largest,
            record_tokens=kept + 2 * saved + ROOM_FACTOR * largest,
            num_seqs=max(point.batch for point in points),
        )


def engine_key(spec: GridSpec, point: Point) -> EngineKey:
    """The engine that an arm runs on. Where something does not matter to the arm, the first value
    of the grid is taken, so that it shares an engine with arms to which it does."""
    model = ModelKey(point.model, point.device, point.dtype)
    if point.engine == TRANSFORMERS:
        return EngineKey(model, TRANSFORMERS)
    found: dict[str, Any] = {
        name: getattr(point, name)
        for name in ("graph_mode", "max_num_batched_tokens", "max_inflight_steps")
    }
    if spec.has_load_modes(point.connector):
        for name in ("store", "group_size"):
            own = getattr(point, name)
            found[name] = spec.base[name] if own is None else own
    return EngineKey(model, point.engine, point.connector, **found)


def engines_of(spec: GridSpec) -> Mapping[EngineKey, tuple[Point, ...]]:
    """Each engine with the arms that share it, in the file's order."""
    found: dict[EngineKey, tuple[Point, ...]] = {}
    for point in spec.points:
        key = engine_key(spec, point)
        found[key] = (*found.get(key, ()), point)
    return found


def models_of(spec: GridSpec) -> Mapping[ModelKey, tuple[Point, ...]]:
    """Each model to load with the arms that need it."""
    found: dict[ModelKey, tuple[Point, ...]] = {}
    for point in spec.points:
        key = ModelKey(point.model, point.device, point.dtype)
        found[key] = (*found.get(key, ()), point)
    return found


def order_of(seed: int, round_number: int, num_arms: int) -> tuple[int, ...]:
    """The arms of one round, each once, in an order that the seed and the round decide."""
    order = list(range(num_arms))
    random.Random(f"{seed} {round_number}").shuffle(order)
    return tuple(order)


def names_of(points: Sequence[Point]) -> tuple[str, ...]:
    """What tables call the arms: the values of what varies among them. Different names."""
    facts = [point.facts() for point in points]
    for least in (1, 2):
        varying = [
            key
            for key in AXES
            if len({one[key] for one in facts} - ({None} if least == 1 else set())) > 1
        ]
        names = tuple(
            ", ".join(AXES[key].label.format(one[key]) for key in varying if one[key] is not None)
            for one in facts
        )
        if len(set(names)) == len(names) and all(names):
            return names
    if len(points) == 1:
        return (points[0].load_mode or f"{points[0].new} new",)
    return tuple(f"{name or 'arm'} ({number})" for number, name in enumerate(names, start=1))
