"""A fact about the machine: a value, or the reason why it is not known."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_MAX_REASON = 300


@dataclasses.dataclass(frozen=True, slots=True)
class Unknown:
    """Stands where a fact could not be found out."""

    reason: str
    """One line."""


def attempt(collect: Callable[[], T], doing: str) -> T | Unknown:
    """What `collect()` returns; if it raises, why `doing` failed. Never raises an `Exception`.

    Probes run code of drivers that nobody here has seen, so whatever it raises is an answer.
    """
    try:
        return collect()
    except Exception as error:  # noqa: BLE001 - see above
        return Unknown(f"{doing}: {_one_line(error)}")


def to_json(facts: Any, reasons: dict[str, str], path: str = "") -> Any:
    """`facts`, dataclasses in one another, as plain objects with the same keys always.

    An `Unknown` becomes None, and its reason goes into `reasons` under its dotted path.
    """
    if isinstance(facts, Unknown):
        reasons[path] = facts.reason
        return None
    dot = path and path + "."
    if isinstance(facts, tuple):
        return [to_json(fact, reasons, f"{dot}{index}") for index, fact in enumerate(facts)]
    if dataclasses.is_dataclass(facts):
        names = (field.name for field in dataclasses.fields(facts))
        return {name: to_json(getattr(facts, name), reasons, dot + name) for name in names}
    return facts


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MAX_REASON else text[:_MAX_REASON] + "..."
