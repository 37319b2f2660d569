"""What the parts of `interlace bench overlap` are called. Imports nothing heavy: the command line
needs it for its help."""

from __future__ import annotations

import enum
from typing import Final


class Part(enum.StrEnum):
    """In the order in which they run."""

    LINK = "link"
    FIRST_TOKEN = "first-token"
    CROSSOVER = "crossover"
    MODES = "modes"
    SPLIT = "split"
    MIXED = "mixed"
    BESIDE = "beside"
    GAPS = "gaps"
    SAVING = "saving"
    IDLE = "idle"


DEFAULT_PARTS: Final = (Part.LINK, Part.FIRST_TOKEN)
CROWDED: Final = frozenset({Part.MIXED, Part.BESIDE, Part.GAPS})
"""Parts in which many requests decode while others are loaded."""
ALL: Final = "all"
"""Stands for every part."""


def chosen(names: list[str]) -> tuple[Part, ...]:
    """The parts of these names, in their order; the default ones for none.

    Raises: `ValueError` for a name that no part has.
    """
    if ALL in names:
        return tuple(Part)
    wanted = {Part(name) for name in names} or set(DEFAULT_PARTS)
    return tuple(part for part in Part if part in wanted)
