"""The outcome of one benchmark as plain data: rows of spreads, and checks against bars.

Knows no terminal; `bench/tables.py` draws it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from interlace.bench.spread import Spread


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One case and what was measured of it."""

    case: str
    figures: Mapping[str, Spread]
    """Name with its unit -> spread. All rows of a report have the same names or fewer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One number that the project wants on the right side of a bar."""

    name: str
    value: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def met(self) -> bool:
        """Whether the value is on the right side."""
        return (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """One benchmark on one machine."""

    benchmark: str
    settings: Mapping[str, object]
    machine: Mapping[str, object]
    rows: tuple[Row, ...]
    checks: tuple[Check, ...]
    limits: Mapping[str, Spread] = dataclasses.field(default_factory=dict)
    """What the device could do in the same run, name with its unit -> spread."""
    notes: tuple[str, ...] = ()
    """Sentences for people about what is missing."""

    def to_json(self) -> str:
        """The whole report as indented JSON with a final line break."""
        record = {
            "benchmark": self.benchmark,
            "settings": dict(self.settings),
            "machine": dict(self.machine),
            "rows": [{"case": row.case, "figures": _plain(row.figures)} for row in self.rows],
            "checks": [dataclasses.asdict(c) | {"met": c.met} for c in self.checks],
            "limits": _plain(self.limits),
            "notes": list(self.notes),
        }
        return json.dumps(record, indent=2, ensure_ascii=False) + "\n"


def _plain(spreads: Mapping[str, Spread]) -> dict[str, dict[str, object]]:
    return {name: dataclasses.asdict(spread) for name, spread in spreads.items()}
