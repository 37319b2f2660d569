"""Both sides of a MultiConnector with scripted children, under a `Stepper`."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

from scheduling import Stepper, make_scheduler

from interlace import AsyncEngine
from interlace.connectors.conformance import Script, ScriptedConnector
from interlace.connectors.multi_connector import MultiConnector
from interlace.engine.config import EngineConfig, KVRole, KVTransferConfig, ModelConfig
from interlace.engine.kv_connector import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVConnectorRole,
)
from interlace.layers.checkpoint import LoadedModel

ChildConfig = Mapping[str, Any]


def scripted(script: Script, **more: Any) -> dict[str, Any]:
    """The configuration of a scripted child."""
    extra = {"script": script}
    return {"kv_connector": "ScriptedConnector", "kv_connector_extra_config": extra, **more}


@asynccontextmanager
async def multi_engine(
    model: LoadedModel, *children: ChildConfig, **options: Any
) -> AsyncIterator[AsyncEngine]:
    """A real engine whose MultiConnector has these children; `options` are `EngineConfig`'s."""
    config = EngineConfig(
        **{"block_size": 4, "num_gpu_blocks_override": 61, "skip_tokenizer_init": True, **options},
        kv_transfer_config=KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"connectors": list(children)},
        ),
    )
    async with AsyncEngine.from_loaded(config, model) as engine:
        yield engine


def multi_config(
    children: Sequence[ChildConfig],
    *,
    role: KVRole = "kv_both",
    block_size: int = 4,
    num_blocks: int = 64,
    workers: int = 1,
    **transfer: Any,
) -> EngineConfig:
    """A resolved configuration with `num_blocks` usable blocks."""
    return EngineConfig(
        block_size=block_size,
        tensor_parallel_size=workers,
        kv_transfer_config=KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role=role,
            kv_connector_extra_config={"connectors": list(children)},
            **transfer,
        ),
    ).resolved(
        ModelConfig("toy", "float32", 1000, 50, (), 0, "toy"),
        max_model_len=1000,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=num_blocks + 1,
        max_inflight_steps=1,
    )


def cache_config(config: EngineConfig) -> KVCacheConfig:
    """One layer, as the oracle has it."""
    spec = FullAttentionSpec(config.block_size, 1, 1, None, 8 * config.block_size)
    num_blocks = config.cache_config.num_gpu_blocks
    return KVCacheConfig(num_blocks, (KVCacheGroupSpec(("layer",), spec),))


def multi_side(config: EngineConfig, role: KVConnectorRole) -> MultiConnector:
    """One side."""
    return MultiConnector(config, role, cache_config(config))


@dataclasses.dataclass
class MultiSides:
    """A stepper and the connector beneath it."""

    stepper: Stepper
    scheduler: MultiConnector
    worker: MultiConnector

    def assert_idle(self) -> None:
        """Neither the engine nor the connector nor a scripted child remembers anything."""
        self.stepper.assert_idle()
        for side in (self.scheduler, self.worker):
            assert side.is_idle
            for child in side.children:
                assert not isinstance(child, ScriptedConnector) or child.is_idle


def multi_stepper(
    *children: Script | ChildConfig,
    policy_on_failure: Literal["fail", "recompute"] = "recompute",
    block_size: int = 4,
    num_blocks: int = 64,
    **options: Any,
) -> MultiSides:
    """A stepper over a MultiConnector; `options` are those of `make_scheduler`."""
    listed = [scripted(child) if isinstance(child, Script) else child for child in children]
    config = multi_config(listed, block_size=block_size, num_blocks=num_blocks)
    worker = multi_side(config, KVConnectorRole.WORKER)
    scheduler = multi_side(config, KVConnectorRole.SCHEDULER)
    stepper = Stepper(
        make_scheduler(
            block_size=block_size,
            num_blocks=num_blocks,
            connector=scheduler,
            failure_policy=policy_on_failure,
            **options,
        ),
        worker,
    )
    return MultiSides(stepper, scheduler, worker)
