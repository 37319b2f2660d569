"""What a scheduler has counted since the engine started."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Running totals since the engine started."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    """Of requests whose first token was sampled; so are the next two."""
    num_local_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_external_cached_tokens: int = 0
    """Loaded by the connector."""
    num_preemptions: int = 0
    num_finished_requests: int = 0
    num_connector_queried_tokens: int = 0
    """That the KV connector was asked for, counted when the blocks were allocated."""
    num_connector_hit_tokens: int = 0
    """That it promised then."""
    num_invalid_blocks: int = 0
    """Promised and not brought."""
    num_stray_reports: int = 0
    """Ids reported by the connector that nobody waited for: late, repeated or wrong."""
