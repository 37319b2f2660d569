"""Whole engines that load and save while their steps are recorded: what a trace says of it."""

from __future__ import annotations

import asyncio
import json
import stat
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from deep_model import deep_model as make_deep_model
from pipeline_kit import (
    BLOCK_SIZE,
    NUM_LAYERS,
    PATIENCE_S,
    RECORD_BYTES,
    Rig,
    an_engine,
    ask,
    forget_on_device,
    some_tokens,
)
from trace_kit import problems_of

from interlace import AsyncEngine
from interlace.bench.engine_trace.parse import from_json
from interlace.engine.engine_trace import EngineTrace
from interlace.engine.events import (
    Event,
    GateFailed,
    LayerCompute,
    LayerLoad,
    LayerSave,
    StepTimed,
)
from interlace.layers.checkpoint import LoadedModel
from interlace.layers.page_copies import Runs

TIMED = (LayerCompute, LayerLoad, LayerSave, StepTimed, GateFailed)
PROMPT = some_tokens(1, 10 * BLOCK_SIZE)


@pytest.fixture(name="deep_model", scope="module")
def _deep_model() -> LoadedModel:
    return make_deep_model()


async def hit(engine: AsyncEngine, prompt: Sequence[int] = PROMPT, new: int = 9) -> list[int]:
    """The prompt is stored, forgotten on the device, and sent again with new tokens behind it."""
    await ask(engine, prompt, 2, "stores")
    await forget_on_device(engine)
    done = await ask(engine, [*prompt, *some_tokens(2, new)], 3, "loads")
    await forget_on_device(engine)
    return list(done.token_ids)


def files_in(folder: Path) -> dict[str, int]:
    """Name -> mode."""
    return {one.name: stat.S_IMODE(one.stat().st_mode) for one in folder.iterdir()}


def read(path: Path) -> EngineTrace:
    return from_json(path.read_text())


@pytest.mark.parametrize("load_mode", ["layerwise", "bulk", "hybrid", "auto"])
@pytest.mark.parametrize("depth", [1, 2])
async def test_a_trace_tells_of_all_that_was_copied_and_computed(
    deep_model: LoadedModel, load_mode: str, depth: int, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    async with (
        an_engine(deep_model, load_mode, depth=depth) as engine,
        engine.trace(path),
    ):
        await hit(engine)
    trace = read(path)
    assert problems_of(trace) == []
    assert files_in(tmp_path) == {"trace.json": 0o600}, "nothing else is left"
    facts = trace.facts
    assert (facts.device, facts.clock, facts.num_layers) == ("cpu", "host", NUM_LAYERS)
    assert facts.kv_connector == "PipelineConnector"
    assert facts.torch
    assert facts.interlace
    assert all(step.timing is not None and step.timing.layers for step in trace.steps)
    requests = {one.request_id: one for one in trace.requests}
    assert set(requests) == {"stores", "loads"}
    loads = [piece for piece in trace.transfers if piece.way == "load"]
    saves = [piece for piece in trace.transfers if piece.way == "save"]
    num_loaded = requests["loads"].num_external_cached_tokens
    assert num_loaded is not None
    if load_mode in ("layerwise", "bulk"):
        assert num_loaded == len(PROMPT)
        assert sum(piece.num_bytes for piece in loads) == 10 * RECORD_BYTES
    assert {piece.request_ids for piece in loads} <= {("loads",)}
    assert sum(piece.num_bytes for piece in saves) >= 10 * RECORD_BYTES
    if load_mode == "layerwise":
        by_layer = Counter[int]()
        for piece in loads:
            assert piece.lane == "load"
            by_layer.update(range(piece.first_layer, piece.end_layer))
        assert by_layer == dict.fromkeys(range(NUM_LAYERS), 1)
        (step_id,) = {piece.step_id for piece in loads}
        (step,) = (one for one in trace.steps if one.step_id == step_id)
        assert "loads" in dict(step.num_scheduled_tokens)
    if load_mode == "bulk":
        assert {piece.lane for piece in loads} == {"bulk"}
        assert {piece.transfer for piece in loads} == {"loads"}


async def test_nothing_is_recorded_unless_somebody_asks(
    deep_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_mark(*_: object) -> object:
        raise AssertionError("nobody looks at steps")

    monkeypatch.setattr("interlace.layers.moments.ClockMoments.mark", no_mark)
    async with an_engine(deep_model, "layerwise") as engine:
        events = engine.events()
        await hit(engine)
        seen = [type(event) for event in events.take_pending()]
    assert seen
    assert not set(seen) & set(TIMED)


async def test_recording_changes_no_answer_and_ends_when_the_last_one_leaves(
    deep_model: LoadedModel,
) -> None:
    async with an_engine(deep_model, "layerwise") as engine:
        expected = await hit(engine)
    async with an_engine(deep_model, "layerwise") as engine:
        events = engine.events()
        async with engine.record_steps() as facts:
            async with engine.record_steps() as same:
                assert same == facts
            assert await hit(engine) == expected
        assert facts.num_layers == NUM_LAYERS
        during = events.take_pending()
        await ask(engine, some_tokens(3, 9), 3)
        after = events.take_pending()
    names = {event.name for event in during}
    assert {"layer.compute", "layer.load", "layer.save", "step.timed"} <= names
    assert not [event for event in after if isinstance(event, TIMED)]


def until_computing_waits_for(rig: Rig, group: int) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while True:
        load = rig.opened.newest_load
        if load is not None and group in load.groups_passed:
            return
        assert time.monotonic() < end_s, "computing never comes to it"
        time.sleep(0.001)


async def test_a_load_that_is_held_up_is_waited_for_at_its_gate(
    deep_model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig()
    rig.install(monkeypatch)

    def late(lane: str, layer: int, runs: Runs) -> None:
        if lane == "load" and layer == 1:
            until_computing_waits_for(rig, 1)
            time.sleep(0.03)

    rig.before = late
    async with (
        an_engine(deep_model, "layerwise", group_size=1) as engine,
        engine.trace(tmp_path / "t"),
    ):
        await hit(engine)
    trace = read(tmp_path / "t")
    assert problems_of(trace) == []
    step_id = next(piece.step_id for piece in trace.transfers if piece.step_id is not None)
    timing = next(step.timing for step in trace.steps if step.step_id == step_id)
    assert timing is not None
    waits = {layer.layer: layer.waited_s for layer in timing.layers}
    assert waits[1] >= 0.03


async def test_a_load_that_fails_is_told_of(
    deep_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig()
    rig.install(monkeypatch)

    def fail(lane: str, layer: int, runs: Runs) -> None:
        if lane == "load" and layer == 2:
            raise OSError("it is gone")

    seen: list[Event] = []
    async with an_engine(deep_model, "layerwise", group_size=1) as engine:
        events = engine.events()
        async with engine.record_steps():
            await ask(engine, PROMPT, 2)
            await forget_on_device(engine)
            rig.before = fail
            await ask(engine, [*PROMPT, 1, 2, 3], 2, "loads")
        seen = events.take_pending()
    failed = [event for event in seen if isinstance(event, GateFailed)]
    assert [event.first_layer for event in failed][:1] == [2]
    assert failed[0].request_ids == ("loads",)
    assert "it is gone" in failed[0].error


async def test_a_failed_gate_names_those_alone_whose_blocks_did_not_come(
    deep_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, other, seen = Rig(), some_tokens(7, 10 * BLOCK_SIZE), list[Event]()
    rig.install(monkeypatch)

    def fail(lane: str, layer: int, runs: Runs) -> None:
        if lane == "load" and layer == 2 and rig.is_of("bad", runs):
            raise OSError("it is gone")

    async with an_engine(
        deep_model, "layerwise", group_size=1, max_num_batched_tokens=64
    ) as engine:
        events = engine.events()
        async with engine.record_steps():
            await ask(engine, PROMPT, 2)
            await ask(engine, other, 2)
            await forget_on_device(engine)
            rig.before = fail
            await asyncio.gather(
                ask(engine, [*PROMPT, 1, 2, 3], 2, "bad"), ask(engine, [*other, 1, 2], 2, "good")
            )
        seen = events.take_pending()
    assert rig.most_at_once == 2
    failed = {event.request_ids for event in seen if isinstance(event, GateFailed)}
    assert failed == {("bad",)}


async def test_what_was_recorded_is_written_when_an_exception_ends_it(
    deep_model: LoadedModel, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"

    async def record(engine: AsyncEngine) -> None:
        async with engine.trace(path):
            await hit(engine)
            raise KeyError("mine")

    async with an_engine(deep_model, "layerwise") as engine:
        with pytest.raises(KeyError, match="mine"):
            await record(engine)
    assert problems_of(read(path)) == []
    assert read(path).steps


async def test_what_was_recorded_is_written_when_it_is_cancelled(
    deep_model: LoadedModel, tmp_path: Path
) -> None:
    path, has_run = tmp_path / "trace.json", asyncio.Event()

    async def record(engine: AsyncEngine) -> None:
        async with engine.trace(path):
            await hit(engine)
            has_run.set()
            await asyncio.Event().wait()

    async with an_engine(deep_model, "layerwise") as engine, asyncio.TaskGroup() as group:
        task = group.create_task(record(engine))
        await has_run.wait()
        task.cancel()
    assert problems_of(read(path)) == []
    assert read(path).steps


async def test_the_newest_steps_are_kept(deep_model: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    async with (
        an_engine(deep_model, "layerwise") as engine,
        engine.trace(path, last_steps=4),
    ):
        await ask(engine, PROMPT, 12)
    trace = read(path)
    assert len(trace.steps) == 4
    assert trace.left_out.steps >= 8
    document = json.loads(path.read_text())
    assert document["otherData"]["left_out"]["steps"] == trace.left_out.steps
