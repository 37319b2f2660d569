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
FROM_FILES: Final = frozenset({Part.FIRST_TOKEN, Part.MODES})
"""Parts that can load from files, too."""
CROWDED: Final = frozenset({Part.MIXED, Part.BESIDE, Part.GAPS})
"""Parts in which many requests decode while others are loaded."""
