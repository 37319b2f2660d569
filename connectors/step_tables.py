"""What a connector's scheduler side reads from a step's message to follow block tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from interlace.engine.scheduler_output import SchedulerOutput


def added_blocks(output: SchedulerOutput) -> Iterator[tuple[str, list[int], bool]]:
    """(request id, block ids, resumed) of the requests in the step that the worker knows already
    and whose blocks are not what they were.

    The ids come behind those that the request had, or, if it was resumed, in place of them. The
    blocks of new requests are those of `update_state_after_alloc`.
    """
    cached = output.scheduled_cached_reqs
    for req_id, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if added is not None or req_id in cached.resumed_req_ids:  # most have not changed
            yield req_id, added[0] if added is not None else [], req_id in cached.resumed_req_ids


class BlockTable(Protocol):
    """What a scheduler side keeps of one request."""

    block_ids: list[int]
    """All of its blocks in order of position; empty while it is preempted."""
    num_settled: int
    """Blocks at the front that need no look."""


def follow_blocks(output: SchedulerOutput, tables: Mapping[str, BlockTable]) -> None:
    """Keep the tables of these requests, by id, as the step's message has them."""
    for request_id in output.preempted_req_ids & tables.keys():
        tables[request_id].block_ids = []
    for request_id, added, resumed in added_blocks(output):
        table = tables.get(request_id)
        if table is None:
            continue
        if resumed:
            table.block_ids, table.num_settled = [], 0
        table.block_ids.extend(added)


def computed_before(output: SchedulerOutput) -> dict[str, int]:
    """Request id -> tokens whose KV is there when the step's computing begins."""
    cached = output.scheduled_cached_reqs
    new = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
    return new | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
