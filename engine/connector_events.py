"""A connector's cache events as the engine's own. Loop thread."""

from __future__ import annotations

from interlace.engine import events, kv_events
from interlace.engine.events import EventBus


def publish(event: kv_events.KVCacheEvent, time_s: float, bus: EventBus) -> None:
    """Emit what `event` says, block by block."""
    match event:
        case kv_events.BlockStored():
            _publish_stored(event, time_s, bus)
        case kv_events.BlockRemoved():
            for block_hash in event.block_hashes:
                bus.emit(events.BlockRemoved(time_s, None, block_hash, event.medium))
        case kv_events.AllBlocksCleared():
            bus.emit(events.BlockCleared(time_s, None))


def _publish_stored(event: kv_events.BlockStored, time_s: float, bus: EventBus) -> None:
    parent = event.parent_block_hash
    for index, block_hash in enumerate(event.block_hashes):
        begin = index * event.block_size
        tokens = tuple(event.token_ids[begin : begin + event.block_size])
        bus.emit(events.BlockStored(time_s, None, block_hash, parent, tokens, event.medium))
        parent = block_hash
