"""What a request asks of PipelineConnector in its `kv_transfer_params`, in real engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from deep_model import deep_model
from pipeline_files_kit import PROMPT, counts_of, engine_of, num_external, right
from pipeline_kit import (
    BLOCK_SIZE,
    PATIENCE_S,
    RECORD_BYTES,
    an_engine,
    ask,
    forget_on_device,
    some_tokens,
)

from interlace import AsyncEngine, EngineConfig, KVTransferConfig, SamplingParams
from interlace.engine.outputs import Completion

NUM_LOADED = 10 * BLOCK_SIZE
Params = Mapping[str, Any]


async def ask_with(
    engine: AsyncEngine, params: Params, prompt: list[int] = PROMPT, num_tokens: int = 5
) -> Completion:
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return await engine.complete(prompt, sampling, kv_transfer_params=params)


@asynccontextmanager
async def below_multi() -> AsyncIterator[AsyncEngine]:
    """Two memories, each a child of a MultiConnector."""
    child = {
        "kv_connector": "PipelineConnector",
        "kv_connector_extra_config": {"host_bytes": 200 * RECORD_BYTES, "load_mode": "bulk"},
    }
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=61,
        skip_tokenizer_init=True,
        kv_transfer_config=KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"connectors": [child, child]},
        ),
    )
    async with (
        asyncio.timeout(2 * PATIENCE_S),
        AsyncEngine.from_loaded(config, deep_model()) as engine,
    ):
        yield engine


Open = Callable[[], AbstractAsyncContextManager[AsyncEngine]]
every_engine = pytest.mark.parametrize(
    "open_engine",
    [
        lambda: an_engine(deep_model(), "bulk"),
        lambda: an_engine(deep_model(), "layerwise", depth=2),
        lambda: an_engine(deep_model(), "hybrid"),
        below_multi,
    ],
    ids=["bulk", "layerwise", "hybrid", "below MultiConnector"],
)


@every_engine
async def test_nothing_is_saved_for_who_asks_for_that(open_engine: Open) -> None:
    """Another request saves the same blocks, even those that it finds on the device."""
    async with open_engine() as engine:
        right(deep_model(), PROMPT, await ask_with(engine, {"skip_save": True}))
        await forget_on_device(engine)
        done = await ask_with(engine, {"skip_save": True})
        right(deep_model(), PROMPT, done)
        assert num_external(done) == 0
        done = await ask(engine, PROMPT, 5)
        right(deep_model(), PROMPT, done)
        assert done.usage is not None
        assert done.usage.num_local_cached_tokens >= NUM_LOADED
        await forget_on_device(engine)
        done = await ask_with(engine, {"skip_save": True})
        right(deep_model(), PROMPT, done)
        assert num_external(done) > 0, "it loads as ever"


@every_engine
async def test_nothing_is_loaded_for_who_asks_for_that(open_engine: Open) -> None:
    """What is cached on the device is used as ever."""
    async with open_engine() as engine:
        await ask(engine, PROMPT, 5)
        await forget_on_device(engine)
        done = await ask_with(engine, {"skip_load": True})
        right(deep_model(), PROMPT, done)
        assert num_external(done) == 0
        done = await ask_with(engine, {"skip_load": True})
        right(deep_model(), PROMPT, done)
        assert done.usage is not None
        assert done.usage.num_local_cached_tokens >= NUM_LOADED
        await forget_on_device(engine)
        done = await ask_with(engine, {"skip_load": False, "skip_save": False, "others": [1]})
        right(deep_model(), PROMPT, done)
        assert num_external(done) > 0


@every_engine
@pytest.mark.parametrize("name", ["skip_save", "skip_load"])
@pytest.mark.parametrize("value", [None, 1, "yes"])
async def test_a_request_that_asks_wrongly_ends_alone(
    name: str, value: Any, open_engine: Open
) -> None:
    other = some_tokens(3, 30)
    async with open_engine() as engine:
        bad, good = await asyncio.gather(ask_with(engine, {name: value}), ask(engine, other, 6))
        assert bad.finish_reason == "error"
        assert bad.error is not None
        assert f"{name} must be true or false, not {value!r}" in bad.error
        right(deep_model(), other, good)
        right(deep_model(), PROMPT, await ask(engine, PROMPT, 3))
        await forget_on_device(engine)


async def test_what_it_loads_from_memory_goes_to_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a threshold of 2 a load from memory is what would store it."""
    folder, counts = tmp_path / "kv", counts_of(monkeypatch)
    async with engine_of(folder, store_threshold=2) as engine:
        await ask(engine, PROMPT, 2)
        for _ in range(3):
            await forget_on_device(engine)
            done = await ask_with(engine, {"skip_save": True}, num_tokens=2)
            right(deep_model(), PROMPT, done)
            assert num_external(done) == NUM_LOADED
        await forget_on_device(engine)
    assert not counts["blocks_written"]
    assert not list(folder.glob("*/*.slab"))


async def test_preempted_requests_save_nothing_either(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [some_tokens(seed, 20) for seed in range(4)]
    counts = counts_of(monkeypatch)
    async with an_engine(deep_model(), "bulk", num_blocks=24) as engine:
        done = await asyncio.gather(
            *(ask_with(engine, {"skip_save": True}, prompt, 24) for prompt in prompts)
        )
        for prompt, one in zip(prompts, done, strict=True):
            right(deep_model(), prompt, one)
        assert engine.snapshot().stats.num_preemptions
        await forget_on_device(engine)
    assert not counts["blocks_saved"]
    assert not counts["blocks_dropped"]
