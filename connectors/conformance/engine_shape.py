"""The engine that a harness steps: small, so that pressure comes in a few steps."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from interlace.layers.virtual_lanes import Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineShape:
    """The engine of a harness. Sizes in blocks and tokens."""

    depth: int = 1
    """Steps in flight."""
    num_blocks: int = 40
    """Usable ones."""
    max_num_batched_tokens: int = 64
    max_num_seqs: int = 8
    prefix_caching: bool = True
    failure_policy: Literal["fail", "recompute"] = "recompute"
    query_repeats: int = 0
    """Match queries that are made beside each one of the engine's."""
    lane_policy: Policy = "eager"
    lane_seed: int = 0
    block_size: int = 4
    cudagraph_mode: str | None = None
    """None: no graphs. Another mode needs a GPU, and takes a moment for each engine."""

    def options(self) -> dict[str, Any]:
        """Keywords of `EngineConfig`."""
        options: dict[str, Any] = {
            "max_inflight_steps": self.depth,
            "num_gpu_blocks_override": self.num_blocks + 1,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            "enable_prefix_caching": self.prefix_caching,
            "block_size": self.block_size,
        }
        if self.cudagraph_mode is not None:
            options["cudagraph_mode"] = self.cudagraph_mode
        return options
