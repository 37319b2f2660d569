"""What a runner has timed, as events. Loop thread."""

from __future__ import annotations

from interlace.engine.events import (
    EventBus,
    GateFailed,
    LayerCompute,
    LayerLoad,
    LayerSave,
    StepTimed,
    TimingsDropped,
)
from interlace.engine.step_timings import Timings, TransferTiming


def publish_timings(timings: Timings, events: EventBus, now_s: float) -> None:
    """Tell whoever reads; copies first, since steps wait for them. `now_s`: the engine's clock."""
    if not events.active:
        return
    for piece in timings.transfers:
        _publish_transfer(piece, events, now_s)
    for step in timings.steps:
        for layer in step.layers:
            events.emit(LayerCompute(now_s, step.step_id, layer))
        events.emit(StepTimed(now_s, step))
    if timings.num_dropped:
        events.emit(TimingsDropped(now_s, timings.num_dropped))


def _publish_transfer(piece: TransferTiming, events: EventBus, now_s: float) -> None:
    events.emit((LayerLoad if piece.way == "load" else LayerSave)(now_s, piece))
    if piece.error is None or piece.step_id is None:
        return
    layers = (piece.first_layer, piece.end_layer)
    failed = piece.failed_ids or piece.request_ids
    events.emit(GateFailed(now_s, piece.step_id, *layers, failed, piece.error))
