"""What one child of a MultiConnector sees of what concerns all of them. Plain functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from interlace.connectors.multi_children import Child
from interlace.connectors.multi_messages import MultiKVEvents, MultiWorkerMetadata, part_of
from interlace.connectors.multi_stats import MultiKVConnectorStats
from interlace.engine.kv_connector import KVConnectorOutput
from interlace.engine.scheduler_output import NewRequestData, SchedulerOutput


def with_loads_as_computed(output: SchedulerOutput, begins: Mapping[str, int]) -> SchedulerOutput:
    """The step's message for a child that does not know of loads that others do within it.

    `begins`: request id -> where its load begins. For everybody but the loader, loaded tokens are
    like computed ones: in place when a layer's attention has run, and not when the step begins.
    """
    scheduled = dict(output.num_scheduled_tokens)

    def begin(request_id: str, num_computed: int) -> int:
        if request_id not in begins:
            return num_computed
        scheduled[request_id] += num_computed - begins[request_id]
        return begins[request_id]

    def seen(one: NewRequestData) -> NewRequestData:
        num_computed = begin(one.req_id, one.num_computed_tokens)
        return dataclasses.replace(one, num_computed_tokens=num_computed)

    cached = output.scheduled_cached_reqs
    pairs = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    return dataclasses.replace(
        output,
        scheduled_new_reqs=[seen(one) for one in output.scheduled_new_reqs],
        scheduled_cached_reqs=dataclasses.replace(
            cached, num_computed_tokens=[begin(*pair) for pair in pairs]
        ),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
    )


def share_of(
    output: KVConnectorOutput, child: Child, sent: set[str], received: set[str]
) -> KVConnectorOutput:
    """What a child's own worker side had a part in; `output` stays as it is.

    `sent` and `received` are the ids that the child has reported. Invalid blocks concern everybody,
    whoever failed to fill them: what was saved on top of them is bad.
    """
    stats = output.kv_connector_stats
    return KVConnectorOutput(
        finished_sending=sent or None,
        finished_recving=received or None,
        kv_connector_stats=(
            stats.part(child.key) if isinstance(stats, MultiKVConnectorStats) else None
        ),
        kv_cache_events=part_of(output.kv_cache_events, MultiKVEvents, child.index),
        kv_connector_worker_meta=part_of(
            output.kv_connector_worker_meta, MultiWorkerMetadata, child.index
        ),
        invalid_block_ids=set(output.invalid_block_ids),
        expected_finished_count=output.expected_finished_count,
    )
