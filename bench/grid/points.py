"""One arm of a grid as values of its keys, and which of those matter to it. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from interlace.bench.grid.axes import CACHED, NONE, OWN, RECOMPUTE, TRANSFORMERS, Value
from interlace.connectors.pipeline.options import LoadMode

_OF_OUR_ENGINE = (
    "connector",
    "graph_mode",
    "max_num_batched_tokens",
    "max_inflight_steps",
)
_OF_LOADS = ("store", "group_size", "delay_ms")


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """See `AXES` for what each of them means; None: it does not matter, or the engine decides."""

    engine: str
    model: str
    device: str
    dtype: str
    connector: str | None
    store: str | None
    load_mode: str | None
    graph_mode: str | None
    group_size: int | None
    delay_ms: float | None
    max_num_batched_tokens: int | None
    max_inflight_steps: int | None
    prefix: int
    new: int
    batch: int
    output: int

    @property
    def request_tokens(self) -> int:
        """Of one request, prompt and answer together."""
        return self.prefix + self.new + self.output

    @property
    def tokens(self) -> int:
        """Of all its requests."""
        return self.batch * self.request_tokens

    @property
    def loads(self) -> bool:
        """Whether a load mode of PipelineConnector is asked for that brings KV."""
        return self.load_mode not in (None, CACHED, RECOMPUTE, OWN)

    @property
    def asked_mode(self) -> LoadMode:
        """What the connector is told; nothing is left to load for what is cached."""
        mode = "auto" if self.load_mode in (None, CACHED, OWN) else self.load_mode
        return cast("LoadMode", mode)

    def facts(self) -> dict[str, Value]:
        """For JSON."""
        return dataclasses.asdict(self)


def settled(values: Mapping[str, Value], has_load_modes: bool) -> Point:
    """The arm of these values of all keys; what does not matter to it is None, so that arms which
    are the same are equal.

    `has_load_modes`: whether its connector is a PipelineConnector, which `store`, `load_mode`,
    `group_size` and `delay_ms` are about.
    """
    found = dict(values)
    is_theirs = found["engine"] == TRANSFORMERS
    if is_theirs:
        found |= dict.fromkeys(_OF_OUR_ENGINE)
    if not found["prefix"]:
        found["load_mode"] = None
    elif is_theirs or (found["connector"] == NONE and found["load_mode"] != CACHED):
        found["load_mode"] = RECOMPUTE
    elif not has_load_modes and found["load_mode"] != CACHED:
        found["load_mode"] = OWN
    if not has_load_modes or is_theirs or found["load_mode"] in (None, CACHED, RECOMPUTE):
        found |= dict.fromkeys(_OF_LOADS)
    elif found["load_mode"] not in ("layerwise", "auto"):
        found["group_size"] = None  # nothing waits for a layer
    return Point(**cast("dict[str, Any]", found))
