"""DecodeBenchConnector: what it promises, which blocks it fills, and with what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from connected import prompt_of
from scheduling import make_scheduler
from tiny_model import VOCAB_SIZE, plain_answer, tiny_model

from interlace import AsyncEngine, EngineConfig, KVTransferConfig, SamplingParams
from interlace.connectors.decode_bench_connector import DecodeBenchConnector, DecodeBenchMetadata
from interlace.engine.config import KVRole, ModelConfig
from interlace.engine.errors import ConfigError, ConnectorError
from interlace.engine.kv_connector import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVConnectorRole,
)
from interlace.engine.outputs import Completion, ModelRunnerOutput
from interlace.engine.request import Request
from interlace.engine.sampling_params import SamplingParams as EngineSamplingParams
from interlace.engine.scheduler import Scheduler
from interlace.engine.scheduler_output import SchedulerOutput
from interlace.layers.forward_context import ForwardContext
from interlace.layers.kv_pages import KVPages

BLOCK = 4
NUM_BLOCKS = 24
SCHEDULER, WORKER = KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER


def config_of(
    *, role: KVRole = "kv_consumer", workers: int = 1, seed: int = 0, **extra: Any
) -> EngineConfig:
    return EngineConfig(
        block_size=BLOCK,
        tensor_parallel_size=workers,
        seed=seed,
        kv_transfer_config=KVTransferConfig(
            kv_connector="DecodeBenchConnector", kv_role=role, kv_connector_extra_config=extra
        ),
    ).resolved(
        ModelConfig("toy", "float32", 1000, 50, (), seed, "toy"),
        max_model_len=1000,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=NUM_BLOCKS,
        max_inflight_steps=1,
    )


def pages_of(*, heads: int = 2, **layout: Any) -> KVPages:
    return KVPages(
        num_layers=2,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK,
        num_kv_heads=heads,
        head_dim=3,
        dtype=torch.float32,
        device=torch.device("cpu"),
        **layout,
    )


def worker_of(config: EngineConfig, pages: KVPages, rank: int = 0) -> DecodeBenchConnector:
    """With its pages registered as the engine would."""
    worker = DecodeBenchConnector(config.for_rank(rank), WORKER, pages.describe())
    if pages.cross_layers_tensor is None:
        worker.register_kv_caches(pages.by_name())
    else:
        backend = pages.attention_backend
        worker.register_cross_layers_kv_cache(pages.cross_layers_tensor, backend)
    return worker


def fill(worker: DecodeBenchConnector, metadata: DecodeBenchMetadata) -> None:
    worker.bind_connector_metadata(metadata)
    worker.start_load_kv(ForwardContext({}, None))
    worker.clear_connector_metadata()


def filling(*block_ids: int) -> DecodeBenchMetadata:
    return DecodeBenchMetadata({"r": ((list(block_ids),), BLOCK * len(block_ids))})


# --- which blocks --------------------------------------------------------------------------------


class Planner:
    """A scheduler whose steps nobody computes: every sampled token is 1."""

    def __init__(self, **options: Any) -> None:
        cache = KVCacheConfig(NUM_BLOCKS, ())
        self.connector = DecodeBenchConnector(config_of(), SCHEDULER, cache)
        self.scheduler: Scheduler = make_scheduler(
            connector=self.connector, num_blocks=NUM_BLOCKS - 1, block_size=BLOCK, **options
        )
        self.count = 0

    def add(self, prompt: list[int], max_tokens: int = 3) -> Request:
        self.count += 1
        params = EngineSamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        name = f"r{self.count}"
        request = Request(name, prompt, params, seed=0, arrival=self.count, block_size=BLOCK)
        self.scheduler.add_request(request)
        return request

    def plan(self) -> tuple[SchedulerOutput, dict[str, tuple[tuple[list[int], ...], int]]]:
        output = self.scheduler.schedule()
        assert output is not None
        assert isinstance(output.kv_connector_metadata, DecodeBenchMetadata)
        return output, output.kv_connector_metadata.reqs_to_fill

    def apply(self, output: SchedulerOutput) -> None:
        sampled = dict.fromkeys(output.sampling_req_ids, (1,))
        self.scheduler.update_from_output(output, ModelRunnerOutput(sampled))

    def step(self) -> dict[str, tuple[tuple[list[int], ...], int]]:
        output, fills = self.plan()
        self.apply(output)
        return fills


@pytest.mark.parametrize(
    ("num_tokens", "num_external", "num_blocks"),
    [(1, 0, 0), (2, 1, 1), (5, 4, 1), (6, 5, 2), (8, 7, 2), (9, 8, 2), (17, 16, 4)],
)
def test_all_but_the_last_token_comes_from_nowhere(
    num_tokens: int, num_external: int, num_blocks: int
) -> None:
    planner = Planner()
    request = planner.add(prompt_of(num_tokens))
    assert planner.connector.get_num_new_matched_tokens(request, 0) == (num_external, False)
    output, fills = planner.plan()
    assert output.num_scheduled_tokens == {"r1": 1}
    ids = [block.block_id for block in request.blocks][:num_blocks]
    assert fills == ({"r1": ((ids,), num_external)} if num_external else {})


def test_what_is_cached_is_left_alone() -> None:
    planner = Planner()
    planner.add(prompt_of(9))
    planner.step()
    longer = planner.add(prompt_of(18))
    output, fills = planner.plan()
    ids = [block.block_id for block in longer.blocks]
    assert fills == {"r2": ((ids[2:5],), 9)}
    assert longer.num_local_cached_tokens == 8
    assert output.num_scheduled_tokens["r2"] == 1
    alike = planner.add(prompt_of(18))
    planner.apply(output)
    _, fills = planner.plan()
    shared = [block.block_id for block in alike.blocks]
    assert shared[:4] == ids[:4]
    assert fills == {"r3": (([shared[4]],), 1)}, "the rest of the cache is poisoned on purpose"


def test_several_requests_of_one_step_and_nothing_afterwards() -> None:
    planner = Planner()
    first, second = planner.add(prompt_of(6)), planner.add([9] * 10)
    fills = planner.step()
    assert {name: tokens for name, (_, tokens) in fills.items()} == {"r1": 5, "r2": 9}
    assert planner.connector.get_num_new_matched_tokens(first, 0) == (0, False)
    assert planner.step() == {}
    assert planner.step() == {}
    assert first.is_finished
    assert second.is_finished
    assert planner.connector.is_idle


def test_one_fill_a_request_also_after_a_preemption() -> None:
    planner = Planner(max_num_seqs=2)
    first, second = planner.add([5] * 32, max_tokens=40), planner.add([9] * 32, max_tokens=40)
    assert planner.step().keys() == {"r1", "r2"}
    while not second.num_preemptions:
        assert planner.step() == {}
    while not second.is_finished:
        assert planner.step() == {}
    assert first.is_finished


def test_a_producer_brings_nothing() -> None:
    connector = DecodeBenchConnector(
        config_of(role="kv_producer"), SCHEDULER, KVCacheConfig(NUM_BLOCKS, ())
    )
    request = Request("r", [1] * 9, SamplingParams(), seed=0, arrival=0, block_size=BLOCK)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)


# --- with what -----------------------------------------------------------------------------------

layouts = pytest.mark.parametrize(
    "layout",
    [
        {},
        {"layout": "HND"},
        {"cross_layers": True},
        {"layout": "HND", "cross_layers": True},
        {"cache_only": (2, 5)},
    ],
)


@layouts
def test_a_constant_fills_those_blocks_of_all_layers(layout: dict[str, Any]) -> None:
    pages = pages_of(**layout)
    worker = worker_of(config_of(), pages)
    fill(worker, DecodeBenchMetadata({"a": (([3, 5],), 7), "b": (([8],), 1)}))
    for layer in pages.layers:
        filled = [bool((block == torch.tensor(0.015)).all()) for block in layer]
        assert [i for i, is_filled in enumerate(filled) if is_filled] == [3, 5, 8]
        assert not layer[[0, 1, 2, 4, 6, 7]].any()
    assert pages.cache_only is None or not pages.cache_only.any()


@layouts
def test_random_numbers_are_the_same_in_every_layout_and_order(layout: dict[str, Any]) -> None:
    config = config_of(fill_mean=2.0, fill_std=0.5, seed=7)
    one, other = pages_of(), pages_of(**layout)
    fill(worker_of(config, one), filling(3, 5, 8))
    worker = worker_of(config, other)
    fill(worker, filling(8))
    fill(worker, filling(5, 3))
    for mine, theirs in zip(one.layers, other.layers, strict=True):
        assert torch.equal(mine, theirs)


def test_workers_that_share_the_heads_draw_what_one_would() -> None:
    extra: dict[str, Any] = {"fill_mean": -1.0, "fill_std": 2.0}
    whole = pages_of(heads=4)
    fill(worker_of(config_of(**extra), whole), filling(2, 9))
    for rank in range(2):
        own = pages_of(heads=2)
        fill(worker_of(config_of(workers=2, **extra), own, rank), filling(2, 9))
        for mine, all_heads in zip(own.layers, whole.layers, strict=True):
            assert torch.equal(mine, all_heads[:, :, :, 2 * rank : 2 * rank + 2])


def test_random_numbers_have_mean_and_deviation_and_differ() -> None:
    pages = pages_of(heads=16)
    ids = list(range(1, NUM_BLOCKS))
    fill(worker_of(config_of(fill_mean=3.0, fill_std=0.25), pages), filling(*ids))
    numbers = torch.stack([layer[1:] for layer in pages.layers])
    assert numbers.mean().item() == pytest.approx(3.0, abs=0.01)
    assert numbers.std().item() == pytest.approx(0.25, abs=0.01)
    assert len(set(numbers.flatten().tolist())) > 0.9 * numbers.numel()
    other = pages_of(heads=16)
    fill(worker_of(config_of(fill_mean=3.0, fill_std=0.25, seed=1), other), filling(*ids))
    assert not torch.equal(other.layers[0], pages.layers[0])


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"fill": 1}, "fill"),
        ({"fill_std": -1}, "fill_std"),
        ({"fill_mean": float("nan")}, "fill_mean"),
        ({"fill_mean": "much"}, "fill_mean"),
    ],
)
def test_bad_options_are_refused(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DecodeBenchConnector(config_of(**extra), SCHEDULER, KVCacheConfig(NUM_BLOCKS, ()))


def test_pages_that_lack_are_named() -> None:
    spec = FullAttentionSpec(BLOCK, 1, 1, torch.float32, 32)
    cache = KVCacheConfig(NUM_BLOCKS, (KVCacheGroupSpec(("one", "two"), spec),))
    worker = DecodeBenchConnector(config_of(), WORKER, cache)
    with pytest.raises(ConnectorError, match="two"):
        worker.register_kv_caches({"one": torch.zeros(1)})
    with pytest.raises(ConnectorError, match="registered"):
        fill(worker, filling(1))


def test_it_says_that_its_kv_is_invented() -> None:
    assert DecodeBenchConnector.kv_is_synthetic
    assert not DecodeBenchConnector.store_fault_kinds


# --- under the whole engine ----------------------------------------------------------------------

MODEL = tiny_model()
PROMPT = [(7 * i) % VOCAB_SIZE for i in range(50)]


async def answers(
    prompts: list[list[int]], *, workers: int = 1, depth: int = 1, **extra: Any
) -> tuple[list[Completion], int]:
    """One after the other; and the number of steps with tokens."""
    config = EngineConfig(
        block_size=BLOCK,
        num_gpu_blocks_override=64,
        max_num_batched_tokens=24,
        max_inflight_steps=depth,
        tensor_parallel_size=workers,
        skip_tokenizer_init=True,
        kv_transfer_config=KVTransferConfig(
            kv_connector="DecodeBenchConnector",
            kv_role="kv_both",
            kv_connector_extra_config=extra,
        ),
    )
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    async with AsyncEngine.from_loaded(config, MODEL) as engine:
        done = [await engine.complete(prompt, params) for prompt in prompts]
        return done, engine.snapshot().stats.num_steps


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_context_that_nobody_computed(depth: int) -> None:
    """Budget 24, prompt 50: a prefill would take three steps."""
    (first, again), num_steps = await answers([PROMPT, PROMPT], depth=depth)
    assert first.usage.num_external_cached_tokens == 49
    assert first.usage.num_computed_prompt_tokens == 1
    assert again.usage.num_local_cached_tokens >= 48, "the cache holds what was invented"
    assert num_steps <= 2 * (6 + depth + 1)
    assert list(first.token_ids) != plain_answer(MODEL, PROMPT, 6)
    assert first.token_ids == again.token_ids


async def test_workers_and_depth_change_no_answer() -> None:
    runs = [
        await answers([PROMPT], workers=workers, depth=depth, fill_std=1.0)
        for workers, depth in ((1, 1), (1, 2), (2, 1))
    ]
    assert len({done[0].token_ids for done, _ in runs}) == 1
