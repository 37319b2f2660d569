"""What every trace of an engine must hold to, and one that was made by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

from interlace.bench.engine_trace.parse import read_file
from interlace.engine.engine_trace import (
    EngineTrace,
    EngineTraceFacts,
    HostTimes,
    LeftOut,
    TracedRequest,
    TracedStep,
)
from interlace.engine.step_timings import LayerTiming, StepTiming, TransferTiming

FACTS = EngineTraceFacts(
    model="dummy:tiny",
    dtype="bfloat16",
    device="cuda",
    machine="a GPU",
    clock="device",
    num_layers=3,
    kv_connector="PipelineConnector",
    interlace="0.1.0",
    torch="2.13.0",
)


def a_step(
    step_id: int, begin_ms: float, waits_ms: tuple[float, ...], layer_ms: float, **tokens: int
) -> TracedStep:
    """Half a millisecond of "embed" and of "head" around its layers."""
    at = begin_ms + 0.5
    layers = []
    for layer, wait_ms in enumerate(waits_ms):
        end = at + wait_ms + layer_ms
        layers.append(LayerTiming(layer, ms(at), ms(at + wait_ms), ms(end)))
        at = end
    is_gated = any(waits_ms)
    mode = "FULL" if is_gated else "PIECEWISE"
    scheduled = tuple(tokens.items())
    begin, end_s = ms(begin_ms), ms(at + 0.5)
    timing = StepTiming(step_id, scheduled, mode, is_gated, begin, end_s, tuple(layers))
    host = HostTimes(ms(begin_ms - 0.2), ms(begin_ms - 0.1), ms(at + 0.6), ms(at + 0.7))
    return TracedStep(step_id, scheduled, host, timing)


def ms(milliseconds: float) -> float:
    """Seconds, whole nanoseconds."""
    return round(milliseconds * 1e6) / 1e9


def sample_trace() -> EngineTrace:
    """A prefill whose KV is saved, a step that loads layer by layer, decodes beside a bulk load."""

    def load(first: int, end: int, begin_ms: float, end_ms: float) -> TransferTiming:
        num_bytes = 4_000_000 * (end - first)
        times = (ms(begin_ms), ms(end_ms))
        return TransferTiming(
            "load", "load", ("hit",), first, end, 8, num_bytes, "strided", *times, step_id=4
        )

    return EngineTrace(
        FACTS,
        (
            a_step(2, 1.0, (0.0, 0.0, 0.0), 1.0, cold=128),
            a_step(4, 6.0, (0.25, 0.0, 1.5), 1.0, hit=16, cold=1),
            a_step(5, 11.75, (0.0, 0.0, 0.0), 0.25, hit=1, cold=1),
        ),
        (
            TransferTiming(
                "store", "save", (), 0, 3, 8, 12_000_000, "batch", ms(5.0), ms(6.0),
                transfer="save 1",
            ),
            load(0, 1, 5.75, 6.25),
            load(1, 3, 6.25, 9.25),
            TransferTiming(
                "bulk", "load", ("late",), 0, 3, 8, 12_000_000, "gather", ms(11.875), ms(12.875),
                transfer="late",
            ),
        ),
        (
            TracedRequest("cold", 128, ms(0.5), ms(0.75), ms(5.125), None, None, None, 0, 0),
            TracedRequest(
                "hit", 144, ms(5.5), ms(5.625), ms(11.5), ms(13.5), "length", 2, 0, 128, 1
            ),
        ),
        LeftOut(steps=2),
    )  # fmt: skip


async def read(path: Path) -> EngineTrace:
    """The trace in a file."""
    trace = await asyncio.to_thread(read_file, path)
    assert trace is not None
    return trace


def problems_of(trace: EngineTrace) -> list[str]:
    """What is wrong with it."""
    found: list[str] = []
    ids = [step.step_id for step in trace.steps]
    if ids != sorted(set(ids)):
        found.append(f"steps are numbered {ids}")
    for step in trace.steps:
        if step.timing is not None:
            if step.timing.num_scheduled_tokens != step.num_scheduled_tokens:
                found.append(f"step {step.step_id} has other tokens on the device")
            found += _problems_of_step(step.timing, trace.facts.num_layers)
        host = (step.host.scheduled_s, step.host.launched_s, step.host.tokens_s, step.host.done_s)
        known = [one for one in host if one is not None]
        if known != sorted(known):
            found.append(f"step {step.step_id} was not scheduled, launched and applied in order")
    found += [f"{p} ends before it begins" for p in trace.transfers if p.end_s < p.begin_s]
    if trace.left_out.timings or trace.left_out.events:
        found.append(f"{trace.left_out} was lost")
    return found


def _problems_of_step(step: StepTiming, num_layers: int) -> Iterator[str]:
    name = f"step {step.step_id}"
    if not step.layers:
        return
    if [layer.layer for layer in step.layers] != list(range(num_layers)):
        yield f"{name} has not each layer once, in order"
    times = [step.begin_s]
    for layer in step.layers:
        times += [layer.arrived_s, layer.passed_s, layer.end_s]
    times.append(step.end_s)
    if times != sorted(times):
        yield f"{name} runs backwards: {times}"
    following = [layer.arrived_s for layer in step.layers[1:]]
    if following != [layer.end_s for layer in step.layers[:-1]]:
        yield f"{name} has gaps between layers"
