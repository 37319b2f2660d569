"""A `GpuRunner` whose steps are recorded: kernels interpreted, events of a stand-in for CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_streams import FakeDevice
from tiny_model import plain_answer, tiny_model

from interlace.engine.kv_connector import KVConnectorMetadata
from interlace.engine.outputs import ModelRunnerOutput
from interlace.engine.sampling_params import SamplingParams
from interlace.engine.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from interlace.engine.step_timings import StepTiming, Timings
from interlace.layers.gpu import runner as gpu_runner
from interlace.layers.gpu.forward import Answer
from interlace.layers.gpu.graphs import StepToReplay
from interlace.layers.gpu.inputs import StepSize
from interlace.layers.gpu.runner import GpuRunner
from interlace.layers.graph_mode import GraphMode
from interlace.layers.kernels import matvec
from interlace.layers.kernels.toolchain import INTERPRETED
from interlace.layers.kv_pages import KVPages

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="set TRITON_INTERPRET=1 to run these")
MODEL = tiny_model(dtype=torch.float32)
NUM_LAYERS = MODEL.architecture.num_layers
TOKENS = (5, 9, 2, 7, 1, 1, 8, 3, 4)


@pytest.fixture(autouse=True)
def _products_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matvec, "prefers_matvec", lambda *_: False)


class Clock:
    """The device's."""

    def __init__(self, device: FakeDevice) -> None:
        self.monotonic = lambda: device.now


class Kit:
    """A runner without a connector."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = FakeDevice(op_s=0.001)
        monkeypatch.setattr(gpu_runner, "CudaStreams", lambda _: self.device)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
        a = MODEL.architecture
        pages = KVPages(
            num_layers=NUM_LAYERS,
            num_blocks=12,
            block_size=4,
            num_kv_heads=a.num_kv_heads,
            head_dim=a.head_dim,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        self.runner = GpuRunner(
            MODEL.decoder, pages, (), [], max_num_seqs=2, max_num_batched_tokens=16, num_sms=4
        )

    def begin(self) -> None:
        facts = self.runner.begin_recording(Clock(self.device))
        assert (facts.clock, facts.machine, facts.num_layers) == ("device", "a GPU", NUM_LAYERS)

    def step(self, step_id: int = 1) -> ModelRunnerOutput:
        """A prompt's one step."""
        name = f"r{step_id}"
        new = NewRequestData(name, TOKENS, SamplingParams(temperature=0), 0, ([1, 2, 3],), 0)
        output = SchedulerOutput(
            step_id=step_id,
            scheduled_new_reqs=[new],
            scheduled_cached_reqs=CachedRequestData(),
            num_scheduled_tokens={name: len(TOKENS)},
            total_num_scheduled_tokens=len(TOKENS),
            finished_req_ids=frozenset({f"r{step_id - 1}"}),
            preempted_req_ids=frozenset(),
            sampling_req_ids=frozenset({name}),
            kv_connector_metadata=KVConnectorMetadata(),
        )
        return self.runner.execute(output)


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch) -> Kit:
    return Kit(monkeypatch)


def the_step(output: ModelRunnerOutput) -> StepTiming:
    assert output.timings is not None
    (step,) = output.timings.steps
    return step


def test_a_step_comes_out_with_its_own_times(kit: Kit) -> None:
    kit.begin()
    output = kit.step()
    step = the_step(output)
    assert output.sampled_token_ids["r1"] == tuple(plain_answer(MODEL, list(TOKENS), 1))
    assert (step.step_id, step.mode, step.is_gated) == (1, "NONE", False)
    assert step.num_scheduled_tokens == (("r1", len(TOKENS)),)
    assert [layer.layer for layer in step.layers] == list(range(NUM_LAYERS))
    times = [step.begin_s, *(layer.arrived_s for layer in step.layers)]
    times += [step.layers[-1].end_s, step.end_s]
    assert times == sorted(times)


def test_nothing_is_timed_before_and_behind_a_recording(kit: Kit) -> None:
    assert kit.step(1).timings is None
    kit.begin()
    assert the_step(kit.step(2)).step_id == 2
    assert kit.runner.end_recording() == Timings()
    assert kit.step(3).timings is None
    assert kit.runner.end_recording() == Timings()


class Full:
    """A full graph of nine tokens."""

    runtime_mode = GraphMode.FULL
    size = StepSize(len(TOKENS), 1)

    def __init__(self) -> None:
        self.replayed: list[object] = []

    def replay(self, step: StepToReplay) -> Answer:
        assert step.hooks is None
        self.replayed.append(step.traced)
        return Answer(torch.zeros(1, 8), torch.zeros(2, 1, dtype=torch.int32))


@pytest.mark.parametrize("has_memory", [True, False])
def test_a_full_graph_is_replaced_by_one_that_tells_times(
    has_memory: bool, kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured, made = Full(), list[object]()

    def capture(_: Any, around: Any, *, is_gated: bool) -> Any:
        if not has_memory:
            raise torch.cuda.OutOfMemoryError("none")
        hooks = around(None)
        for layer in range(NUM_LAYERS):
            hooks.wait(layer)
            hooks.save(layer)
        hooks.end()
        assert not is_gated
        made.append(object())
        return made[-1]

    monkeypatch.setattr(kit.runner._graphs, "find", lambda *_, **__: captured)
    monkeypatch.setattr(kit.runner._graphs, "capture_traced", capture)
    kit.step(1)
    kit.begin()
    steps = [the_step(kit.step(step_id)) for step_id in (2, 3)]
    assert [(step.mode, step.is_gated) for step in steps] == [("FULL", False)] * 2
    assert [len(step.layers) for step in steps] == [NUM_LAYERS * has_memory] * 2
    kit.runner.end_recording()
    kit.step(4)
    graph = made[0] if has_memory else None
    assert captured.replayed == [None, graph, graph, None], "one is enough, a step at a time"
