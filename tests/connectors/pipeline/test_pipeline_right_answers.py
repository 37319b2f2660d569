"""PipelineConnector's answers are those of an engine without it, however loads come: any split of a
prompt, any order and delay of copies, poisoned pages, blocks reused at once, copies that fail."""

from __future__ import annotations

import asyncio
import functools
import random
from typing import Literal

import pytest
from deep_model import deep_model
from engine_kit import until
from pipeline_kit import (
    LOADING,
    NUM_LAYERS,
    RandomDelays,
    Rig,
    an_engine,
    ask,
    forget_on_device,
    some_tokens,
)
from tiny_model import plain_answer

from interlace.engine.ports import Lanes
from interlace.layers.lanes import ThreadLanes
from interlace.layers.page_copies import Runs
from interlace.layers.virtual_lanes import VirtualLanes

MODEL = deep_model()
NUM_TOKENS = 5
FEW_TOKENS = 2
modes = pytest.mark.parametrize("load_mode", ["layerwise", "bulk", "hybrid", "auto"])
forced_modes = pytest.mark.parametrize("load_mode", ["layerwise", "bulk", "hybrid"])


@functools.cache
def right_answer(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    return plain_answer(MODEL, prompt, num_tokens)


# -------------------------------------------------------------------- splits of one prompt


def some_splits(seed: int, num_edges: int) -> list[tuple[int, int, int]]:
    """(cached on the device, stored in records, new), in tokens: around the edges of blocks, which
    are 24, and some at random. Stored are those behind the cached ones."""
    draw = random.Random(seed)
    edges = [(p, q, r) for p in (0, 7, 8, 9) for q in (3, 4, 5) for r in (1, 4)]
    some = [(draw.randrange(20), draw.randrange(1, 24), draw.randrange(1, 12)) for _ in range(4)]
    return draw.sample(edges, num_edges) + some


@modes
async def test_any_split_of_a_prompt(load_mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = sum(map(ord, load_mode))
    splits = some_splits(seed, 24 if load_mode == "layerwise" else 12)
    rig = Rig(VirtualLanes(seed))
    rig.install(monkeypatch)
    async with an_engine(MODEL, load_mode, group_size=1 + seed % 3) as engine:
        for number, (cached, stored, new) in enumerate(splits):
            prompt = some_tokens(1000 * seed + number, cached + stored + new)
            await ask(engine, prompt[: cached + stored], 1)
            await forget_on_device(engine)
            if cached:
                await ask(engine, prompt[:cached], 1)
            one = await ask(engine, prompt, FEW_TOKENS)
            assert list(one.token_ids) == right_answer(tuple(prompt), FEW_TOKENS)
            found = one.usage.num_local_cached_tokens + one.usage.num_external_cached_tokens
            if load_mode in ("layerwise", "bulk"):
                assert found >= (cached + stored) // 4 * 4 - 4 * (new == 0)
    assert rig.num_poisoned or load_mode == "auto"


# -------------------------------------------------------------------- many at once


def crowd() -> list[list[int]]:
    """Some of them begin alike; the first are short, and decode while others load."""
    common = some_tokens(7, 18)
    return [
        some_tokens(8, 3),
        some_tokens(9, 6),
        common + some_tokens(10, 5),
        common[:16] + some_tokens(11, 20),
        some_tokens(12, 33),
        some_tokens(13, 24),
    ]


CROWD = crowd()


def lanes_of(name: str) -> tuple[Lanes, int]:
    """(lanes, seed)."""
    if name == "threads":
        return ThreadLanes(), 5
    if name == "lazy":
        return VirtualLanes(1, "lazy"), 1
    return VirtualLanes(int(name)), int(name)


@modes
@pytest.mark.parametrize("lanes", ["threads", "lazy", "2"])
async def test_several_load_at_once_beside_decodes(
    load_mode: str, lanes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pool that holds about half of them, so that blocks and records are reused at once."""
    made, seed = lanes_of(lanes)
    rig = Rig(made, before=RandomDelays(seed) if lanes == "threads" else Rig().before)
    rig.install(monkeypatch)
    answers = [right_answer(tuple(prompt), NUM_TOKENS) for prompt in CROWD]
    async with an_engine(
        MODEL, load_mode, num_blocks=26, num_records=30, depth=1 + seed % 2, group_size=1
    ) as engine:
        for turn in range(3):
            order = random.Random(turn).sample(range(len(CROWD)), len(CROWD))
            done = await asyncio.gather(*(ask(engine, CROWD[i], NUM_TOKENS) for i in order))
            assert [list(one.token_ids) for one in done] == [answers[i] for i in order]
            await forget_on_device(engine)
        assert engine.snapshot().stats.num_invalid_blocks == 0
    assert rig.num_loads or load_mode == "auto"


async def test_one_step_loads_for_several(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(before=RandomDelays(3))
    rig.install(monkeypatch)
    prompts = [some_tokens(seed, 13) for seed in range(20, 24)]
    async with an_engine(MODEL, "layerwise", max_num_batched_tokens=64) as engine:
        for prompt in prompts:
            await ask(engine, prompt, 1)
        await forget_on_device(engine)
        async with asyncio.TaskGroup() as group:
            decodes = group.create_task(ask(engine, CROWD[0], 40))
            await until(lambda: bool(engine.snapshot().running))
            done = await asyncio.gather(*(ask(engine, prompt, NUM_TOKENS) for prompt in prompts))
        assert list(decodes.result().token_ids) == right_answer(tuple(CROWD[0]), 40)
    for prompt, one in zip(prompts, done, strict=True):
        assert list(one.token_ids) == right_answer(tuple(prompt), NUM_TOKENS)
        assert one.usage.num_external_cached_tokens == 12
    assert rig.most_at_once == len(prompts)


# -------------------------------------------------------------------- copies that fail


PROMPTS = {"a": some_tokens(30, 21), "victim": some_tokens(31, 22), "b": some_tokens(32, 18)}


class Failing:
    """Copies of one layer for the victim raise."""

    def __init__(self, rig: Rig, layer: int) -> None:
        self._rig = rig
        self._layer = layer
        self.num_raised = 0

    def __call__(self, lane: str, layer: int, runs: Runs) -> None:
        if lane in LOADING and layer == self._layer and self._rig.is_of("victim", runs):
            self.num_raised += 1
            raise OSError("this memory is gone")


@forced_modes
@pytest.mark.parametrize(
    ("policy", "layer"), [*(("recompute", layer) for layer in range(NUM_LAYERS)), ("fail", 1)]
)
async def test_a_copy_that_fails_costs_its_request_alone(
    load_mode: str,
    layer: int,
    policy: Literal["recompute", "fail"],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(VirtualLanes(layer))
    rig.install(monkeypatch)
    failing = Failing(rig, layer)
    answers = {name: right_answer(tuple(one), NUM_TOKENS) for name, one in PROMPTS.items()}
    async with an_engine(
        MODEL, load_mode, policy=policy, max_num_batched_tokens=64, depth=1 + layer % 2
    ) as engine:
        for prompt in PROMPTS.values():
            await ask(engine, prompt, 1)
        await forget_on_device(engine)
        rig.before = failing
        names = list(PROMPTS)
        done = await asyncio.gather(
            *(ask(engine, PROMPTS[name], NUM_TOKENS, name) for name in names)
        )
        assert failing.num_raised
        for name, one in zip(names, done, strict=True):
            if name == "victim" and policy == "fail":
                assert one.finish_reason == "error"
            else:
                assert one.finish_reason == "length"
                assert list(one.token_ids) == answers[name], name
        stats = engine.snapshot().stats
        assert 0 < stats.num_invalid_blocks <= 5, "five blocks of the victim were stored"
        await forget_on_device(engine)
        rig.before = Rig().before
        again = await ask(engine, PROMPTS["victim"], NUM_TOKENS)
        assert list(again.token_ids) == answers["victim"]
