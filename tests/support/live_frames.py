"""Frames of engines in many states, for what reads or draws them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from interlace.cli.live.shown import Shown
from interlace.engine.live_frame import EngineFacts, Frame, Rates, frame_of
from interlace.engine.scheduler_stats import SchedulerStats
from interlace.engine.snapshot import EngineSnapshot, RequestSnapshot
from interlace.engine.transfer_picture import (
    ConnectorPicture,
    LanePicture,
    LayerState,
    TierPicture,
    TransferPicture,
)
from interlace.layers.hardware.gpu_load import GpuLoad

FACTS = EngineFacts(4711, "dummy:llama-3.1-8b", "cuda", "bfloat16", "PipelineConnector")
GPU = GpuLoad(
    name="NVIDIA H200",
    index=0,
    num_gpus=1,
    is_certain=True,
    busy_share=0.97,
    memory_used_bytes=128_400_000_000,
    memory_total_bytes=150_754_820_096,
    received_bytes_per_s=41_200_000_000,
    sent_bytes_per_s=1_310_000_000,
    power_w=512.4,
    power_limit_w=700.0,
)
NO_RATES = Rates(2.0, 0.0, 0.0, 0.0, None, None, 0.0, None, None, 0.0003, 0)
RATES = Rates(2.0, 1204.5, 18_321.0, 38.5, 0.0241, 0.0312, 0.982, 0.0294, 0.0281, 0.0021, 0)


def states(**counts: int) -> tuple[LayerState, ...]:
    """So many of each, one state after the other."""
    found: list[LayerState] = []
    for state, count in counts.items():
        found += [state] * count  # type: ignore[list-item]
    return tuple(found)


def request(number: int, status: str, prompt: int, local: int, external: int) -> RequestSnapshot:
    is_running = status == "RUNNING"
    computed = prompt + 12 * number if is_running and number % 3 else local + external
    return RequestSnapshot(
        request_id=f"request-{number}",
        status=status,
        priority=0,
        num_prompt_tokens=prompt,
        num_generated_tokens=max(0, computed - prompt),
        num_computed_tokens=computed,
        num_local_cached_tokens=local,
        num_external_cached_tokens=external,
        num_blocks=-(-computed // 16),
        num_preemptions=0,
    )


LOAD = TransferPicture(
    kind="load",
    way="layer by layer",
    layers=states(computed=9, arrived=3, copying=2, waiting=18),
    num_requests=2,
    num_blocks=1024,
    num_bytes=2_147_483_648,
    num_bytes_done=805_306_368,
)
SAVE = TransferPicture(
    kind="save",
    way="beside the steps",
    layers=states(saved=32),
    num_requests=0,
    num_blocks=43,
    num_bytes=90_177_536,
    num_bytes_done=90_177_536,
    seconds=0.00213,
)
LANES = (
    LanePicture("load", 81_604_378_624, is_busy=True),
    LanePicture("bulk", 4_294_967_296, is_busy=False),
    LanePicture("store", 17_179_869_184, is_busy=False),
)
TIERS = (
    TierPicture("memory", 3211, 4096, 2_097_152, 38_912, 8192, 981, drops={"no room": 16}),
    TierPicture("files", 20_480, None, 2_097_152, 1024, 20_480, 2, evicted_unit="files"),
)
PIPELINE = ConnectorPicture("PipelineConnector", LOAD, SAVE, LANES, 55_300_000_000.0, TIERS)


def snapshot(
    running: Sequence[RequestSnapshot] = (),
    waiting: Sequence[RequestSnapshot] = (),
    connectors: tuple[ConnectorPicture, ...] = (),
    *,
    num_free_blocks: int = 2900,
    dead: str | None = None,
) -> EngineSnapshot:
    return EngineSnapshot(
        time_s=1234.5,
        running=tuple(running),
        waiting=tuple(waiting),
        num_preparing_requests=0,
        num_inflight_steps=1,
        block_size=16,
        num_usable_blocks=4095,
        num_free_blocks=num_free_blocks,
        num_cached_blocks=3120,
        num_fenced_blocks=0,
        num_held_requests=0,
        stats=SchedulerStats(
            num_steps=900,
            num_prompt_tokens=120_000,
            num_local_cached_tokens=20_000,
            num_generated_tokens=9000,
            num_external_cached_tokens=80_000,
            num_finished_requests=42,
        ),
        kv_connector_stats={"blocks_loaded": 2048, "chose_layerwise": 2},
        connectors=connectors,
        dead=dead,
    )


RUNNING = [request(i, "RUNNING", 8880, 0, 8192) for i in range(6)]
WAITING = [
    request(7, "WAITING_FOR_REMOTE_KVS", 8880, 0, 8192),
    request(8, "WAITING", 700, 0, 0),
]


def busy(load: TransferPicture | None = LOAD, **changes: object) -> Frame:
    """An engine that loads while it computes."""
    connector = dataclasses.replace(PIPELINE, load=load)
    frame = frame_of(17, FACTS, RATES, snapshot(RUNNING, WAITING, (connector,)))
    return dataclasses.replace(frame, **changes)  # type: ignore[arg-type]


def idle() -> Frame:
    """Nothing was asked of it yet, and it has no connector."""
    facts = EngineFacts(4711, "smollm2-135m", "cpu", "float32", None)
    return frame_of(3, facts, NO_RATES, snapshot(num_free_blocks=4095))


def shown(frame: Frame | None = None, **changes: object) -> Shown:
    """As a viewer on a GPU machine shows it."""
    flow = {("PipelineConnector", "load"): 11.3e9, ("PipelineConnector", "store"): 0.04e9}
    whole = Shown(frame or busy(), flow, GPU)
    return dataclasses.replace(whole, **changes)  # type: ignore[arg-type]
