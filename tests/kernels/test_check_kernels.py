"""`interlace check` over the GPU's runner without a GPU: its kernels under Triton's interpreter.

Graphs are played too: what stands for one runs the step's kernels, and calls no hooks of layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from graph_connectors import AtOnce, LastLayerLate

from interlace import front_door
from interlace.connectors.base import KVConnectorBase_V1
from interlace.connectors.conformance import (
    Async,
    EngineShape,
    Harness,
    Rule,
    Script,
    ScriptedConnector,
    Sync,
    Violation,
)
from interlace.engine.config import EngineConfig
from interlace.engine.ports import Progress, StepRunner
from interlace.layers.checkpoint import LoadedModel
from interlace.layers.gpu.forward import Answer, FusedDecoder, Wanted
from interlace.layers.gpu.graphs import Captured, GraphPool, StepToReplay
from interlace.layers.gpu.inputs import StepSize
from interlace.layers.gpu.runner import GpuRunner
from interlace.layers.graph_mode import GraphMode
from interlace.layers.kernels import matvec
from interlace.layers.kernels.toolchain import INTERPRETED
from interlace.layers.kv_pages import KVPages

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="set TRITON_INTERPRET=1 to run these")


@pytest.fixture(autouse=True)
def _gpu_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines on the CPU get the GPU's runner."""
    # The kernel for few rows has tests of its own, and takes most of the time interpreted.
    monkeypatch.setattr(matvec, "prefers_matvec", lambda *_: False)
    monkeypatch.setattr(front_door, "_make_runner", make_gpu_runner)


def make_gpu_runner(
    config: EngineConfig,
    loaded: LoadedModel,
    pages: Sequence[KVPages],
    workers: Sequence[KVConnectorBase_V1],
    progress: Progress,
) -> StepRunner:
    (only,) = pages
    return GpuRunner(
        loaded.decoder,
        only,
        loaded.eos_token_ids,
        workers,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        num_sms=4,
        hidden_state_layer_ids=config.hidden_state_layer_ids,
    )


@dataclasses.dataclass(frozen=True)
class InOne:
    """A step that calls no hooks of layers."""

    forward: FusedDecoder
    size: StepSize
    runtime_mode: GraphMode = GraphMode.FULL
    gathers: bool = False
    is_cut: bool = False

    def replay(self, step: StepToReplay) -> Answer:
        assert step.hooks is None
        wanted = Wanted(step.inputs.last_tokens, step.inputs.rows)
        attention = self.forward.attention(step.inputs, step.bounds, step.chunks)
        answer = self.forward.forward(step.inputs, attention, wanted)
        assert answer is not None
        return answer


@pytest.fixture
def _full_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is one graph."""

    def find(
        pool: GraphPool, size: StepSize, *, is_decode: bool, can_gather: bool
    ) -> Captured | None:
        return InOne(pool._forward, size)

    monkeypatch.setattr(GraphPool, "find", find)


def harness(connector: type[ScriptedConnector], answer: Sync | Async) -> Harness:
    """A small engine: interpreted kernels are slow."""
    script = Script(default=Rule(answers=(answer,)))
    shape = EngineShape(depth=2, num_blocks=8, max_num_batched_tokens=8, max_num_seqs=2)
    return Harness.of(connector, {"script": script}, shape=shape, dtype="float32")


def save_and_load(engine: Harness) -> None:
    """One prompt twice: tokens and KV are compared with what is right. Raises: `Violation`."""
    for name in ("saves", "loads"):
        engine.add(name, [7, 3, 9, 1, 4, 4], max_tokens=2)
        engine.run()
        assert engine.reset_prefix_cache()


@pytest.mark.parametrize("answer", [Sync(), Async()])
def test_what_is_loaded_is_compared(answer: Sync | Async) -> None:
    with harness(ScriptedConnector, answer) as engine:
        save_and_load(engine)
        assert engine.watch.evidence["loaded tokens"] == 4
        assert engine.watch.evidence["compared blocks"] == 3
        assert engine.watch.evidence["tokens"] == 4


def test_the_next_step_is_launched_before_one_is_applied() -> None:
    with harness(ScriptedConnector, Sync()) as engine:
        engine.add("A", [7, 3, 9], max_tokens=3)
        engine.run()
        trace = engine.watch.trace.newest()
    told = [line.split(",")[0] for line in trace if line.startswith("engine")]
    second = next(place for place, line in enumerate(told) if "executes step 2" in line)
    assert "engine    applies step 1" in told[second:]


def test_a_layer_that_is_late_is_found() -> None:
    with harness(LastLayerLate, Sync()) as engine:
        with pytest.raises(Violation) as raised:
            save_and_load(engine)
        assert raised.value.property_id == "layer-loads-complete"


@pytest.mark.usefixtures("_full_graphs")
def test_in_a_graph_loads_are_due_before_the_step() -> None:
    with harness(AtOnce, Sync()) as engine:
        save_and_load(engine)
        assert engine.watch.evidence["compared blocks"] == 3
    with harness(LateInGraphs, Sync()) as engine:
        with pytest.raises(Violation, match="was needed when start_load_kv returned") as raised:
            save_and_load(engine)
        assert raised.value.property_id == "layer-loads-complete"


class LateInGraphs(AtOnce):
    """Saves behind each step, and leaves loads to hooks that nobody calls."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        ScriptedConnector.start_load_kv(self, forward_context, **kwargs)
