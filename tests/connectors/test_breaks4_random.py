"""Random traffic: layouts, ranks, partial loads, faults, aborts and ids that are used again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hidden_states_kit import one_torch_thread
from memory_connector import MemoryConnector
from memory_messages import LoadBlock
from memory_store import FAULTS, LostBlockError, MemoryStore
from memory_worker import Load

from interlace.connectors.conformance import EngineShape, Harness
from interlace.connectors.conformance.oracle import MIN_MARGIN, Oracle
from interlace.connectors.conformance.tiny_model import tiny_model
from interlace.engine.config import EngineConfig, KVTransferConfig
from interlace.engine.request import Request
from interlace.engine.sampling_params import SamplingParams
from interlace.front_door import AsyncEngine


@pytest.fixture(autouse=True, scope="module")
def _one_torch_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


class PartOfTheLastBlock(MemoryConnector):
    """Brings up to three tokens less than it could, so that loads end within a block."""

    def promise(self, request: Request, num_computed_tokens: int, end: int) -> tuple[int, bool]:
        left_out = request.all_token_ids[0] % self._block_size
        num_tokens = max(0, end * self._block_size - num_computed_tokens - left_out)
        return num_tokens, self.load_async and num_tokens > 0

    def blocks_to_load(self, request: Request, block_ids: list[int], start: int, end: int) -> Any:
        size = self._block_size
        for index in range(start // size, -(-end // size)):
            num_tokens = min(end - index * size, size)
            yield LoadBlock(self.key_of(request, index) + bytes([num_tokens]), block_ids[index])

    def load_layer(self, load: Load, layer_name: str) -> None:
        for key, block_id in load.order.blocks:
            try:
                self.load_block(layer_name, key, block_id)
            except (LostBlockError, OSError):
                load.lost.add(block_id)
                load.lost_keys.add(key[:-1])

    def load_block(self, layer_name: str, key: bytes, block_id: int) -> None:
        record = self.store.get(key[:-1], self.store_rank()).read(self._layer_index(layer_name))
        self._pages[layer_name][block_id][:, : key[-1]] = record[:, : key[-1]]


class ByHead(PartOfTheLastBlock):
    """The same over pages with heads before tokens."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: EngineConfig) -> str:
        return "HND"


class OverAllLayers(PartOfTheLastBlock):
    """The same over one tensor."""

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        return True

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: Any) -> None:
        self.register_kv_caches(
            {f"model.layers.{i}.self_attn.attn": kv_cache[:, i] for i in range(kv_cache.shape[1])}
        )


@pytest.mark.parametrize("seed", range(6))
def test_whatever_comes_the_tokens_are_right_and_nothing_is_left(seed: int) -> None:
    chance = random.Random(seed)
    shape = EngineShape(
        depth=1 + seed % 2,
        num_blocks=(9, 12, 30)[seed % 3],
        max_num_batched_tokens=(5, 9, 64)[(seed + 1) % 3],
        lane_policy="seed",
        lane_seed=seed,
    )
    flags = {"load_async": seed % 4 < 2, "save_async": seed % 2 == 0}
    cls = (PartOfTheLastBlock, ByHead, OverAllLayers)[seed % 3]
    with Harness.of(
        cls, {"store": MemoryStore(), **flags}, shape=shape, workers=1 + seed // 3
    ) as engine:
        heads = [[chance.randrange(30) for _ in range(14)] for _ in range(2)]
        added: list[Request] = []
        for number in range(16):
            prompt = chance.choice(heads)[: chance.randrange(1, 15)]
            prompt += [chance.randrange(30) for _ in range(chance.randrange(6))]
            added.append(engine.add(f"r{number}", prompt, max_tokens=chance.randrange(1, 14)))
            if chance.random() < 0.25:
                engine.abort(chance.choice(added))
            if chance.random() < 0.2:
                engine.reset_prefix_cache(reset_connector=chance.random() < 0.3)
            if chance.random() < 0.25 and len(prompt) >= 4:
                engine.damage(chance.choice(list(FAULTS)), prompt, 0)
            engine.steps(chance.randrange(4))
        engine.run()
        pool = engine.scheduler.kv_cache.pool
        assert pool.num_free_blocks == pool.num_usable_blocks
        assert engine.scheduler.num_held_requests == 0


def _connector(kind: str, folder: Path) -> dict[str, Any]:
    memory = {
        "kv_connector": "MemoryConnector",
        "kv_connector_module_path": "memory_connector",
        "kv_connector_extra_config": {
            "store": MemoryStore(),
            "load_async": True,
            "save_async": True,
        },
    }
    files = {
        "kv_connector": "ExampleConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(folder), "load_async": True},
    }
    if kind == "MultiConnector":
        return {
            "kv_connector": kind,
            "kv_connector_extra_config": {"connectors": [memory, files]},
        }
    return memory if kind == "MemoryConnector" else files


@pytest.mark.parametrize("kind", ["MemoryConnector", "ExampleConnector", "MultiConnector"])
async def test_ids_that_are_used_again_at_once(kind: str, tmp_path: Path) -> None:
    """Three callers with an id each, which abort and go on with the same id, on two workers."""
    model = tiny_model(0, num_kv_heads=2)
    oracle = Oracle(model)
    chance = random.Random(kind)
    heads = [[chance.randrange(30) for _ in range(12)] for _ in range(2)]
    config = EngineConfig(
        device="cpu",
        dtype="float64",
        skip_tokenizer_init=True,
        block_size=4,
        num_gpu_blocks_override=16,
        max_model_len=48,
        max_inflight_steps=2,
        max_num_batched_tokens=7,
        tensor_parallel_size=2,
        kv_transfer_config=KVTransferConfig(
            kv_role="kv_both", kv_load_failure_policy="recompute", **_connector(kind, tmp_path)
        ),
    )

    async def calls(engine: AsyncEngine, name: str) -> None:
        chance = random.Random(name)
        for _ in range(6):
            prompt = [*chance.choice(heads)[: chance.randrange(1, 13)], chance.randrange(30)]
            params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
            while name in engine._scheduler._transfers:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.001)
            stream = engine.generate(prompt, params, request_id=name)
            if chance.random() < 0.4:
                await asyncio.sleep(0.004 * chance.random())
                engine.abort(name)
            found = [token_id async for delta in stream for token_id in delta.token_ids]
            right = await asyncio.to_thread(oracle.after_each, prompt, found)
            wrong = [
                best
                for token_id, best in zip(found, right, strict=True)
                if token_id != best.token_id
            ]
            assert all(best.margin <= MIN_MARGIN for best in wrong[:1])

    async with asyncio.timeout(60), AsyncEngine.from_loaded(config, model) as engine:
        await asyncio.gather(*(calls(engine, name) for name in "abc"))
        while engine.snapshot().num_held_requests:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.001)
        assert engine.snapshot().stats.num_stray_reports == 0
