"""What PipelineConnector shows of its transfers, while they go on and when they have ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from deep_model import deep_model
from engine_kit import until
from multi_kit import multi_engine
from pipeline_files_kit import engine_of
from pipeline_kit import (
    NUM_LAYERS,
    RECORD_BYTES,
    Rig,
    an_engine,
    ask,
    forget_on_device,
    some_tokens,
)

from interlace import AsyncEngine
from interlace.engine.transfer_picture import ConnectorPicture, TransferPicture, pictures_of
from interlace.layers.page_copies import Runs

MODEL = deep_model()
PROMPT = some_tokens(1, 24)


def shown(engine: AsyncEngine) -> ConnectorPicture:
    (one,) = engine.snapshot().connectors
    return one


def load_of(engine: AsyncEngine) -> TransferPicture:
    load = shown(engine).load
    assert load is not None
    return load


async def stored(engine: AsyncEngine) -> None:
    """The prompt's blocks lie in host memory only."""
    await ask(engine, PROMPT, 1)
    await until(lambda: shown(engine).tiers[0].num_blocks >= 5)
    await forget_on_device(engine)


async def test_before_anything_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    Rig().install(monkeypatch)
    async with an_engine(MODEL, "layerwise") as engine:
        one = shown(engine)
        assert (one.name, one.load, one.save) == ("PipelineConnector", None, None)
        assert [lane.name for lane in one.lanes] == ["load", "bulk", "store"]
        assert one.link_bytes_per_s is not None
        assert (one.tiers[0].name, one.tiers[0].num_room) == ("memory", 400)


class Hold:
    """Holds one layer's copy up, on the lane."""

    def __init__(self, lane: str, layer: int) -> None:
        self._at = (lane, layer)
        self.has_come = threading.Event()
        self.may_go = threading.Event()

    def __call__(self, lane: str, layer: int, runs: Runs) -> None:
        if (lane, layer) == self._at:
            self.has_come.set()
            assert self.may_go.wait(20)


async def test_a_load_within_a_step_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, hold = Rig(), Hold("load", 2)
    rig.install(monkeypatch)
    async with an_engine(MODEL, "layerwise", group_size=1) as engine:
        await stored(engine)
        rig.before = hold
        async with asyncio.TaskGroup() as group:
            task = group.create_task(ask(engine, [*PROMPT, 3, 4], 1))
            await until(hold.has_come.is_set)
            await until(lambda: load_of(engine).layers[0] == "computed")
            load = load_of(engine)
            hold.may_go.set()
            await task
        assert load.layers[1] in ("arrived", "computed")
        assert load.layers[2:] == ("copying", "waiting")
        assert (load.way, load.num_requests, load.seconds) == ("layer by layer", 1, None)
        load = load_of(engine)
        assert load.layers == ("computed",) * NUM_LAYERS
        assert load.num_bytes == load.num_bytes_done == load.num_blocks * RECORD_BYTES
        assert load.seconds is not None
        assert load.hidden_share is not None
        assert 0 <= load.hidden_share <= 1
        assert shown(engine).tiers[0].num_hits == load.num_blocks
        assert shown(engine).lanes[0].num_bytes == load.num_bytes


async def test_a_load_that_fails_says_where_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.install(monkeypatch)

    def fail(lane: str, layer: int, runs: Runs) -> None:
        if lane == "load" and layer >= 2:
            raise OSError("the link is cut")

    async with an_engine(MODEL, "layerwise", group_size=1) as engine:
        await stored(engine)
        rig.before = fail
        await ask(engine, [*PROMPT, 3, 4], 1)
        load = load_of(engine)
        assert load.layers[2:] == ("failed",) * (NUM_LAYERS - 2)
        assert "failed" not in load.layers[:2]
        assert load.error is not None
        assert "of 1 of 1 requests" in load.error
        assert "the link is cut" in load.error


@pytest.mark.parametrize("load_mode", ["bulk", "hybrid"])
async def test_a_load_beside_the_steps(load_mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, hold = Rig(), Hold("bulk", 1)
    rig.install(monkeypatch)
    async with an_engine(MODEL, load_mode) as engine:
        await stored(engine)
        rig.before = hold
        async with asyncio.TaskGroup() as group:
            task = group.create_task(ask(engine, [*PROMPT, 3, 4], 1))
            await until(hold.has_come.is_set)
            await until(lambda: "copying" in load_of(engine).layers)
            hold.may_go.set()
            await task
        load = load_of(engine)
        assert load.layers == ("arrived",) * NUM_LAYERS
        assert load.way == ("in bulk" if load_mode == "bulk" else "from the back")


async def test_a_save_that_goes_on_and_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, hold = Rig(), Hold("store", 1)
    rig.install(monkeypatch)

    def save_is(condition: Callable[[TransferPicture], bool], engine: AsyncEngine) -> bool:
        save = shown(engine).save
        return save is not None and condition(save)

    async with an_engine(MODEL, "layerwise") as engine:
        rig.before = hold
        await ask(engine, PROMPT, 1)
        await until(hold.has_come.is_set)
        assert save_is(lambda save: "copying" in save.layers, engine)
        hold.may_go.set()
        await until(lambda: save_is(lambda save: set(save.layers) == {"saved"}, engine))

        def fail(lane: str, layer: int, runs: Runs) -> None:
            raise OSError("memory is gone")

        rig.before = fail
        await ask(engine, some_tokens(2, 24), 1)
        await until(lambda: save_is(lambda save: "failed" in save.layers, engine))
        await until(lambda: shown(engine).tiers[0].drops.get("copy failed", 0) > 0)


async def test_files_are_a_tier_of_their_own(tmp_path: Path) -> None:
    async with engine_of(tmp_path, MODEL, num_records=400) as engine:
        await ask(engine, PROMPT, 1)
        for number in range(200):  # what is written is told with a later step
            if shown(engine).tiers[1].num_stored >= 5:
                break
            await ask(engine, some_tokens(100 + number, 6), 1)
        assert shown(engine).tiers[1].num_stored >= 5
        assert [tier.name for tier in shown(engine).tiers] == ["memory", "files"]


async def test_children_go_by_their_keys(tmp_path: Path) -> None:
    children = [
        {"kv_connector": "PipelineConnector", "kv_connector_extra_config": {"host_bytes": 1 << 20}},
        {
            "kv_connector": "ExampleConnector",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
        },
    ]
    async with multi_engine(MODEL, *children) as engine:
        await ask(engine, PROMPT, 1)
        one = shown(engine)
        assert one.name == "0:PipelineConnector"
        assert one.save is not None
        assert one.tiers


class _Broken:
    def get_transfer_pictures(self) -> tuple[ConnectorPicture, ...]:
        raise KeyError("lost")


class _Odd:
    def get_transfer_pictures(self) -> tuple[ConnectorPicture, ...]:
        return "much"  # type: ignore[return-value]


def test_a_hook_that_fails_is_shown_and_does_no_harm() -> None:
    (broken,) = pictures_of(_Broken())
    assert broken.error == "_Broken.get_transfer_pictures raised KeyError: 'lost'"
    (odd,) = pictures_of(_Odd())
    assert odd.error is not None
    assert "answered 'much'" in odd.error
