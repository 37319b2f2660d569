"""A step's orders, and how much it computes, from which the worker side learns its speed."""

from __future__ import annotations

import dataclasses

from interlace.connectors.pipeline.messages import PipelineMetadata


@dataclasses.dataclass(frozen=True, slots=True)
class SizedMetadata(PipelineMetadata):
    """What `PipelineScheduler` sends. The numbers are those of `StepSample`."""

    num_tokens: int = 0
    num_context_tokens: int = 0

    @property
    def loads_within_step(self) -> bool:
        """Whether layers of the step wait for what it loads."""
        return any(not load.is_async for load in self.loads)
