"""Parts of a benchmark, chosen by name. Imports nothing heavy: the command line needs it for its
help."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final, TypeVar

P = TypeVar("P", bound=enum.StrEnum)

ALL: Final = "all"
"""Stands for every part."""


def chosen(parts: type[P], names: Sequence[str], default: Sequence[P]) -> tuple[P, ...]:
    """Those of `parts` with these names, in their order; the default ones for none.

    Raises: `ValueError` for a name that no part has.
    """
    if ALL in names:
        return tuple(parts)
    wanted = {parts(name) for name in names} or set(default)
    return tuple(part for part in parts if part in wanted)
