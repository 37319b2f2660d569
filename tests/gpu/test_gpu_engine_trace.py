"""Steps of a GPU that are recorded: layers in order, waits where a load is held up, the same tokens
without graphs, in pieces, in full graphs and in gated ones, with two steps under way."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from connected_gpu import BLOCK_SIZE, ask, settle
from pipeline_gpu import NUM_LAYERS, RECORD_BYTES, LoadRig, an_engine, gpu_model
from tiny_model import VOCAB_SIZE
from trace_kit import problems_of

from interlace import AsyncEngine, EngineConfig
from interlace.bench.engine_trace.parse import from_json
from interlace.engine.engine_trace import EngineTrace
from interlace.engine.step_timings import StepTiming
from interlace.layers.checkpoint import LoadedModel
from interlace.layers.gpu.graphs import GraphPool
from interlace.layers.page_copies import Runs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
PROMPT = [(7 * i + 3) % VOCAB_SIZE for i in range(10 * BLOCK_SIZE)]
NEW = [5, 3, 1]
"""One of them alone is a step of decodes, which there are pieces for."""
LATE_LAYER = 3
LATE_CYCLES = 20_000_000
"""Some ten milliseconds."""
LATE_S = 0.002
MODES = ["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"]
modes = pytest.mark.parametrize("graphs", MODES)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return gpu_model()


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> LoadRig:
    made = LoadRig()
    made.install(monkeypatch)
    return made


def late(layer: int, runs: Runs) -> None:
    """A `Before`."""
    if layer == LATE_LAYER:
        torch.cuda._sleep(LATE_CYCLES)  # type: ignore[no-untyped-call]


@asynccontextmanager
async def plain_engine(model: LoadedModel, graphs: str) -> AsyncIterator[AsyncEngine]:
    """Without a connector."""
    config = EngineConfig(
        cudagraph_mode=graphs,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=90,
        max_num_seqs=6,
        max_num_batched_tokens=64,
    )
    async with AsyncEngine.from_loaded(config, model) as engine:
        yield engine


def read(path: Path) -> EngineTrace:
    return from_json(path.read_text())


def timings_of(trace: EngineTrace) -> list[StepTiming]:
    return [step.timing for step in trace.steps if step.timing is not None]


async def hit(engine: AsyncEngine, new: Sequence[int] = NEW) -> list[int]:
    """A prompt is stored, forgotten on the device, and sent again with new tokens behind it."""
    await ask(engine, PROMPT, 2)
    await settle(engine)
    assert engine.reset_prefix_cache()
    return list((await ask(engine, [*PROMPT, *new], 6)).token_ids)


def mode_of(graphs: str) -> str:
    """How a short step of one request runs."""
    return "FULL" if "FULL" in graphs else graphs


@modes
@pytest.mark.parametrize("num_new", [1, 3])
async def test_layers_and_waits_of_a_step_that_loads(
    graphs: str, num_new: int, model: LoadedModel, rig: LoadRig, tmp_path: Path
) -> None:
    new = NEW[:num_new]
    async with an_engine(model, "layerwise", graphs=graphs) as engine:
        expected = await hit(engine, new)
    rig.before = late
    path = tmp_path / "trace.json"
    async with an_engine(model, "layerwise", graphs=graphs) as engine, engine.trace(path):
        assert await hit(engine, new) == expected
        await settle(engine)
    trace = read(path)
    assert problems_of(trace) == []
    assert (trace.facts.clock, trace.facts.num_layers) == ("device", NUM_LAYERS)
    timings = timings_of(trace)
    assert len(timings) == len(trace.steps)
    assert all(one.layers for one in timings), "every step tells of its layers"
    loads = [piece for piece in trace.transfers if piece.way == "load"]
    assert sum(piece.num_bytes for piece in loads) == len(PROMPT) // BLOCK_SIZE * RECORD_BYTES
    assert [piece.first_layer for piece in loads] == list(range(NUM_LAYERS))
    (step_id,) = {piece.step_id for piece in loads}
    (step,) = (one for one in timings if one.step_id == step_id)
    assert step.mode == mode_of(graphs)
    assert step.is_gated is ("FULL" in graphs)
    waits = [layer.waited_s for layer in step.layers]
    assert waits.index(max(waits)) == LATE_LAYER
    assert waits[LATE_LAYER] > LATE_S
    assert waits[LATE_LAYER + 1] < waits[LATE_LAYER] / 4
    came = {piece.first_layer: piece.end_s for piece in loads}
    for layer in step.layers:
        assert layer.passed_s > came[layer.layer] - 50e-6, "no layer goes before its load"
    others = [one for one in timings if one.step_id != step_id]
    assert others
    assert max(layer.waited_s for one in others for layer in one.layers) < LATE_S


@modes
async def test_two_steps_under_way_tell_their_own_times(
    graphs: str, model: LoadedModel, tmp_path: Path
) -> None:
    """A hundred replays of the same graph, each of which records its events anew."""
    path = tmp_path / "trace.json"
    async with plain_engine(model, graphs) as engine:
        assert engine.config.max_inflight_steps == 2
        expected = [list((await ask(engine, PROMPT[:n], 100)).token_ids) for n in (5, 9)]
        assert engine.reset_prefix_cache()
        async with engine.trace(path):
            found = await asyncio.gather(*(ask(engine, PROMPT[:n], 100) for n in (5, 9)))
    assert [list(one.token_ids) for one in found] == expected
    trace = read(path)
    assert problems_of(trace) == []
    timings = timings_of(trace)
    assert len(timings) >= 100
    assert all(one.layers for one in timings)
    for before, after in itertools.pairwise(timings):
        assert after.begin_s > before.begin_s
        assert after.end_s > before.end_s
        assert after.layers[0].arrived_s > before.layers[-1].end_s - 50e-6
    decodes = [one for one in timings if len(one.num_scheduled_tokens) == 2]
    if "FULL" in graphs:
        assert {one.mode for one in decodes} == {"FULL"}
    assert not any(one.is_gated for one in timings)


async def test_gated_and_plain_replays_take_turns(
    model: LoadedModel, rig: LoadRig, tmp_path: Path
) -> None:
    rig.before = rig.delay
    prompts = [[i, *PROMPT] for i in range(5)]
    graphs = "FULL_AND_PIECEWISE"
    async with an_engine(model, "layerwise", graphs=graphs, group_size=2) as engine:
        for prompt in prompts:
            await ask(engine, prompt, 2)
        async with engine.trace(tmp_path / "t"):
            for turn in range(8):
                await settle(engine)
                assert engine.reset_prefix_cache()
                others = asyncio.gather(*(ask(engine, [40 + i, 2], 20) for i in range(2)))
                one = await ask(engine, [*prompts[turn % 5], *NEW], 4)
                await others
                assert one.usage.num_external_cached_tokens
            await settle(engine)
    trace = read(tmp_path / "t")
    assert problems_of(trace) == []
    timings = timings_of(trace)
    assert all(one.layers for one in timings)
    assert {one.is_gated for one in timings} == {True, False}


@pytest.mark.parametrize("load_mode", ["bulk", "hybrid"])
async def test_loads_beside_the_steps(load_mode: str, model: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    async with an_engine(model, load_mode) as engine, engine.trace(path):
        await hit(engine)
        await settle(engine)
    trace = read(path)
    assert problems_of(trace) == []
    loads = [piece for piece in trace.transfers if piece.way == "load"]
    saves = [piece for piece in trace.transfers if piece.way == "save"]
    assert {piece.lane for piece in loads} <= {"bulk"}
    assert {piece.lane for piece in saves} == {"store"}
    if load_mode == "bulk":
        assert sum(piece.num_bytes for piece in loads) == len(PROMPT) // BLOCK_SIZE * RECORD_BYTES


async def test_without_memory_for_another_graph_steps_are_timed_as_wholes(
    model: LoadedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise torch.cuda.OutOfMemoryError("there is none")

    monkeypatch.setattr(GraphPool, "capture_traced", refuse)
    path = tmp_path / "trace.json"
    async with plain_engine(model, "FULL") as engine:
        expected = (await ask(engine, PROMPT, 20)).token_ids
        assert engine.reset_prefix_cache()
        with caplog.at_level(logging.WARNING, logger="interlace.layers.gpu.traced_graphs"):
            async with engine.trace(path):
                assert (await ask(engine, PROMPT, 20)).token_ids == expected
    assert len([one for one in caplog.records if one.name.endswith("traced_graphs")]) == 1
    timings = timings_of(read(path))
    assert len(timings) >= 20
    assert not any(one.layers for one in timings)
    assert all(one.end_s > one.begin_s for one in timings)


async def test_a_recording_can_begin_again(model: LoadedModel, tmp_path: Path) -> None:
    async with plain_engine(model, "FULL_AND_PIECEWISE") as engine:
        for turn in range(3):
            async with engine.trace(tmp_path / f"{turn}"):
                await ask(engine, [turn, *PROMPT], 5)
            await ask(engine, [turn, 9, *PROMPT], 5)
    for turn in range(3):
        trace = read(tmp_path / f"{turn}")
        assert problems_of(trace) == []
        assert all(one.layers for one in timings_of(trace))
