"""KV that was promised and did not come: whatever stands on it is set back and hidden.

Decides nothing about the requests' further fate. Loop thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from interlace.engine.block_pool import KVCacheBlock
from interlace.engine.kv_cache_manager import KVCacheManager
from interlace.engine.request import Request
from interlace.engine.step_plan import StepPlan


class Lost(NamedTuple):
    """A request that was set back."""

    request: Request
    position: int
    """From which on its KV did not come, or stands on such."""


def set_back(
    step: StepPlan,
    later_steps: Sequence[StepPlan],
    requests: Iterable[Request],
    invalid_block_ids: frozenset[int],
    kv_cache: KVCacheManager,
) -> list[Lost]:
    """Set back every request whose computed or loaded tokens lie in an invalid block.

    That is the one that loads it and all that share it: each keeps the tokens before the block, and
    its blocks from there on lose their hashes, whatever else they hold. `step` is being applied,
    `later_steps` are in flight behind it, `requests` are all that hold blocks. Requests of `step`
    that ended meanwhile lose their hashes too. Returns those set back, in the order of `requests`.
    """
    began_at = {
        item.request.request_id: item.num_computed_tokens
        for plan in (*reversed(later_steps), step)
        for item in plan.scheduled
        if not item.is_void
    }
    hit = []
    for request in requests:
        # Blocks that steps in flight write to are not what was promised.
        num_tokens = began_at.get(request.request_id, request.num_computed_tokens)
        num_good = _withdraw_from_bad(request.blocks, num_tokens, invalid_block_ids, kv_cache)
        hole_end = _shorten_hole(request, invalid_block_ids, kv_cache.block_size)
        position = hole_end if num_good is None else num_good
        if position is None:
            continue
        request.note_failed_load(step.step_id)
        hit.append(Lost(request, position))
        if num_good is not None:
            request.set_back(num_good)
    for item in step.scheduled:
        table = step.tables.get(item.request.request_id)
        if not item.request.is_finished or table is None:
            continue
        num_good = _withdraw_from_bad(table, item.num_computed_tokens, invalid_block_ids, kv_cache)
        if num_good is not None:
            # Blocks that the connector holds are freed later: their tail must not be kept then.
            item.request.num_computed_tokens = min(item.request.num_computed_tokens, num_good)
    return hit


def _shorten_hole(
    request: Request, invalid_block_ids: frozenset[int], block_size: int
) -> int | None:
    """A block that is loaded from the back is bad: it and all behind are computed. Returns the
    tokens before it; None: they are all good."""
    if request.hole_end is None:
        return None
    first = request.num_computed_tokens // block_size
    for index in range(first, -(-request.hole_end // block_size)):
        if request.blocks[index].block_id in invalid_block_ids:
            request.hole_end = index * block_size
            return request.hole_end
    return None


def _withdraw_from_bad(
    blocks: Sequence[KVCacheBlock],
    num_tokens: int,
    invalid_block_ids: frozenset[int],
    kv_cache: KVCacheManager,
) -> int | None:
    """Hide blocks from the first bad one on; returns the tokens before it.

    Looks at the blocks of the first `num_tokens` tokens. None: they are all good.
    """
    size = kv_cache.block_size
    for index, block in enumerate(blocks[: -(-num_tokens // size)]):
        if block.block_id in invalid_block_ids:
            kv_cache.withdraw(blocks[index:])
            return index * size
    return None
