"""PipelineConnector's answers on a GPU are those of an engine without it, in captured graphs: any
split of a prompt, loads delayed at random beside decodes, poisoned pages, copies that fail at any
layer, a thousand replays. Each wait has a time limit."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from connected_gpu import PATIENCE_S, ask, settle
from pipeline_gpu import NUM_LAYERS, LoadRig, an_engine, gpu_model, plain_model
from tiny_model import VOCAB_SIZE, plain_answer, tiny_model

from interlace import AsyncEngine, SamplingParams
from interlace.connectors.pipeline import layer_pipeline
from interlace.connectors.pipeline.layer_pipeline import PipelineGates
from interlace.engine.outputs import Completion
from interlace.layers.checkpoint import LoadedModel
from interlace.layers.graph_mode import GraphMode
from interlace.layers.page_copies import Runs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
NUM_TOKENS = 4
NUM_REPLAYS = 1000
PLAIN = plain_model()
ways = pytest.mark.parametrize("load_mode", ["layerwise", "bulk", "hybrid"])


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return gpu_model()


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> LoadRig:
    made = LoadRig()
    made.install(monkeypatch)
    return made


def some_tokens(seed: int, length: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(VOCAB_SIZE) for _ in range(length))


@functools.cache
def right_answer(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    return plain_answer(PLAIN, prompt, num_tokens)


def is_right(prompt: tuple[int, ...], one: Completion) -> bool:
    tokens = list(one.token_ids)
    return one.finish_reason == "length" and tokens == right_answer(prompt, len(tokens))


async def ask_as(
    engine: AsyncEngine, prompt: Sequence[int], num_tokens: int, request_id: str
) -> Completion:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    async with asyncio.timeout(PATIENCE_S):
        return await engine.complete(list(prompt), params, request_id=request_id)


async def forget_on_device(engine: AsyncEngine) -> None:
    """Once every save has ended."""
    await settle(engine)
    assert engine.reset_prefix_cache()


# -------------------------------------------------------------------- splits, alone and in company


def some_splits(seed: int) -> list[tuple[int, int, int]]:
    """(cached on the device, stored behind that, new), in tokens: around each edge of a block."""
    draw = random.Random(seed)
    edges = [(p, q, r) for p in (0, 7, 8, 9) for q in (3, 4, 5, 21) for r in (1, 4)]
    some = [(draw.randrange(20), draw.randrange(1, 24), draw.randrange(1, 40)) for _ in range(4)]
    return draw.sample(edges, 10) + some


def split_prompt(seed: int, number: int, length: int) -> tuple[int, ...]:
    return some_tokens(1000 * (seed + 1) + number, length)


DECODING = [some_tokens(70 + i, 2 + i) for i in range(3)]
LONG = 60


@ways
async def test_any_split_of_a_prompt_alone_and_beside_decodes(
    load_mode: str, model: LoadedModel, rig: LoadRig
) -> None:
    seed = ["layerwise", "bulk", "hybrid"].index(load_mode)
    rig.before = rig.delay
    async with an_engine(model, load_mode, group_size=2) as engine:
        for number, (cached, stored, new) in enumerate(some_splits(seed)):
            prompt = split_prompt(seed, number, cached + stored + new)
            await ask(engine, prompt[: cached + stored], 1)
            for in_company in (False, True):
                await forget_on_device(engine)
                if cached:
                    await ask(engine, prompt[:cached], 1)
                async with asyncio.TaskGroup() as group:
                    company = DECODING if in_company else []
                    others = [group.create_task(ask(engine, other, LONG)) for other in company]
                    await asyncio.sleep(0.004 * in_company)
                    one = await ask(engine, prompt, NUM_TOKENS)
                assert is_right(prompt, one), (cached, stored, new, in_company)
                for other, done in zip(company, others, strict=True):
                    assert is_right(other, done.result())
        assert engine.snapshot().stats.num_invalid_blocks == 0
    assert rig.num_loads > 10
    if load_mode == "layerwise":
        assert GraphMode.FULL in rig.modes


CROWD = [some_tokens(80, 18) + some_tokens(81 + i, 5 + 7 * i) for i in range(5)]


@ways
async def test_several_load_at_once_into_blocks_that_others_have_just_left(
    load_mode: str, model: LoadedModel, rig: LoadRig
) -> None:
    rig.before = rig.delay
    async with an_engine(
        model, load_mode, num_gpu_blocks_override=32, num_records=45, group_size=2
    ) as engine:
        for turn in range(8):
            order = random.Random(turn).sample(CROWD + DECODING, len(CROWD + DECODING))
            done = await asyncio.gather(*(ask(engine, prompt, NUM_TOKENS) for prompt in order))
            for prompt, one in zip(order, done, strict=True):
                assert is_right(prompt, one), (turn, len(prompt))
            await forget_on_device(engine)
        assert engine.snapshot().stats.num_invalid_blocks == 0
    assert rig.num_loads > 8


# -------------------------------------------------------------------- copies that fail


MEANT = {"a": some_tokens(90, 21), "victim": some_tokens(91, 22), "b": some_tokens(92, 18)}


class Failing:
    """Loads of one layer for the victim raise; the others come late."""

    def __init__(self, rig: LoadRig, layer: int, victim: str) -> None:
        self._rig = rig
        self._layer = layer
        self._victim = victim
        self.num_raised = 0

    def __call__(self, layer: int, runs: Runs) -> None:
        self._rig.delay(layer, runs)
        if layer == self._layer and self._rig.is_of(self._victim, runs):
            self.num_raised += 1
            raise OSError("this memory is gone")


@ways
@pytest.mark.parametrize("policy", ["recompute", "fail"])
async def test_a_copy_that_fails_at_any_layer_costs_its_request_alone(
    load_mode: str, policy: Literal["recompute", "fail"], model: LoadedModel, rig: LoadRig
) -> None:
    async with an_engine(model, load_mode, policy=policy, group_size=2) as engine:
        for layer in range(NUM_LAYERS):
            rig.before = lambda layer, runs: None
            for prompt in MEANT.values():  # what failed was forgotten
                assert is_right(prompt, await ask(engine, prompt, NUM_TOKENS))
            await forget_on_device(engine)
            names = {name: f"{name}-{layer}" for name in MEANT}
            failing = Failing(rig, layer, names["victim"])
            rig.before = failing
            num_before = engine.snapshot().stats.num_invalid_blocks
            done = await asyncio.gather(
                *(ask_as(engine, MEANT[name], NUM_TOKENS, names[name]) for name in MEANT)
            )
            assert failing.num_raised, layer
            for name, one in zip(MEANT, done, strict=True):
                if name == "victim" and policy == "fail":
                    assert one.finish_reason == "error"
                else:
                    assert is_right(MEANT[name], one), (layer, name)
            num_invalid = engine.snapshot().stats.num_invalid_blocks - num_before
            assert 0 < num_invalid <= 5, "five blocks of the victim were stored"
            await forget_on_device(engine)


# -------------------------------------------------------------------- replays


HITS = [some_tokens(100 + i, 13) for i in range(40)]
"""Three blocks are loaded, one token is computed."""


async def replay(engine: AsyncEngine, num_replays: int, *, settles: bool = False) -> int:
    """How many answers were right: each load brings other KV, most often into the same blocks.

    If it `settles`, no copy of one step is late for the next one: where a step does not wait for
    it, it would come behind the poison there, and another prompt's KV of one layer does little.
    """
    num_right = 0
    for prompt in HITS:
        assert is_right(prompt, await ask(engine, prompt, 1))
    for turn in range(num_replays):
        if settles:
            await asyncio.to_thread(torch.cuda.synchronize)
        await forget_on_device(engine)
        prompt = HITS[turn * 7 % len(HITS)]
        one = await ask(engine, prompt, 1)
        assert one.usage.num_external_cached_tokens == 12
        num_right += is_right(prompt, one)
    return num_right


@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("group_size", [1, 2])
async def test_a_thousand_replays_of_one_gated_graph(
    group_size: int,
    is_long: bool,
    model: LoadedModel,
    rig: LoadRig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a long load most comes when the first layers are launched."""
    if is_long:
        monkeypatch.setattr(layer_pipeline, "FIRST_BYTES", 1)
    rig.before = rig.delay
    async with an_engine(model, "layerwise", group_size=group_size) as engine:
        async with asyncio.timeout(PATIENCE_S):
            assert await replay(engine, NUM_REPLAYS) == NUM_REPLAYS
    assert len(rig.modes) >= NUM_REPLAYS
    assert set(rig.modes) == {GraphMode.FULL}


@pytest.mark.parametrize("left_out", [0, 2, NUM_LAYERS - 1])
async def test_who_leaves_a_gate_out_is_seen(
    left_out: int, model: LoadedModel, rig: LoadRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the poison is poison: a layer whose gate is not waited for reads it."""
    wait_here = PipelineGates.wait_here

    def wait_here_but_once(gates: PipelineGates, layer: int) -> None:
        if layer != left_out:
            wait_here(gates, layer)

    monkeypatch.setattr(PipelineGates, "wait_here", wait_here_but_once)

    def delay(layer: int, runs: Runs) -> None:
        if layer == left_out:
            torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]

    rig.before = delay
    async with an_engine(model, "layerwise", group_size=1, depth=1) as engine:
        async with asyncio.timeout(PATIENCE_S):
            assert await replay(engine, 5, settles=True) == 0


@pytest.mark.parametrize("left_out", [None, 3])
async def test_long_chunks_over_gathered_keys_wait_for_their_layer(
    left_out: int | None, rig: LoadRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 16 bits, one graph for 300 new tokens: what is loaded gives the bits that what lies on the
    device gave, with copies delayed and pages poisoned; who leaves a gate out gives others."""
    model = tiny_model(
        max_model_len=640, dtype=torch.bfloat16, head_dim=64, device="cuda", num_layers=NUM_LAYERS
    )
    wait_here = PipelineGates.wait_here

    def wait_here_but_once(gates: PipelineGates, layer: int) -> None:
        if layer != left_out:
            wait_here(gates, layer)

    def delay(layer: int, runs: Runs) -> None:
        torch.cuda._sleep(20_000_000 if layer == left_out else 100_000)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(PipelineGates, "wait_here", wait_here_but_once)
    rig.before = delay
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=10)
    prefix = some_tokens(5, 240)

    async def first_token(engine: AsyncEngine, number: int) -> tuple[int, list[tuple[int, float]]]:
        """(tokens loaded, the likeliest tokens). Nothing but the prefix is stored."""
        prompt = [*prefix, *some_tokens(100 + number, 300)]
        async with asyncio.timeout(PATIENCE_S):
            one = await engine.complete(prompt, params, kv_transfer_params={"skip_save": True})
        top = []  # of who read so much poison that nothing can be sampled
        if one.logprobs is not None:
            top = [(int(token), float(value)) for token, value in one.logprobs[0].top]
        else:
            assert left_out is not None
        return one.usage.num_external_cached_tokens, top

    async with an_engine(
        model,
        "layerwise",
        depth=1,
        num_gpu_blocks_override=400,
        max_num_batched_tokens=512,
        num_records=600,
    ) as engine:
        await ask(engine, prefix, 1)
        for number in range(4):
            await forget_on_device(engine)
            external, _ = await first_token(engine, 100 + number)
            assert external == len(prefix)
            external, cached = await first_token(engine, number)
            assert external == 0, "the prefix lies on the device"
            await forget_on_device(engine)
            external, loaded = await first_token(engine, number)
            assert external == len(prefix)
            assert (loaded == cached) == (left_out is None)
    assert set(rig.modes) == {GraphMode.FULL}
