"""The whole engine on a GPU: every graph mode, both depths, the answers of a plain decoder."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import VOCAB_SIZE, plain_answer, tiny_model

from interlace import AsyncEngine, EngineConfig, KVTransferConfig, SamplingParams
from interlace.connectors.conformance import Async, Rule, Script, Sync
from interlace.engine.errors import ConfigError
from interlace.engine.outputs import Completion
from interlace.engine.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from interlace.layers.checkpoint import LoadedModel
from interlace.layers.gpu.setup import GpuLimits, measure_num_blocks, open_runner
from interlace.layers.graph_mode import GraphMode
from interlace.layers.kv_memory import PageShape
from interlace.layers.kv_pages import KVPages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
MODES = ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]
all_modes = pytest.mark.parametrize("mode", MODES)
both_depths = pytest.mark.parametrize("depth", [1, 2])
COMMON = [5, 9, 2, 7, 1, 1, 8, 3]
PROMPTS = [COMMON + [i] * (3 * i) for i in range(1, 9)] + [COMMON[:6], [3], list(range(60))]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_model(dtype=torch.float32, head_dim=64, device="cuda")


@pytest.fixture(scope="module")
def answers() -> list[list[int]]:
    plain = tiny_model(head_dim=64)
    return [plain_answer(plain, prompt, NUM_TOKENS) for prompt in PROMPTS]


def config_of(mode: str, depth: int, **options: Any) -> EngineConfig:
    given: dict[str, Any] = {
        "block_size": 4,
        "num_gpu_blocks_override": 90,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 64,
        **options,
    }
    return EngineConfig(cudagraph_mode=mode, max_inflight_steps=depth, **given)


async def ask(engine: AsyncEngine, prompt: list[int], **params: Any) -> Completion:
    params.setdefault("temperature", 0)
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **params)
    return await engine.complete(prompt, sampling)


@all_modes
@both_depths
async def test_answers_while_requests_come_and_go(
    mode: str, depth: int, model: LoadedModel, answers: list[list[int]]
) -> None:
    async with AsyncEngine.from_loaded(config_of(mode, depth), model) as engine:

        async def late(i: int) -> Completion:
            await asyncio.sleep(0.002 * i)
            return await ask(engine, PROMPTS[i])

        for _ in range(2):  # the second time with everything cached
            done = await asyncio.gather(*map(late, range(len(PROMPTS))))
            assert [list(one.token_ids) for one in done] == answers


@both_depths
async def test_preemption(depth: int, model: LoadedModel, answers: list[list[int]]) -> None:
    config = config_of("FULL_AND_PIECEWISE", depth, num_gpu_blocks_override=24)
    async with AsyncEngine.from_loaded(config, model) as engine:
        done = await asyncio.gather(*(ask(engine, prompt) for prompt in PROMPTS[:8]))
        assert engine.snapshot().stats.num_preemptions > 0
    assert [list(one.token_ids) for one in done] == answers[:8]


async def test_random_rows_draw_the_same_in_every_mode(model: LoadedModel) -> None:
    wants: list[dict[str, Any]] = [
        {"temperature": 0.9, "top_p": 0.9, "seed": 3},
        {"temperature": 1.3, "top_k": 7, "seed": 4},
        {"repetition_penalty": 1.5},
        {"min_tokens": 3, "logprobs": 2},
    ]
    seen = set()
    for mode in MODES:
        for depth in (1, 2):
            async with AsyncEngine.from_loaded(config_of(mode, depth), model) as engine:
                done = await asyncio.gather(*(ask(engine, PROMPTS[0], **want) for want in wants))
            seen.add(tuple(one.token_ids for one in done))
    assert len(seen) == 1


@both_depths
@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("answer", [Sync(), Async()])
async def test_loads_of_a_connector(
    mode: str, depth: int, answer: Sync | Async, model: LoadedModel, answers: list[list[int]]
) -> None:
    """In pieces or eager, since the connector says that it needs its layer hooks."""

    def config(script: Script) -> EngineConfig:
        return config_of(
            mode,
            depth,
            kv_transfer_config=KVTransferConfig(
                kv_connector="ScriptedConnector",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={"script": script},
            ),
        )

    script = Script()
    async with AsyncEngine.from_loaded(config(script), model) as engine:
        assert engine.config.cudagraph_mode in ("NONE", "PIECEWISE")
        for prompt, right in zip(PROMPTS, answers, strict=True):
            assert list((await ask(engine, prompt)).token_ids) == right
    loading = Script(store=script.store, default=Rule(answers=(answer,), fail=frozenset({5})))
    async with AsyncEngine.from_loaded(config(loading), model) as engine:
        done = await asyncio.gather(*(ask(engine, prompt) for prompt in PROMPTS))
    assert [list(one.token_ids) for one in done] == answers
    assert any(one.usage.num_external_cached_tokens for one in done)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 0.15)], ids=str
)
async def test_long_prompts_beside_decodes(dtype: torch.dtype, tolerance: float) -> None:
    """Chunks in pieces and whole, and in 16 bits over gathered keys: cold, and behind a prefix."""
    model = tiny_model(dtype=dtype, head_dim=64, device="cuda", max_model_len=6000)
    shared = [(7 * i) % VOCAB_SIZE for i in range(2900)]
    prompts = [shared[:650], shared, shared[:2000] + [5] * 700, [9] * 1500, [3] * 40, [4] * 3]
    seen: dict[tuple[str, int], list[list[float]]] = {}
    for mode in ("NONE", "PIECEWISE", "FULL_AND_PIECEWISE"):
        for depth in (1, 2):
            config = config_of(
                mode,
                depth,
                block_size=16,
                num_gpu_blocks_override=1200,
                max_num_batched_tokens=2048,
                max_num_seqs=8,
            )
            async with AsyncEngine.from_loaded(config, model) as engine:
                done = await asyncio.gather(
                    *(ask(engine, prompt, logprobs=10) for prompt in prompts)
                )
            seen[mode, depth] = [
                [logprob for _, logprob in one.logprobs[0].top] for one in done if one.logprobs
            ]
    for found in seen.values():
        for some, others in zip(found, seen["NONE", 1], strict=True):
            assert some == pytest.approx(others, abs=tolerance)


async def test_hidden_states(tmp_path: Path, model: LoadedModel) -> None:
    from safetensors.torch import load_file

    config = config_of(
        "FULL_AND_PIECEWISE",
        2,
        hidden_state_layer_ids=(0, 1, 2),
        kv_transfer_config=KVTransferConfig(
            kv_connector="ExampleHiddenStatesConnector",
            kv_role="kv_producer",
            kv_connector_extra_config={"shared_storage_path": str(tmp_path)},
        ),
    )
    async with AsyncEngine.from_loaded(config, model) as engine:
        for prompt in (PROMPTS[-1], PROMPTS[5]):
            done = await ask(engine, prompt)
            assert done.kv_transfer_params is not None
            states = load_file(done.kv_transfer_params["hidden_states_path"])["hidden_states"]
            assert states.shape == (len(prompt), 3, model.architecture.hidden_size)
            assert torch.equal(states[:, 0], model.weights["embed"].cpu()[torch.tensor(prompt)])
            assert states.isfinite().all()


def test_the_pool_takes_what_is_left(model: LoadedModel) -> None:
    a = model.architecture
    shape = PageShape(a.num_layers, 16, a.num_kv_heads, a.head_dim, torch.float32)
    limits = GpuLimits(8, 512, GraphMode.FULL_AND_PIECEWISE)
    _, total = torch.cuda.mem_get_info()
    num_blocks = measure_num_blocks(model.decoder, shape, limits, utilization=0.5)
    taken = num_blocks * shape.block_bytes
    assert 0.3 * total < taken < 0.5 * total
    with pytest.raises(ConfigError, match="raise gpu_memory_utilization, or lower max_model_len"):
        measure_num_blocks(model.decoder, shape, limits, utilization=0.001)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2}, "splits the KV heads on a CPU only"),
        ({"num_gpu_blocks_override": 3}, "no more than|does not fit|at most"),
    ],
)
async def test_what_a_gpu_cannot_do_is_refused(
    options: dict[str, Any], message: str, model: LoadedModel
) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        async with AsyncEngine.from_loaded(config_of("NONE", 1, **options), model) as engine:
            await ask(engine, list(range(60)))


def test_padding_writes_nothing(model: LoadedModel) -> None:
    """A replay that is padded to a captured size leaves every page but its own alone."""
    a = model.architecture
    shape = PageShape(a.num_layers, 4, a.num_kv_heads, a.head_dim, torch.float32)
    pages = KVPages.of(shape, num_blocks=20, device=torch.device("cuda"))
    for layer in pages.layers:
        layer.fill_(math.nan)
    limits = GpuLimits(8, 64, GraphMode.FULL_AND_PIECEWISE)
    runner = open_runner(model.decoder, pages, (), [], limits)
    from interlace.layers.checkpoint.loading import Silent

    runner.capture(limits.mode, limits.sizes, Silent())
    prompts = {f"r{i}": tuple((i + j) % VOCAB_SIZE for j in range(5)) for i in range(3)}
    params = SamplingParams(temperature=0, ignore_eos=True)
    blocks = {request_id: [2 * i + 3, 2 * i + 4] for i, request_id in enumerate(prompts)}
    new = [
        NewRequestData(request_id, prompt, params, 0, (blocks[request_id],), 0)
        for request_id, prompt in prompts.items()
    ]

    def step(step_id: int, new: list[NewRequestData], cached: CachedRequestData, n: int) -> None:
        counts = dict.fromkeys(prompts, n)
        runner.execute(
            SchedulerOutput(
                step_id, new, cached, counts, 3 * n, frozenset(), frozenset(), frozenset(prompts)
            )
        )

    step(1, new, CachedRequestData(), 5)
    ids = list(prompts)
    step(2, [], CachedRequestData(ids, set(), [None] * 3, {}, [5] * 3, [1] * 3), 1)
    for layer in pages.layers:
        written = {b for b in range(20) if not layer[b].isnan().all()}
        assert written == set(range(3, 9))
        for last in (4, 6, 8):
            assert layer[last, :, 2:].isnan().all()
            assert layer[last, :, :2].isfinite().all()
