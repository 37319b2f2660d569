"""Timelines, and what a GPU would tell of a step, made up."""

from __future__ import annotations

from interlace.bench.step_trace.build import LayerLoad, StepMarks, build_trace
from interlace.bench.step_trace.device import DeviceEvent, LoadShape
from interlace.bench.step_trace.facts import TraceFacts
from interlace.bench.step_trace.intervals import Interval
from interlace.bench.step_trace.trace import StepTrace
from interlace.connectors.pipeline.layer_groups import LayerGroups

US = 1000
SHAPE = LoadShape(num_layers=4, page_bytes=1000, layer_bytes=8000)
COMPUTE, LOAD, STORE = 7, 20, 28


def facts(group_size: int = 2, **changes: object) -> TraceFacts:
    known: dict[str, object] = {
        "model": "dummy:llama-3.1-8b",
        "dtype": "bfloat16",
        "machine": "NVIDIA H200",
        "clock": "device",
        "loaded_tokens": 8192,
        "new_tokens": 688,
        "group_size": group_size,
        "request_id": "request-7",
        "step_id": 42,
    }
    return TraceFacts(**{**known, **changes})  # type: ignore[arg-type]


def steady_marks(
    num_layers: int = 4,
    *,
    load_us: int = 100,
    compute_us: int = 90,
    group_size: int = 2,
    origin_us: int = 5000,
) -> StepMarks:
    """Layers of one load time and one compute time, each group of them behind its gate."""
    at = origin_us
    loads = []
    for _ in range(num_layers):
        loads.append(LayerLoad(at * US, (at + load_us) * US, 8000))
        at += load_us
    begin = origin_us + 10
    reached = begin + 20
    gates = []
    groups = LayerGroups(num_layers, group_size)
    for layer in range(num_layers):
        last = groups.last_beside(layer)
        passed = max(reached, loads[last].end_ns // US + 1)
        gates.append(Interval(reached * US, passed * US))
        reached = passed + compute_us
    return StepMarks(tuple(loads), begin * US, tuple(gates), reached * US, (reached + 30) * US)


def a_trace(num_layers: int = 4, group_size: int = 2, **options: int) -> StepTrace:
    marks = steady_marks(num_layers, group_size=group_size, **options)
    return build_trace(marks, facts(group_size))


class FakeDevice:
    """Writes down events of a step, kernel by kernel. Times in microseconds."""

    def __init__(self) -> None:
        self.events: list[DeviceEvent] = []
        self.now = 1000

    def kernel(self, name: str, length: int, stream: int = COMPUTE) -> None:
        self.events.append(
            DeviceEvent("kernel", name, stream, self.now * US, (self.now + length) * US)
        )
        self.now += length

    def copy(self, begin: int, length: int, size: int | None = 4000, stream: int = LOAD) -> None:
        name = "Memcpy HtoD (Pinned -> Device)"
        self.events.append(
            DeviceEvent("to_device", name, stream, begin * US, (begin + length) * US, size)
        )

    def attend(self) -> None:
        self.kernel("rope_write_kernel", 2)
        self.kernel("attention_kernel", 20)
        self.kernel("nvjet_o", 5)
        self.kernel("rms_norm_kernel", 1)
        self.kernel("nvjet_gate_up", 10)
        self.kernel("silu_mul_kernel", 2)
        self.kernel("nvjet_down", 8)
        self.kernel("splitKreduce_kernel", 2)
        self.kernel("rms_norm_kernel", 1)


def a_step(num_layers: int = 4) -> FakeDevice:
    """One that loads two copies of 4,000 bytes a layer, and waits for each layer."""
    device = FakeDevice()
    device.copy(980, 3, 200)  # something small
    device.copy(990, 2, 3000, stream=COMPUTE)  # the step's inputs
    for layer in range(num_layers):
        device.copy(985 + 100 * layer, 50)
        device.copy(1035 + 100 * layer, 50)
    device.kernel("index_kernel", 3)
    device.kernel("rms_norm_kernel", 1)
    for layer in range(num_layers):
        device.kernel("nvjet_qkv", 6)
        device.now = max(device.now, 1086 + 100 * layer)  # the gate
        device.attend()
    device.kernel("nvjet_head", 30)
    device.kernel("greedy_kernel", 4)
    device.kernel("index_select_of_a_save", 9, STORE)
    return device
