"""Lanes and copies that hang: a deadline, then the policy; and nothing is written to blocks that
others have by then."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Literal

import pytest
import torch
from deep_model import deep_model
from engine_kit import until
from hooked_copies import HookedCopies
from metrics_kit import read
from pipeline_kit import (
    LOADING,
    PATIENCE_S,
    Rig,
    an_engine,
    ask,
    forget_on_device,
    some_tokens,
)
from tiny_model import plain_answer

from interlace import AsyncEngine
from interlace.connectors.pipeline.layer_groups import LayerGroups
from interlace.connectors.pipeline.layer_pipeline import LaneCopies, LayerPipeline
from interlace.connectors.pipeline.worker_deadlines import PatientFeeder
from interlace.connectors.pipeline.worker_feeder import FedTransfer
from interlace.connectors.pipeline.worker_loads import PipelinedLoad
from interlace.connectors.pipeline.worker_times import ClockStopwatch
from interlace.engine.errors import ConnectorError, EngineDeadError
from interlace.engine.outputs import Completion
from interlace.engine.ports import Lane
from interlace.layers.lanes import ThreadLanes
from interlace.layers.page_copies import PageCopies, Run, Runs
from interlace.layers.virtual_lanes import VirtualLanes

MODEL = deep_model()
NUM_TOKENS = 4
PROMPTS = {"a": some_tokens(40, 21), "victim": some_tokens(41, 22), "b": some_tokens(42, 18)}
OTHERS = [some_tokens(seed, 30) for seed in range(43, 47)]
policies = pytest.mark.parametrize("policy", ["recompute", "fail"])
Policy = Literal["recompute", "fail"]


@functools.cache
def right_answer(prompt: tuple[int, ...]) -> list[int]:
    return plain_answer(MODEL, prompt, NUM_TOKENS)


def is_right(prompt: list[int], one: Completion) -> bool:
    return list(one.token_ids) == right_answer(tuple(prompt))


async def ask_others(engine: AsyncEngine) -> None:
    """Who is given all blocks that are free, twice."""
    for _ in range(2):
        for prompt in OTHERS:
            assert is_right(prompt, await ask(engine, prompt, NUM_TOKENS))


class Hold:
    """Holds up the first copy that it is asked about, until the test ends at the latest."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.let_go = threading.Event()

    def wait(self) -> None:
        if not self.has_begun.is_set():
            self.has_begun.set()
            assert self.let_go.wait(PATIENCE_S)


@pytest.fixture
def hold() -> Iterator[Hold]:
    held = Hold()
    yield held
    held.let_go.set()


class Hands:
    """A clock that a test turns."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


# -------------------------------------------------------------------- within the step


def hold_lane(lane: Lane, hold: Hold) -> None:
    lane.submit(hold.wait)
    assert hold.has_begun.wait(PATIENCE_S)


@policies
async def test_a_load_lane_that_hangs(
    policy: Policy, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(deadline_s=0.05, clock=Hands())
    rig.install(monkeypatch)
    copied: list[str] = []
    rig.before = lambda lane, layer, runs: copied.append(lane)
    async with an_engine(MODEL, "layerwise", policy=policy, num_blocks=30) as engine:
        await ask(engine, PROMPTS["victim"], 1)
        await forget_on_device(engine)
        lane = rig.opened._lane
        hold_lane(lane, hold)
        one = await ask(engine, PROMPTS["victim"], NUM_TOKENS)
        if policy == "fail":
            assert one.finish_reason == "error"
        else:
            assert is_right(PROMPTS["victim"], one)
        assert engine.snapshot().stats.num_invalid_blocks == 5
        rig.opened._deadline_s = PATIENCE_S
        await ask_others(engine)
        copied.clear()
        hold.let_go.set()
        assert await asyncio.to_thread(lane.close, PATIENCE_S)
        assert "load" not in copied, "nothing was copied late"
        await ask_others(engine)
        await forget_on_device(engine)
        last = await ask(engine, OTHERS[-1], NUM_TOKENS)
        assert is_right(OTHERS[-1], last)
        assert last.usage.num_external_cached_tokens == 28, "on a fresh lane"


async def test_a_copy_within_a_step_that_never_returns_ends_the_engine(
    hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks cannot be given to anybody, and nothing keeps them."""
    rig = Rig(deadline_s=0.02, clock=Hands())
    rig.install(monkeypatch)
    async with an_engine(MODEL, "layerwise") as engine:
        await ask(engine, PROMPTS["victim"], 1)
        await forget_on_device(engine)
        rig.before = lambda lane, layer, runs: hold.wait()
        with pytest.raises(EngineDeadError, match=r"has not returned for 0\.04 s"):
            await ask(engine, PROMPTS["victim"], NUM_TOKENS)
        hold.let_go.set()


class Slow(HookedCopies):
    """Four layers, whose first copy is held up."""

    def __init__(self, hold: Hold) -> None:
        self.pages = [torch.zeros(4, 2, 2) for _ in range(4)]
        records = torch.ones(3, 4, 16, dtype=torch.uint8)
        super().__init__(records, self.pages, self._begin)
        self.begun: list[int] = []
        self._hold = hold

    def _begin(self, layer: int, runs: Runs) -> None:
        self.begun.append(layer)
        self._hold.wait()


def test_giving_up_waits_for_the_copy_under_way_and_begins_no_other(hold: Hold) -> None:
    copies = Slow(hold)
    parts: list[tuple[Run, ...]] = [((0, 1, 1),), ((1, 2, 1),)]
    load = PipelinedLoad(copies, parts, LayerGroups(4, 2), ClockStopwatch(lambda: 0.0))
    thread = threading.Thread(target=load.copy_group, args=(1,))
    thread.start()
    assert hold.has_begun.wait(PATIENCE_S)
    assert not load.give_up(ConnectorError("too late"), 0.01)
    threading.Timer(0.02, hold.let_go.set).start()
    assert load.give_up(ConnectorError("too late"), PATIENCE_S)
    thread.join(PATIENCE_S)
    load.copy_group(2)
    assert copies.begun == [1]
    assert all(error is not None for error in load.errors)
    assert not copies.pages[3].any()
    assert copies.pages[1][1].any(), "the one that was under way"


# -------------------------------------------------------------------- beside the steps


DEADLINE_S = 100.0


def takes_time_of(feeder: PatientFeeder) -> bool:
    """Whether it has seen the work that hangs."""
    oldest = feeder._oldest
    return oldest is not None and not oldest.query()


def is_done(transfer: FedTransfer) -> bool:
    return transfer.is_done


@contextlib.asynccontextmanager
async def with_a_hung_load(
    load_mode: str, policy: Policy, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[AsyncEngine, dict[str, asyncio.Task[Completion]], Hands]]:
    """Three requests load; a copy of the victim's does not return."""
    hands = Hands()
    rig = Rig(deadline_s=DEADLINE_S, clock=hands)
    rig.install(monkeypatch)

    def before(lane: str, layer: int, runs: Runs) -> None:
        if lane in LOADING and layer == 1 and rig.is_of("victim", runs):
            hold.wait()

    async with an_engine(MODEL, load_mode, policy=policy, num_blocks=50) as engine:
        for prompt in PROMPTS.values():
            await ask(engine, prompt, 1)
        await forget_on_device(engine)
        rig.before = before
        async with asyncio.TaskGroup() as group:
            asked = {
                name: group.create_task(ask(engine, prompt, NUM_TOKENS, name))
                for name, prompt in PROMPTS.items()
            }
            await until(hold.has_begun.is_set)
            bulk = rig.opened._bulk
            await until(lambda: takes_time_of(bulk))
            yield engine, asked, hands
        await forget_on_device(engine)
        await ask_others(engine)


def is_as_the_policy_says(policy: Policy, name: str, one: Completion) -> bool:
    if policy == "fail":
        return one.finish_reason == "error"
    return is_right(PROMPTS[name], one)


def stuck_and_hanging(engine: AsyncEngine) -> tuple[float, float]:
    """Transfers that were given up, and those of them that have not returned: what is scraped."""
    values = read(engine.metrics)
    names = ("kv_stuck_transfers_total", "kv_hanging_transfers")
    stuck, hanging = (values[f"interlace_{name}{{engine=0}}"] for name in names)
    return stuck, hanging


beside = pytest.mark.parametrize("load_mode", ["bulk", "hybrid"])


@beside
@policies
async def test_a_load_beside_the_steps_that_hangs(
    load_mode: str,
    policy: Policy,
    hold: Hold,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with with_a_hung_load(load_mode, policy, hold, monkeypatch) as (engine, asked, hands):
        assert is_right(PROMPTS["a"], await asked["a"]), "it was loaded before"
        await asyncio.sleep(0.03)
        assert not asked["b"].done(), "it waits behind the one that hangs"
        hands.now += DEADLINE_S
        assert is_as_the_policy_says(policy, "b", await asked["b"])
        await ask_others(engine)
        hands.now += DEADLINE_S
        await asyncio.sleep(0.03)
        assert not asked["victim"].done(), "its blocks are still written to"
        told = [one.getMessage() for one in caplog.records if "has hung" in one.getMessage()]
        assert len(told) == 1
        assert "'bulk' has hung for 100 s: 2 transfers failed, and 1 of them keep" in told[0]
        assert told[0].endswith("those of victim")
        assert stuck_and_hanging(engine) == (2, 1)
        hold.let_go.set()
        assert is_as_the_policy_says(policy, "victim", await asked["victim"])
        await ask_others(engine)
        assert stuck_and_hanging(engine) == (2, 0)


@beside
async def test_who_is_aborted_while_its_load_hangs_keeps_its_blocks(
    load_mode: str, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_a_hung_load(load_mode, "recompute", hold, monkeypatch) as (
        engine,
        asked,
        hands,
    ):
        hands.now += DEADLINE_S
        asked["victim"].cancel()
        assert is_right(PROMPTS["b"], await asked["b"])
        await until(lambda: engine.snapshot().num_held_requests == 1)
        await ask_others(engine)
        snapshot = engine.snapshot()
        assert snapshot.num_held_requests == 1
        assert snapshot.num_usable_blocks - snapshot.num_free_blocks >= 5
        hold.let_go.set()
        await until(lambda: engine.snapshot().num_held_requests == 0)


async def test_saves_that_hang_are_not_kept(hold: Hold, monkeypatch: pytest.MonkeyPatch) -> None:
    hands = Hands()
    rig = Rig(deadline_s=DEADLINE_S, clock=hands, before=lambda lane, layer, runs: hold.wait())
    rig.install(monkeypatch)
    async with an_engine(MODEL, "bulk") as engine:
        done = await asyncio.gather(*(ask(engine, one, NUM_TOKENS) for one in PROMPTS.values()))
        assert all(map(is_right, PROMPTS.values(), done))
        await until(lambda: engine.snapshot().num_held_requests == 3)
        await until(hold.has_begun.is_set)
        store = rig.opened._store
        await until(lambda: takes_time_of(store))
        hands.now += DEADLINE_S
        await until(lambda: engine.snapshot().num_held_requests == 1)
        hold.let_go.set()
        await forget_on_device(engine)
        for prompt in 2 * list(PROMPTS.values()):
            assert is_right(prompt, await ask(engine, prompt, NUM_TOKENS))
            await forget_on_device(engine)
        again = await ask(engine, PROMPTS["a"], NUM_TOKENS)
        assert again.usage.num_external_cached_tokens == 20, "a fresh lane saves"


def test_blocks_of_a_copy_that_never_returns_are_not_handed_on(hold: Hold) -> None:
    copies = Slow(hold)
    pipeline = LayerPipeline(
        ThreadLanes(), LaneCopies(copies, copies, copies), deadline_s=0.02, clock=Hands()
    )
    save = pipeline.submit_save([(0, 1, 1)])
    assert hold.has_begun.wait(PATIENCE_S)
    with pytest.raises(ConnectorError, match=r"has not returned for 0\.02 s"):
        pipeline.fence(save)
    assert save.error is not None
    assert not is_done(save)
    assert not pipeline.close(0.02), "and closing does not wait for ever"
    hold.let_go.set()
    assert save.last_gate is not None
    assert save.last_gate.wait(PATIENCE_S)


def test_what_is_on_a_stream_is_not_taken_back() -> None:
    hands = Hands()
    lanes = VirtualLanes(0, "lazy", polls_per_work=1_000_000)
    copies = PageCopies(torch.ones(4, 1, 16, dtype=torch.uint8), [torch.zeros(6, 2, 2)])
    feeder = PatientFeeder(
        lambda: lanes.lane("bulk"),
        copies,
        copies.load_layers,
        window_bytes=16,
        watch=ClockStopwatch(lambda: 0.0),
        deadline_s=10.0,
        clock=hands,
        is_stream=True,
    )
    first, second = feeder.add(((0, 1, 1),)), feeder.add(((1, 2, 1),))
    lane = feeder.lane
    for now in (0.0, 9.0):
        hands.now = now
        feeder.poll(may_feed=True)
        assert (first.error, second.error) == (None, None)
    hands.now = 10.0
    feeder.poll(may_feed=True)
    assert "nothing was copied on lane 'bulk' for 10 s" in str(first.error)
    assert str(second.error) == str(first.error)
    assert is_done(second)
    assert not is_done(first)
    lanes.drain()
    feeder.poll(may_feed=True)
    assert is_done(first)
    assert feeder.is_idle
    assert feeder.lane is lane
