"""What runs under the name of each part of `interlace bench store`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from interlace.bench.overlap.rig import Outcome
from interlace.bench.store.cold import cold
from interlace.bench.store.first_token import first_token
from interlace.bench.store.lookup import lookup
from interlace.bench.store.names import Part
from interlace.bench.store.read import read
from interlace.bench.store.rig import StoreRig
from interlace.bench.store.saving import saving

PARTS: Final[Mapping[Part, Callable[[StoreRig], Awaitable[Outcome]]]] = {
    Part.READ: read,
    Part.LOOKUP: lookup,
    Part.FIRST_TOKEN: first_token,
    Part.COLD: cold,
    Part.SAVING: saving,
}
