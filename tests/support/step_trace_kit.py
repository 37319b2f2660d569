"""Timelines, and what a GPU would tell of a step, made up."""

from __future__ import annotations

from interlace.bench.step_trace.build import LayerLoad, StepMarks, build_trace
from interlace.bench.step_trace.device import DeviceEvent, LoadShape
from interlace.bench.step_trace.facts import HybridFacts, RanStep, TraceFacts
from interlace.bench.step_trace.hybrid_build import HybridMarks, SliceLoad, build_hybrid_trace
from interlace.bench.step_trace.hybrid_tape import HybridTape, NotedSlice
from interlace.bench.step_trace.intervals import Interval
from interlace.bench.step_trace.trace import Blocks, HybridTrace, StepTrace
from interlace.connectors.pipeline.layer_groups import LayerGroups

US = 1000
SHAPE = LoadShape(num_layers=4, page_bytes=1000, layer_bytes=8000, group_size=1)
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


# ---------------------------------------------------------------- from both ends


def both_ends_facts(
    front: int, loaded: int, steps: tuple[RanStep, ...], num_layers: int = 4, **changes: object
) -> HybridFacts:
    """`front` and `loaded`: blocks of 16 tokens. 8 new tokens."""
    known: dict[str, object] = {
        "model": "dummy:llama-3.1-8b",
        "dtype": "bfloat16",
        "machine": "NVIDIA H200",
        "clock": "device",
        "num_layers": num_layers,
        "block_size": 16,
        "front_tokens": 16 * front,
        "loaded_tokens": 16 * loaded,
        "new_tokens": 8,
        "request_id": "request-7",
        "steps": steps,
    }
    return HybridFacts(**{**known, **changes})  # type: ignore[arg-type]


def both_ends_marks(
    sizes: tuple[int, ...] = (24, 16),
    fronts: tuple[int, ...] = (16, 8),
    *,
    num_layers: int = 4,
    block_us: int = 10,
    layer_us: int = 50,
    pause_us: int = 20,
) -> HybridMarks:
    """Slices of so many blocks, one at once after the other, and steps that compute so many blocks
    of the front, with pauses between them, and then 8 new tokens when the load has ended."""
    behind = sum(sizes) + sum(fronts)
    at = 1000
    slices = []
    for number, size in enumerate(sizes):
        load = LayerLoad(at * US, (at + size * block_us) * US, 1000 * size)
        slices.append(SliceLoad(Blocks(behind - size, behind), load))
        behind, at = behind - size, at + size * block_us + number
    steps, now = [], 1010
    for is_last in (*[False] * len(fronts), True):
        now = max(now, at + 30) if is_last else now
        gates = [now + 10 + layer * layer_us for layer in range(num_layers)]
        end = gates[-1] + layer_us
        begun = [Interval(gate * US, gate * US) for gate in gates]
        steps.append(StepMarks((), now * US, tuple(begun), end * US, (end + 5) * US))
        now = end + 5 + pause_us
    tokens = [*(16 * front for front in fronts), 8]
    ran = tuple(RanStep(42 + number, count) for number, count in enumerate(tokens))
    return HybridMarks("request-7", sum(sizes) + sum(fronts), tuple(slices), ran, tuple(steps))


def of_both_ends(marks: HybridMarks | None = None, num_layers: int = 4) -> HybridTrace:
    marks = marks or both_ends_marks(num_layers=num_layers)
    loaded = marks.num_loaded_blocks
    front = marks.num_blocks - loaded
    return build_hybrid_trace(marks, both_ends_facts(front, loaded, marks.ran, num_layers))


class Ticks:
    """A clock that goes on by a microsecond whenever it is read."""

    def __init__(self) -> None:
        self.now = 0

    def monotonic(self) -> float:
        self.now += 1
        return self.now / 1e6


def a_tape(*slices: NotedSlice, num_steps: int = 2) -> HybridTape:
    """Of a load of 8 blocks, 100 to 107, and steps that no times are known of: of three blocks and,
    the last one, of 8 tokens."""
    tape = HybridTape(Ticks())
    tape.note_load("request-7", [(30, 100, 5), (10, 105, 3)])
    for number in range(num_steps):
        tape.begin(RanStep(42 + number, 8 if number == num_steps - 1 else 48))
    for one in slices:
        tape.add_slice(one)
    return tape


BY_COPIES = NotedSlice([(30, 104, 1), (10, 105, 3)], 0, 0, 16_000, 8)
"""Blocks 4 to 7 in two runs, of four layers with pages of 1,000 bytes."""
BY_KERNEL = NotedSlice([(33, 103, 1)], 0, 0, 4000, 1)


class BothEndsDevice(FakeDevice):
    """As `FakeDevice`, for steps that no layer waits in."""

    def step(self, num_layers: int = 4, *, has_head: bool = True, by_kernel: bool = False) -> None:
        if by_kernel:
            self.kernel("read_words_kernel", 2)
        else:
            self.copy(self.now, 2, 700, stream=COMPUTE)
            self.now += 2
        self.kernel("rms_norm_kernel", 1)
        for layer in range(num_layers):
            self.kernel("nvjet_qkv", 6)
            if layer == num_layers - 1 and not has_head:
                self.kernel("rope_write_kernel", 2)
                self.kernel("attention_kernel", 20)
                return
            self.attend()
        self.kernel("nvjet_head", 30)
        self.kernel("greedy_kernel", 4)

    def slices(self, begin: int) -> int:
        """`BY_COPIES` and `BY_KERNEL`, one after the other; when they end."""
        for copy in range(8):
            self.copy(begin + 20 * copy, 20, 1000 if copy % 2 == 0 else 3000)
        self.now = begin + 160
        self.kernel("read_words_kernel", 1, LOAD)
        self.kernel("record_gather_kernel", 50, LOAD)
        return self.now


def a_run_from_both_ends(*, has_head: bool = True) -> BothEndsDevice:
    """One step beside `BY_COPIES` and `BY_KERNEL`, one behind them, and a save by the kernel."""
    device = BothEndsDevice()
    loaded = device.slices(995)
    device.now = 1000
    device.step(has_head=has_head)
    device.now = max(device.now, loaded) + 40
    device.step(by_kernel=True)
    device.kernel("record_gather_kernel", 9, STORE)
    return device
