"""Typed reading of a checkpoint's metadata, with messages that name the field.

Metadata comes from files that anyone may have written: every value is checked and bounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from interlace.engine.errors import ModelError

MAX_COUNT = 2**24
"""No size of a supported model comes near; a larger one is a damaged file."""
MAX_LAYERS = 2**10
MAX_POSITIONS = 2**22
"""A table with a row for each is made, so this one is bounded more tightly."""


class Fields:
    """Fields of one mapping; null counts as missing. `where` names the file in messages."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self.where = where

    def get(self, name: str) -> Any:
        """The raw value, None if missing."""
        return self._values.get(name)

    def has(self, name: str) -> bool:
        """Whether the field is there at all, even as null."""
        return name in self._values

    def count(self, name: str, default: int | None = None, most: int = MAX_COUNT) -> int:
        """A whole number from 1 to `most`. Raises `ModelError`."""
        value = self._present(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise ModelError(
                f"{self.where}: {name} must be a whole number from 1 to {most}, not {value!r}."
            )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0. Raises `ModelError`."""
        value = self._present(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= 0:
            raise ModelError(f"{self.where}: {name} must be a number above 0, not {value!r}.")
        return float(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """True or false. Raises `ModelError`."""
        value = self._present(name, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.where}: {name} must be true or false, not {value!r}.")
        return value

    def _present(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.where}: {name} is missing.")
        return value
