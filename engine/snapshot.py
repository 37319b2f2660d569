"""A frozen picture of the engine: all that a viewer, a benchmark or a test may ask of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from interlace.engine.request import Request
from interlace.engine.scheduler import Scheduler
from interlace.engine.scheduler_stats import SchedulerStats
from interlace.engine.transfer_picture import ConnectorPicture


@dataclasses.dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """One unfinished request. Sizes in tokens, `num_blocks` in blocks."""

    request_id: str
    status: str
    """WAITING, WAITING_FOR_REMOTE_KVS, RUNNING or PREEMPTED."""
    priority: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_computed_tokens: int
    """KV computed or loaded, by steps and transfers under way too."""
    num_local_cached_tokens: int
    num_external_cached_tokens: int
    num_blocks: int
    num_preemptions: int


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine between two events of its loop."""

    time_s: float
    running: tuple[RequestSnapshot, ...]
    """In scheduling order."""
    waiting: tuple[RequestSnapshot, ...]
    """Those that hold blocks first: their KV is being loaded, or was."""
    num_preparing_requests: int
    """Submitted, and still being tokenised or hashed in a thread."""
    num_inflight_steps: int
    block_size: int
    num_usable_blocks: int
    num_free_blocks: int
    """Held by nobody; they may still hold cached content."""
    num_cached_blocks: int
    """With findable content, held or free."""
    num_fenced_blocks: int
    """Of ended requests, until the step in flight that touches them is applied."""
    num_held_requests: int
    """Ended requests whose blocks a KV connector still reads or fills."""
    stats: SchedulerStats
    kv_connector_stats: Mapping[str, int | float]
    """What the connector has counted in the last 10 to 20 seconds, by its own names; empty without
    one, and if it was nothing. `AsyncEngine.metrics` has totals."""
    connectors: tuple[ConnectorPicture, ...] = ()
    """What the connector shows of its transfers and stores; several of a MultiConnector."""
    dead: str | None = None
    """Why the step loop has ended; None while it has not."""

    @property
    def idle(self) -> bool:
        """Whether nothing is queued, running or in flight, and no block is held."""
        return (
            not self.running
            and not self.waiting
            and self.num_preparing_requests == 0
            and self.num_inflight_steps == 0
            and self.num_free_blocks == self.num_usable_blocks
        )


def _picture(request: Request) -> RequestSnapshot:
    return RequestSnapshot(
        request_id=request.request_id,
        status=request.status.name,
        priority=request.priority,
        num_prompt_tokens=request.num_prompt_tokens,
        num_generated_tokens=request.num_output_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_local_cached_tokens=request.num_local_cached_tokens or 0,
        num_external_cached_tokens=request.num_external_cached_tokens,
        num_blocks=len(request.blocks),
        num_preemptions=request.num_preemptions,
    )


def take_snapshot(
    scheduler: Scheduler,
    num_preparing: int,
    time_s: float,
    kv_connector_stats: Mapping[str, int | float],
    connectors: tuple[ConnectorPicture, ...] = (),
    dead: str | None = None,
) -> EngineSnapshot:
    """Picture `scheduler` as it is now. Loop thread; linear in the number of requests."""
    pool = scheduler.kv_cache.pool
    return EngineSnapshot(
        time_s=time_s,
        running=tuple(map(_picture, scheduler.running)),
        waiting=tuple(map(_picture, (*scheduler.parked, *scheduler.waiting))),
        num_preparing_requests=num_preparing,
        num_inflight_steps=scheduler.num_inflight_steps,
        block_size=scheduler.kv_cache.block_size,
        num_usable_blocks=pool.num_usable_blocks,
        num_free_blocks=pool.num_free_blocks,
        num_cached_blocks=pool.num_cached_blocks,
        num_fenced_blocks=scheduler.kv_cache.num_fenced_blocks,
        num_held_requests=scheduler.num_held_requests,
        stats=scheduler.stats,
        kv_connector_stats=kv_connector_stats,
        connectors=connectors,
        dead=dead,
    )
