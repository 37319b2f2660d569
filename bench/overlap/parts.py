"""What runs under the name of each part of `interlace bench overlap`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from interlace.bench.overlap.beside import beside
from interlace.bench.overlap.crossover import crossover
from interlace.bench.overlap.first_token import first_token
from interlace.bench.overlap.gaps import gaps
from interlace.bench.overlap.idle import idle
from interlace.bench.overlap.link import link
from interlace.bench.overlap.mixed import mixed
from interlace.bench.overlap.modes import modes
from interlace.bench.overlap.names import Part
from interlace.bench.overlap.rig import Outcome, Rig
from interlace.bench.overlap.saving import saving
from interlace.bench.overlap.split import split

PARTS: Final[Mapping[Part, Callable[[Rig], Awaitable[Outcome]]]] = {
    Part.LINK: link,
    Part.FIRST_TOKEN: first_token,
    Part.CROSSOVER: crossover,
    Part.MODES: modes,
    Part.SPLIT: split,
    Part.MIXED: mixed,
    Part.BESIDE: beside,
    Part.GAPS: gaps,
    Part.SAVING: saving,
    Part.IDLE: idle,
}
