"""What the parts of `interlace bench store` are run with, and what their figures are held to."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final

from interlace.bench.kv_blocks import BLOCK_SIZE
from interlace.bench.overlap.rig import Rig
from interlace.layers.kv_memory import PageShape

READ_SHARE: Final = 0.90
"""Least rate of the store's reads, by the best of plain ones."""
LOOKUP_MS: Final = 1.0
"""Most, for a long prefix."""
FIRST_LOOK_S: Final = 1.0
"""Most, for all records."""
COLD_CHOICE: Final = 1.10
"""Most that the chosen way takes by the best forced one, when files are read from the disk."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoreBars:
    """What depends on the machine and the work; None where nothing is asked. Ratios."""

    computed_by_files: float | None = None
    """Least times that a prompt from files comes sooner than a computed one."""
    registered_by_memory: float | None = None
    """Most that a prompt from registered files takes by one from host memory."""


CUDA_BARS: Final = StoreBars(registered_by_memory=1.10)
CPU_BARS: Final = StoreBars(computed_by_files=12.0)
NO_STORE_BARS: Final = StoreBars()
CUDA_SAVING: Final = 1.01
"""Most that saving to files stretches a prefill, on a GPU."""
CPU_MODEL: Final = "smollm2-135m"
CPU_PROMPT: Final = 960
"""What the bar for a CPU is about: the model, and tokens of the prompt."""


def bars_for(device: str, model: str, prompt_tokens: int) -> StoreBars:
    """Of work on "cuda" or "cpu"."""
    if device == "cuda":
        return CUDA_BARS
    return CPU_BARS if (model, prompt_tokens) == (CPU_MODEL, CPU_PROMPT) else NO_STORE_BARS


@dataclasses.dataclass(frozen=True, slots=True)
class StoreSizes:
    """How much the parts without an engine do."""

    read_bytes: int = 256 << 20
    """At least so much is read for each figure, and the whole prompt at least."""
    most_records: int = 4096
    """Read for each figure, unless the prompt has more: what lanes take at a time has a bound."""
    num_records: int = 100_000
    """Among which prefixes are looked up."""
    lookup_blocks: int = 2_000
    """Of a prefix."""
    lookups: int = 20
    """Of different prefixes, in each round."""


USUAL_SIZES: Final = StoreSizes()
"""The bars are about these."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoreRig:
    """What is measured, and where."""

    rig: Rig
    """Its engines keep KV in files."""
    shape: PageShape
    """Of the model's blocks."""
    folder: Path
    """Exists; each part keeps its files in folders of its own."""
    engine_files: Path
    """Where engines do."""
    sizes: StoreSizes
    bars: StoreBars

    @property
    def read_records(self) -> int:
        """As many as are read for each figure."""
        of_bytes = -(-self.sizes.read_bytes // self.shape.block_bytes)
        of_bytes = min(of_bytes, self.sizes.most_records)
        return max(of_bytes, self.rig.setting.sizes.prompt_tokens // BLOCK_SIZE)
