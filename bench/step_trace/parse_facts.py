"""What a timeline's file says was run, checked."""

from __future__ import annotations

import dataclasses
from typing import Any

from interlace.bench.step_trace.facts import HybridFacts, RanStep, TraceFacts

_MOST_LAYERS = 10_000


def step_facts(other: dict[str, Any]) -> TraceFacts:
    """Of a step that loads. Raises: what a wrong shape raises by itself, or `ValueError`."""
    facts = TraceFacts(**_checked(TraceFacts, other))
    if facts.group_size < 1:
        raise ValueError(f"group_size is {facts.group_size}")
    return facts


def hybrid_facts(other: dict[str, Any]) -> HybridFacts:
    """Of a prompt from both ends. Raises: likewise."""
    fields = _checked(HybridFacts, other)
    steps = tuple(RanStep(*map(whole, step)) for step in fields.pop("steps"))
    facts = HybridFacts(**fields, steps=steps)
    if not 1 <= facts.num_layers <= _MOST_LAYERS or facts.block_size < 1:
        raise ValueError(f"num_layers is {facts.num_layers}, block_size {facts.block_size}")
    return facts


def _checked(kind: type[TraceFacts] | type[HybridFacts], other: dict[str, Any]) -> dict[str, Any]:
    """The fields of `kind`; those that are neither numbers nor text are not looked at."""
    for field in dataclasses.fields(kind):
        value = other[field.name]
        if field.type == "int":
            whole(value)
        elif field.name != "steps" and not isinstance(value, str):
            raise ValueError(f"{field.name} is {value!r:.40}")
    if other["clock"] not in ("device", "host"):
        raise ValueError(f"clock is {other['clock']!r:.40}")
    return dict(other)


def whole(value: object) -> int:
    """A number. Raises: `ValueError` for anything but a whole one from 0 on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r:.40} is not a whole number from 0 on")
    return value
