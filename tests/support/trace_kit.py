"""What every trace of an engine must hold to."""

from __future__ import annotations

from collections.abc import Iterator

from interlace.engine.engine_trace import EngineTrace
from interlace.engine.step_timings import StepTiming


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
