"""PipelineConnector with both sides: its configuration, whole engines, and `interlace check`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_kit import until
from pipeline_kit import ask, forget_on_device
from tiny_model import VOCAB_SIZE, plain_answer, tiny_model

import interlace.connectors as public
from interlace import AsyncEngine, EngineConfig, KVTransferConfig
from interlace.connectors.conformance import check_connector
from interlace.connectors.factory import KVConnectorFactory
from interlace.connectors.pipeline.messages import PipelineHandshake
from interlace.connectors.pipeline.options import PipelineOptions
from interlace.connectors.pipeline.sched_stats import PipelineStats
from interlace.connectors.pipeline_connector import PipelineConnector
from interlace.engine.config import ModelConfig
from interlace.engine.errors import ConfigError, ConnectorError
from interlace.engine.kv_connector import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVConnectorRole,
)

MODEL = tiny_model()
NUM_TOKENS = 9
BLOCK_SIZE = 4
CACHE = KVCacheConfig(
    41, (KVCacheGroupSpec(("a", "b"), FullAttentionSpec(BLOCK_SIZE, 1, 1, None, 500)),)
)


def a_config(extra: dict[str, Any], **options: Any) -> EngineConfig:
    return EngineConfig(
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=41,
        max_num_batched_tokens=24,
        skip_tokenizer_init=True,
        kv_transfer_config=KVTransferConfig(
            kv_connector="PipelineConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
        ),
        **options,
    )


def a_side(extra: dict[str, Any], **options: Any) -> PipelineConnector:
    """The scheduler side, before the handshake."""
    config = a_config(extra, **options).resolved(
        ModelConfig("toy", "float32", 1000, 50, (), 0, "toy"),
        max_model_len=1000,
        max_inflight_steps=1,
    )
    side = KVConnectorFactory().create_connector(config, KVConnectorRole.SCHEDULER, CACHE)
    assert isinstance(side, PipelineConnector)
    return side


# -------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"host_bytes": 999}, "host_bytes=999 holds no record; one takes 1000 bytes"),
        ({"load_mode": "sideways"}, "'auto', 'recompute', 'bulk', 'layerwise', 'hybrid'"),
        ({"group_size": 3}, "from 1 to 2"),
        ({"group_siz": 1}, "Did you mean 'group_size'"),
    ],
)
def test_options_that_do_not_fit_are_refused(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        a_side(extra)


def test_defaults() -> None:
    assert a_side({}).options == PipelineOptions()
    assert PipelineOptions().host_bytes == 4 << 30


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tensor_parallel_size": 2}, "one worker only"),
        ({"hidden_state_layer_ids": (1,)}, "does not store hidden states"),
    ],
)
def test_what_it_cannot_do_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        a_side({}, **options)


@pytest.mark.parametrize("metadata", [{}, {0: PipelineHandshake(0, 1000, 0.0)}])
def test_a_worker_without_records_is_refused(metadata: dict[int, PipelineHandshake]) -> None:
    side = a_side({})
    with pytest.raises(ConnectorError, match="told of no records"):
        side.set_xfer_handshake_metadata(dict(metadata))
    with pytest.raises(ConnectorError, match="does not know its records"):
        side.reset_cache()


def test_what_the_class_says(tmp_path: Path) -> None:
    assert not PipelineConnector.requires_piecewise_for_cudagraph({})
    assert PipelineConnector.get_required_kvcache_layout(a_config({})) == "NHD"
    assert PipelineConnector.check_setup(tmp_path).extra_config["host_bytes"] < 1 << 20
    assert public.PipelineConnector is PipelineConnector
    assert public.LayerPipeline.__name__ == "LayerPipeline"


def test_statistics_can_be_made_again() -> None:
    stats = PipelineStats(data={"blocks_saved": 3})
    again = PipelineConnector.build_kv_connector_stats(stats.data)
    assert again == stats
    again.aggregate(stats)
    assert again.reduce() == {"blocks_saved": 6}
    assert PipelineConnector.build_kv_connector_stats().is_empty()


# -------------------------------------------------------------------- whole engines


@asynccontextmanager
async def an_engine(load_mode: str, depth: int = 1, **extra: Any) -> AsyncIterator[AsyncEngine]:
    """With room for a few requests, so that many preempt each other."""
    config = a_config(
        {"load_mode": load_mode, "group_size": 1, "host_bytes": 1 << 20, **extra},
        max_inflight_steps=depth,
    )
    async with asyncio.timeout(30), AsyncEngine.from_loaded(config, MODEL) as engine:
        yield engine


def some_prompts() -> list[list[int]]:
    """Some with a common beginning."""
    draw = random.Random(1)
    common = [draw.randrange(VOCAB_SIZE) for _ in range(24)]
    return [
        common[: draw.randrange(25)] + [draw.randrange(VOCAB_SIZE) for _ in range(length)]
        for length in (1, 5, 12, 20, 33, 50)
    ]


PROMPTS = some_prompts()


@pytest.fixture(scope="module")
def answers() -> list[list[int]]:
    """Of each of `PROMPTS`."""
    return [plain_answer(MODEL, prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("load_mode", "depth"), [("layerwise", 2), ("bulk", 1), ("hybrid", 2), ("auto", 1)]
)
async def test_right_answers_from_what_was_stored(
    load_mode: str, depth: int, answers: list[list[int]]
) -> None:
    async with an_engine(load_mode, depth) as engine:
        for _ in range(2):
            done = await asyncio.gather(*(ask(engine, prompt, NUM_TOKENS) for prompt in PROMPTS))
            assert [list(one.token_ids) for one in done] == answers
            await forget_on_device(engine)
        again = await ask(engine, PROMPTS[-1], NUM_TOKENS)
        assert list(again.token_ids) == answers[-1]
        stored = (len(PROMPTS[-1]) - 1) // 4 * 4
        if load_mode == "hybrid":
            assert 0 < again.usage.num_external_cached_tokens < stored
        elif load_mode != "auto":  # computing may be sooner here
            assert again.usage.num_external_cached_tokens == stored


async def test_a_memory_of_three_records_is_enough(answers: list[list[int]]) -> None:
    record_bytes = 2 * 2 * BLOCK_SIZE * 2 * 8 * 8
    async with an_engine("layerwise", host_bytes=3 * record_bytes) as engine:
        for prompt, right in 2 * list(zip(PROMPTS, answers, strict=True)):
            assert list((await ask(engine, prompt, NUM_TOKENS)).token_ids) == right
            await forget_on_device(engine)


async def test_reset_forgets_what_is_stored() -> None:
    async with an_engine("layerwise") as engine:
        await ask(engine, PROMPTS[-1], NUM_TOKENS)
        await until(lambda: engine.snapshot().idle)
        assert engine.reset_prefix_cache(reset_connector=True)
        again = await ask(engine, PROMPTS[-1], NUM_TOKENS)
        assert again.usage.num_external_cached_tokens == 0


async def test_it_learns_how_long_steps_take() -> None:
    async with an_engine("auto") as engine:
        for prompt in PROMPTS:
            await ask(engine, prompt, NUM_TOKENS)
        connector = engine._scheduler._connector
        assert connector is not None
        side = connector._connector
        assert isinstance(side, PipelineConnector)
        await until(lambda: engine.snapshot().idle)
        seconds = side._scheduler.chooser.step_times.seconds(20, 0)
        assert seconds is not None
        assert 0 < seconds < 10


# -------------------------------------------------------------------- the conformance suite


@pytest.mark.parametrize(
    ("load_mode", "group_size"), [("layerwise", 2), ("bulk", 1), ("hybrid", 1)]
)
def test_the_check_passes(load_mode: str, group_size: int) -> None:
    """Of all its properties, those that forced modes change most."""
    extra = {"load_mode": load_mode, "group_size": group_size, "host_bytes": 1 << 17}
    only = ("tokens-hit", "tokens-preempted")
    report = check_connector("PipelineConnector", extra_config=extra, quick=True, only=only)
    report.raise_if_failed()


@pytest.mark.parametrize(
    ("connector", "said", "policy"),
    [
        ("PipelineConnector", None, "recompute"),
        ("PipelineConnector", "fail", "fail"),
        ("DecodeBenchConnector", None, "fail"),
        ("DecodeBenchConnector", "recompute", "recompute"),
    ],
)
async def test_what_becomes_of_a_failed_load_is_for_the_class_to_say_unless_it_is_said(
    connector: str, said: Any, policy: str
) -> None:
    extra = {"host_bytes": 1 << 20} if connector == "PipelineConnector" else {}
    config = EngineConfig(
        num_gpu_blocks_override=41,
        kv_transfer_config=KVTransferConfig(
            kv_connector=connector,
            kv_role="kv_both",
            kv_load_failure_policy=said,
            kv_connector_extra_config=extra,
        ),
    )
    async with AsyncEngine.from_loaded(config, MODEL) as engine:
        assert engine.config.kv_transfer_config is not None
        assert engine.config.kv_transfer_config.kv_load_failure_policy == policy
