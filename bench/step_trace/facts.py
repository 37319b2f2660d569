"""What a timeline is of. Plain values."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple


@dataclasses.dataclass(frozen=True, slots=True)
class TraceFacts:
    """What was run, and on what: one step that loads layer by layer."""

    model: str
    dtype: str
    machine: str
    """Name of the GPU, or of the processor."""
    clock: Literal["device", "host"]
    """Who told the times."""
    loaded_tokens: int
    new_tokens: int
    """Computed in the step."""
    group_size: int
    """Layers that share a gate, but for the first and the last one: see `LayerGroups`."""
    request_id: str
    step_id: int


class RanStep(NamedTuple):
    """A step that computed a part of a prompt."""

    step_id: int
    num_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class HybridFacts:
    """What was run, and on what: one prompt from both ends."""

    model: str
    dtype: str
    machine: str
    """See `TraceFacts`."""
    clock: Literal["device", "host"]
    """See `TraceFacts`."""
    num_layers: int
    block_size: int
    """Tokens."""
    front_tokens: int
    """Computed though they were stored, from the prompt's front on."""
    loaded_tokens: int
    """Loaded, whole blocks, up to the end of what was stored."""
    new_tokens: int
    """Computed, behind those."""
    request_id: str
    steps: tuple[RanStep, ...]
    """That computed, in order."""

    @property
    def num_blocks(self) -> int:
        """Of the prompt's part that was stored."""
        return (self.front_tokens + self.loaded_tokens) // self.block_size

    @property
    def meeting_block(self) -> int:
        """The first one that was loaded."""
        return self.front_tokens // self.block_size
