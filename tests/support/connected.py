"""Both sides of a `ScriptedConnector`, and a `Stepper` whose scheduler and oracle use them."""

from __future__ import annotations

from typing import Any, Literal

from paged_oracle import answer
from scheduling import Stepper, make_scheduler

from interlace.connectors.conformance import Rule, Script, ScriptedConnector
from interlace.engine.config import EngineConfig, KVRole, KVTransferConfig, ModelConfig
from interlace.engine.kv_connector import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVConnectorRole,
)
from interlace.engine.request import Request, RequestStatus

NOTHING = Rule(answers=((0, False),))
"""The connector has nothing for the request."""

Sides = tuple[ScriptedConnector, ScriptedConnector]


def scripted_sides(
    script: Script,
    *,
    block_size: int = 4,
    num_blocks: int = 64,
    role: KVRole = "kv_both",
    kind: type[ScriptedConnector] = ScriptedConnector,
) -> Sides:
    """(scheduler side, worker side) for an engine with `num_blocks` usable blocks."""
    config = EngineConfig(
        block_size=block_size,
        kv_transfer_config=KVTransferConfig(
            kv_connector="ScriptedConnector",
            kv_role=role,
            kv_connector_extra_config={"script": script},
        ),
    ).resolved(
        ModelConfig("toy", "float32", 1000, 50, (), 0, "toy"),
        max_model_len=1000,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=num_blocks + 1,
        max_inflight_steps=1,
    )
    spec = FullAttentionSpec(block_size, 1, 1, None, 8 * block_size)
    cache = KVCacheConfig(num_blocks + 1, (KVCacheGroupSpec(("layer",), spec),))
    scheduler_side, worker_side = (kind(config, role, cache) for role in KVConnectorRole)
    return scheduler_side, worker_side


def connected_stepper(
    script: Script,
    *,
    policy_on_failure: Literal["fail", "recompute"] = "recompute",
    block_size: int = 4,
    num_blocks: int = 64,
    role: KVRole = "kv_both",
    **options: Any,
) -> tuple[Stepper, Sides]:
    """A stepper over a scripted connector; `options` are those of `make_scheduler`."""
    sides = scripted_sides(script, block_size=block_size, num_blocks=num_blocks, role=role)
    scheduler = make_scheduler(
        block_size=block_size,
        num_blocks=num_blocks,
        connector=sides[0],
        failure_policy=policy_on_failure,
        **options,
    )
    return Stepper(scheduler, sides[1]), sides


def prompt_of(length: int) -> list[int]:
    """The same tokens in every test; a shorter prompt is a prefix of a longer one."""
    return [(i * i + 3 * i) % 47 for i in range(length)]


def warm(script: Script, prompt: list[int], *, block_size: int = 4, extra: int = 1) -> None:
    """Store all full blocks of `prompt`, by an engine of its own."""
    stepper, _ = connected_stepper(
        script,
        block_size=block_size,
        num_blocks=80,
        max_model_len=1200,
        max_num_batched_tokens=1200,
    )
    stepper.add([*prompt, *range(extra)], max_tokens=1, request_id="warmer")
    stepper.run()
    assert len(script.store) >= len(prompt) // block_size


def assert_right(stepper: Stepper, *requests: Request) -> None:
    """Each ended by length, with the oracle's tokens."""
    for request in requests:
        tokens = stepper.outputs[request.request_id]
        assert tokens == answer(request.prompt_token_ids, len(tokens))
        assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED
