"""What came out of a check: a verdict for each property."""

from __future__ import annotations

import dataclasses
import json
from typing import Literal

from interlace.connectors.conformance.properties import Property

Verdict = Literal["ok", "FAILED", "skipped"]


class CheckFailedError(AssertionError):
    """A connector lacks properties; the message is the whole table."""


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """Of one property."""

    property: Property
    verdict: Verdict
    detail: str = ""
    """What went wrong, or why the property was not judged."""
    where: str = ""
    """The scenario and its variant that failed."""
    trace: tuple[str, ...] = ()
    """The calls before that, oldest first."""


@dataclasses.dataclass(frozen=True, slots=True)
class CheckReport:
    """All verdicts on one connector. Equal seeds give equal reports, but for the time."""

    connector: str
    seed: int
    workers: int
    results: tuple[Result, ...]
    """In the order of `PROPERTIES`."""
    notes: tuple[str, ...] = ()
    """What should be known of the whole: that it never loaded, that it uses no lanes."""
    took_s: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether no property failed."""
        return not self.failed

    @property
    def failed(self) -> list[str]:
        """Ids of the properties that failed."""
        return [one.property.id for one in self.results if one.verdict == "FAILED"]

    def result(self, property_id: str) -> Result:
        """Of one property. Raises: `KeyError`."""
        for one in self.results:
            if one.property.id == property_id:
                return one
        raise KeyError(property_id)

    def lines(self) -> list[str]:
        """The table as plain text, one line a property, with traces of what failed."""
        width = max((len(one.property.id) for one in self.results), default=0)
        lines = []
        for one in self.results:
            lines.append(f"{one.verdict:8}{one.property.id:{width}}  {_explain(one)}")
            lines += _details(one)
        return [*lines, *(f"note    {note}" for note in self.notes), self.summary()]

    def summary(self) -> str:
        """One line."""
        count = {"ok": 0, "FAILED": 0, "skipped": 0}
        for one in self.results:
            count[one.verdict] += 1
        return (
            f"{self.connector}: {count['ok']} ok, {count['FAILED']} failed,"
            f" {count['skipped']} skipped in {self.took_s:.1f} s (seed {self.seed},"
            f" {self.workers} worker{'s' if self.workers > 1 else ''})"
        )

    def to_json(self) -> str:
        """The same as JSON."""
        fields = dataclasses.asdict(self)
        fields["passed"] = self.passed
        return json.dumps(fields, indent=2) + "\n"

    def raise_if_failed(self) -> None:
        """Raises: `CheckFailedError`, an `AssertionError`, with the table as its message."""
        if not self.passed:
            raise CheckFailedError("\n" + "\n".join(self.lines()))


def _explain(result: Result) -> str:
    if result.verdict == "skipped":
        return f"{result.property.title} ({result.detail})"
    return result.property.title


def _details(result: Result) -> list[str]:
    if result.verdict != "FAILED":
        return []
    lines = [f"{'':8}  {line}" for line in result.detail.splitlines()]
    lines.append(f"{'':8}  in {result.where}, after:")
    return [*lines, *(f"{'':8}    {line}" for line in result.trace)]
