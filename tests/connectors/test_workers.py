"""Engines with several workers, and with pages in every layout: the same KV, byte for byte."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from prometheus_client import generate_latest
from tiny_model import plain_answer, tiny_model

from interlace import AsyncEngine, EngineConfig, KVTransferConfig, SamplingParams
from interlace.connectors.conformance import Async, Rule, Script, Sync
from interlace.engine.errors import ConfigError, ConnectorError
from interlace.engine.outputs import Completion

KINDS = ["TokensFirst", "HeadsFirst", "OneTensor", "OneTensorHeadsFirst", "Staged"]
BLOCK = 4
PROMPT = [(7 * i + 3) % 61 for i in range(22)]
MODEL = tiny_model()
both_counts = pytest.mark.parametrize("num_workers", [1, 2])


@asynccontextmanager
async def opened(
    kind: str, script: Script, num_workers: int, **options: Any
) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(
        block_size=BLOCK,
        num_gpu_blocks_override=40,
        tensor_parallel_size=num_workers,
        kv_transfer_config=KVTransferConfig(
            kv_connector=kind,
            kv_connector_module_path="layout_connectors",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"script": script},
        ),
        **options,
    )
    async with AsyncEngine.from_loaded(config, MODEL) as engine:
        yield engine


async def ask(engine: AsyncEngine, prompt: Sequence[int], max_tokens: int = 5) -> Completion:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return await engine.complete(list(prompt), params)


async def saved(kind: str, num_workers: int, **options: Any) -> Script:
    script = Script()
    async with opened(kind, script, num_workers, **options) as engine:
        answer = await ask(engine, PROMPT)
        assert list(answer.token_ids) == plain_answer(MODEL, PROMPT, 5)
    return script


@both_counts
@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_saved_is_the_same_in_every_layout(kind: str, num_workers: int) -> None:
    reference = await saved("TokensFirst", num_workers)
    script = await saved(kind, num_workers)
    assert script.store.keys() == reference.store.keys()
    assert len(script.store) == (len(PROMPT) + 5 - 1) // BLOCK
    for block_hash, pages in script.store.items():
        assert len(pages) == num_workers * MODEL.architecture.num_layers
        for one, other in zip(pages, reference.store[block_hash], strict=True):
            assert one.shape == (2, BLOCK, MODEL.architecture.num_kv_heads // num_workers, 8)
            assert torch.equal(one, other)


@pytest.mark.parametrize("depth", [1, 2])
@both_counts
@pytest.mark.parametrize(
    ("kind", "answer"), [(kind, Sync()) for kind in KINDS] + [(kind, Async()) for kind in KINDS[:4]]
)
async def test_what_is_loaded_gives_the_same_answer(
    kind: str, num_workers: int, depth: int, answer: Sync | Async
) -> None:
    """`Staged` loads within the step only."""
    script = await saved("TokensFirst", num_workers)
    loading = Script(store=script.store, default=Rule(answers=(answer,), load_delay=2))
    async with opened(kind, loading, num_workers, max_inflight_steps=depth) as engine:
        completion = await ask(engine, PROMPT)
        assert completion.usage.num_external_cached_tokens == len(PROMPT) // BLOCK * BLOCK
        assert engine.snapshot().stats.num_stray_reports == 0
    assert list(completion.token_ids) == plain_answer(MODEL, PROMPT, 5)


async def test_chunks_and_company_with_two_workers() -> None:
    """Every rank's hooks run once a layer and step."""
    script = Script()
    async with opened("TokensFirst", script, 2, max_num_batched_tokens=7) as engine:
        other = [60 - i for i in range(17)]
        first, second = await ask(engine, PROMPT), await ask(engine, other)
        steps = engine.snapshot().stats.num_steps
    assert list(first.token_ids) == plain_answer(MODEL, PROMPT, 5)
    assert list(second.token_ids) == plain_answer(MODEL, other, 5)
    num_layers = MODEL.architecture.num_layers
    assert script.count("register_kv_caches") == 2
    assert script.count("handle_preemptions") >= 2 * steps
    assert script.count("wait_for_layer_load") == script.count("wait_for_save") * num_layers


@both_counts
async def test_one_bad_block_of_one_worker_is_bad_for_all(num_workers: int) -> None:
    script = await saved("TokensFirst", num_workers)
    failing = Script(store=script.store, default=Rule(fail=frozenset({2}), num_failing_loads=1))
    async with opened("TokensFirst", failing, num_workers) as engine:
        completion = await ask(engine, PROMPT)
        assert engine.snapshot().stats.num_invalid_blocks == 1
    assert list(completion.token_ids) == plain_answer(MODEL, PROMPT, 5)
    assert completion.usage.num_external_cached_tokens == 2 * BLOCK


async def test_what_workers_say_at_the_start_reaches_the_scheduler_side_once() -> None:
    script = Script()
    async with opened("Greeter", script, 2):
        pass
    assert [call.summary for call in script.calls if call.hook == "heard"] == ["{1: {'rank': 1}}"]
    order = ["register_kv_caches", "set_host_xfer_buffer_ops", "get_handshake_metadata"]
    hooks = script.hooks()
    assert [hooks.index(hook) for hook in order] == sorted(hooks.index(hook) for hook in order)
    assert [script.count(hook) for hook in order] == [2, 2, 2]
    assert hooks.index("bind_gpu_block_pool") < hooks.index("set_xfer_handshake_metadata")


async def test_more_reports_than_workers_cannot_be_awaited() -> None:
    script = Script()
    with pytest.raises(ConnectorError, match="get_finished_count answered 3, but there are 2"):
        async with opened("Miscounting", script, 2):
            pass
    assert script.count("shutdown") == 3  # all sides that were made


@pytest.mark.parametrize("hook", ["set_xfer_handshake_metadata", "get_handshake_metadata"])
async def test_an_engine_whose_sides_cannot_connect_is_not_opened(hook: str) -> None:
    script = Script(raises={hook: (1, OSError("no route"))})
    with pytest.raises(ConnectorError, match=rf"\.{hook} raised OSError: no route"):
        async with opened("Greeter", script, 1):
            pass
    assert script.count("shutdown") == 2


async def test_bind_gpu_block_pool_that_raises_ends_what_was_made() -> None:
    script = Script(raises={"bind_gpu_block_pool": (1, OSError("no pool"))})
    with pytest.raises(ConnectorError, match="bind_gpu_block_pool raised OSError: no pool"):
        async with opened("TokensFirst", script, 2):
            pass
    assert script.count("shutdown") == 3


async def test_kv_heads_must_divide() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size=3 does not divide the model's 2"):
        async with opened("TokensFirst", Script(), 3):
            pass


async def test_workers_without_a_connector() -> None:
    config = EngineConfig(block_size=BLOCK, num_gpu_blocks_override=40, tensor_parallel_size=2)
    async with AsyncEngine.from_loaded(config, MODEL) as engine:
        completion = await ask(engine, PROMPT)
        assert b"interlace_steps_total" in generate_latest(engine.metrics)
    assert list(completion.token_ids) == plain_answer(MODEL, PROMPT, 5)
