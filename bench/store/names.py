"""What the parts of `interlace bench store` are called. Imports nothing heavy: the command line
needs it for its help."""

from __future__ import annotations

import enum
from typing import Final


class Part(enum.StrEnum):
    """In the order in which they run."""

    READ = "read"
    LOOKUP = "lookup"
    FIRST_TOKEN = "first-token"
    COLD = "cold"
    SAVING = "saving"


DEFAULT_PARTS: Final = tuple(Part)
