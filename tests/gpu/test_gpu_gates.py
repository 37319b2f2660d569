"""Loads behind gates in captured graphs: right answers, and wrong ones where a gate is left out."""

from __future__ import annotations

import asyncio
from typing import Any

import gated_connectors
import pytest
import torch
from gated_connectors import (
    BROKEN,
    STARTED,
    AsksFirst,
    Gated,
    NotAllArmed,
    RestLate,
    RestNeverArmed,
)
from tiny_model import plain_answer, tiny_model

from interlace import AsyncEngine, EngineConfig, KVTransferConfig, SamplingParams
from interlace.connectors.conformance import Rule, Script, Sync
from interlace.layers.checkpoint import LoadedModel
from interlace.layers.graph_mode import GraphMode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
PROMPTS = [
    [i, 5, 9, 2, 7, 1, 1, 8, 3, 4, 6, 2, 9, 7, 7, 3, 5][: 9 + i] + [11 + i] * 3 * i
    for i in range(1, 9)
]
NUM_TOKENS = 8
MODES = ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_model(dtype=torch.float32, head_dim=64, device="cuda")


@pytest.fixture(scope="module")
def answers() -> list[list[int]]:
    plain = tiny_model(head_dim=64)
    return [plain_answer(plain, prompt, NUM_TOKENS) for prompt in PROMPTS]


def config_of(connector: type[Gated], mode: str, depth: int, script: Script) -> EngineConfig:
    return EngineConfig(
        cudagraph_mode=mode,
        max_inflight_steps=depth,
        block_size=4,
        num_gpu_blocks_override=90,
        max_num_seqs=6,
        max_num_batched_tokens=64,
        kv_transfer_config=KVTransferConfig(
            kv_connector=connector.__name__,
            kv_connector_module_path="gated_connectors",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"script": script},
        ),
    )


async def ask(engine: AsyncEngine, prompt: list[int]) -> list[int]:
    params: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    return list((await engine.complete(prompt, SamplingParams(**params))).token_ids)


async def loaded_answers(
    connector: type[Gated], mode: str, depth: int, model: LoadedModel, *, together: bool
) -> tuple[list[list[int]], Gated]:
    """What comes of prompts whose KV was saved by another engine; and the worker side."""
    script = Script()
    async with AsyncEngine.from_loaded(config_of(Gated, "NONE", 1, script), model) as engine:
        for prompt in PROMPTS:
            await ask(engine, prompt)
    STARTED.clear()
    loading = Script(store=script.store, default=Rule(answers=(Sync(),)))
    async with AsyncEngine.from_loaded(config_of(connector, mode, depth, loading), model) as engine:
        if together:
            found = list(await asyncio.gather(*(ask(engine, prompt) for prompt in PROMPTS)))
        else:
            found = [await ask(engine, prompt) for prompt in PROMPTS]
    return found, STARTED[-1]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("together", [False, True])
async def test_answers_are_right_in_every_mode(
    mode: str, depth: int, together: bool, model: LoadedModel, answers: list[list[int]]
) -> None:
    found, side = await loaded_answers(Gated, mode, depth, model, together=together)
    assert found == answers
    assert len(side.modes) >= (1 if together else 4), "steps have loaded"
    if mode in ("FULL", "FULL_AND_PIECEWISE"):
        assert set(side.modes) == {GraphMode.FULL}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mode", MODES)
async def test_answers_are_right_where_gates_are_armed_while_the_first_layers_run(
    mode: str, depth: int, model: LoadedModel, answers: list[list[int]]
) -> None:
    found, side = await loaded_answers(RestLate, mode, depth, model, together=True)
    assert found == answers
    if mode in ("FULL", "FULL_AND_PIECEWISE"):
        assert set(side.modes) == {GraphMode.FULL}


@pytest.mark.parametrize("mode", ["NONE", "FULL_AND_PIECEWISE"])
async def test_who_asks_for_the_attention_metadata_before_it_loads_gets_it(
    mode: str, model: LoadedModel, answers: list[list[int]]
) -> None:
    found, side = await loaded_answers(AsksFirst, mode, 2, model, together=True)
    assert found == answers
    assert side.modes


@pytest.mark.parametrize("connector", [NotAllArmed, RestNeverArmed])
async def test_a_step_whose_gates_are_not_all_armed_runs_with_its_hooks(
    connector: type[Gated], model: LoadedModel, answers: list[list[int]]
) -> None:
    found, _ = await loaded_answers(connector, "FULL_AND_PIECEWISE", 2, model, together=True)
    assert found == answers


@pytest.mark.parametrize("connector", BROKEN, ids=lambda connector: connector.__name__)
async def test_who_leaves_a_gate_out_is_seen(
    connector: type[Gated], model: LoadedModel, answers: list[list[int]]
) -> None:
    assert connector in vars(gated_connectors).values()
    found, side = await loaded_answers(connector, "FULL_AND_PIECEWISE", 1, model, together=False)
    assert set(side.modes) == {GraphMode.FULL}
    assert found != answers


async def test_many_replays(model: LoadedModel, answers: list[list[int]]) -> None:
    """Each request loads again, into other blocks, which hold what others have left there."""
    script = Script()
    config = config_of(Gated, "FULL_AND_PIECEWISE", 2, script)
    async with AsyncEngine.from_loaded(config, model) as engine:
        for prompt in PROMPTS:
            await ask(engine, prompt)
        for turn in range(40):
            engine.reset_prefix_cache()
            i = turn % len(PROMPTS)
            assert await ask(engine, PROMPTS[i]) == answers[i]
    assert sum(len(side.modes) for side in STARTED[-1:]) >= 40
