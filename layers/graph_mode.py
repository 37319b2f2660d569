"""Which steps are replayed as CUDA graphs: vLLM's names of the modes. Plain Python."""

from __future__ import annotations

import enum


class GraphMode(enum.Enum):
    """A `cudagraph_mode`. Steps that no graph fits run as they are."""

    NONE = enum.auto()
    PIECEWISE = enum.auto()
    """The pieces between attentions are graphs; attention and layer hooks run in between."""
    FULL = enum.auto()
    """Steps of decodes, and short mixed steps, are one graph each; no layer hooks run."""
    FULL_DECODE_ONLY = enum.auto()
    """Steps of decodes are one graph each."""
    FULL_AND_PIECEWISE = enum.auto()
    """As FULL, and in pieces where no full graph fits."""

    @property
    def full_decode(self) -> bool:
        """Whether steps in which each request has one token are full graphs."""
        return self not in (GraphMode.NONE, GraphMode.PIECEWISE)

    @property
    def full_mixed(self) -> bool:
        """Whether other short steps are."""
        return self in (GraphMode.FULL, GraphMode.FULL_AND_PIECEWISE)

    @property
    def piecewise(self) -> bool:
        """Whether there are graphs of pieces."""
        return self in (GraphMode.PIECEWISE, GraphMode.FULL_AND_PIECEWISE)
