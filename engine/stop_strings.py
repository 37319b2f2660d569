"""Watches a text that comes in pieces for the strings that end it.

Knows nothing of tokens. The result never depends on how the text is cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final


@final
class _Prefix:
    """How much of one stop the end of the text spells (Knuth, Morris and Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        """Characters of `stop` that the text ends with; the longest such prefix."""
        self._shorter = _borders(stop)

    def advance(self, char: str) -> bool:
        """Add one character of text; whether the stop is complete. Amortised constant time."""
        while self.length and self.stop[self.length] != char:
            self.length = self._shorter[self.length - 1]
        if self.stop[self.length] == char:
            self.length += 1
        return self.length == len(self.stop)


def _borders(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that also ends it."""
    borders = [0]
    for char in stop[1:]:
        length = borders[-1]
        while length and stop[length] != char:
            length = borders[length - 1]
        borders.append(length + (stop[length] == char))
    return borders


@final
class StopStrings:
    """Lets text through until a stop string is complete. Not thread-safe.

    The match is the one that ends first, and of those the one that starts first. Held back is
    the longest end of the text that may still become a stop: less than the longest stop. With
    `include_in_output` nothing needs to be held, since a stop is shown too.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        # Longest first: of several stops that end together, the longest starts first.
        self._prefixes = [_Prefix(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._include = include_in_output
        self._held = ""
        self.matched: str | None = None
        """The stop that ended the text; from then on nothing more comes out."""

    def push(self, text: str) -> str:
        """Add text; returns what is safe to show now. Linear in `text` and number of stops."""
        if self.matched is not None:
            return ""
        if not self._prefixes:
            return text
        known = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            self.matched = self._advance(char)
            if self.matched is not None:
                self._held = ""
                return known[: end if self._include else end - len(self.matched)]
        shown = len(known) - (0 if self._include else max(p.length for p in self._prefixes))
        self._held = known[shown:]
        return known[:shown]

    def _advance(self, char: str) -> str | None:
        complete = [prefix.stop for prefix in self._prefixes if prefix.advance(char)]
        return complete[0] if complete else None

    def finish(self) -> str:
        """What was held back, when the text ends without a stop."""
        held, self._held = self._held, ""
        return held
