"""The shared base of frozen option records: unknown fields are refused by name.

Knows nothing of what any option means.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from typing import Any, ClassVar, Self

from interlace.engine.errors import ConfigError, InterlaceError


def is_path(value: object) -> bool:
    """Whether it can name a file or a folder: no empty text, none with what no name may have."""
    if not isinstance(value, str | os.PathLike):
        return False
    try:
        name = os.fsencode(value)
    except UnicodeEncodeError:
        return False
    return name.strip() != b"" and b"\0" not in name


class Options:
    """Base of keyword-only frozen dataclasses whose misspelt fields raise our own error.

    A subclass may set `error` to another class of the error tree.
    """

    error: ClassVar[type[InterlaceError]] = ConfigError

    def __new__(cls, /, *args: Any, **kwargs: Any) -> Self:
        """Refuse unknown keywords before the dataclass sees them.

        Raises: `cls.error`, naming the nearest known field.
        """
        known = [f.name for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(known)}."
                raise cls.error(f"{cls.__name__} has no field {name!r}.{hint}")
        return super().__new__(cls)

    def require(self, condition: bool, message: str) -> None:
        """Raise `error` with `message` unless `condition` holds."""
        if not condition:
            raise self.error(f"{type(self).__name__}: {message}")

    def require_int(self, name: str, low: int, high: int | None = None) -> None:
        """Require that field `name` is an int (not a bool) in [low, high]."""
        value = getattr(self, name)
        ok = isinstance(value, int) and not isinstance(value, bool)
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        self.require(
            ok and value >= low and (high is None or value <= high),
            f"{name} must be a whole number {bounds}, not {value!r}.",
        )

    def require_number(self, name: str, low: float, high: float = math.inf) -> None:
        """Require that field `name` is a finite number in [low, high]."""
        value = getattr(self, name)
        ok = isinstance(value, int | float) and not isinstance(value, bool)
        bounds = f"at least {low}" if math.isinf(high) else f"from {low} to {high}"
        self.require(
            ok and low <= value <= high and value < math.inf,
            f"{name} must be a number {bounds}, not {value!r}.",
        )

    def require_choice(self, name: str, choices: tuple[object, ...]) -> None:
        """Require that field `name` is one of `choices`."""
        value = getattr(self, name)
        known = ", ".join(repr(c) for c in choices)
        self.require(value in choices, f"{name} must be one of {known}, not {value!r}.")
