"""For connectors that measure: a worker side that sees each step."""

from __future__ import annotations

import dataclasses

from interlace.connectors.pipeline.messages import PipelineMetadata
from interlace.engine.scheduler_output import SchedulerOutput


def awake(metadata: PipelineMetadata, output: SchedulerOutput) -> PipelineMetadata:
    """The same, for a worker side that is to be told of the step though it has nothing to do."""
    if not metadata.is_idle:
        return metadata
    return dataclasses.replace(
        metadata,
        step_id=output.step_id,
        num_tokens=output.total_num_scheduled_tokens,
        is_idle=False,
    )
