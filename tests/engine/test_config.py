"""Engine options: vLLM's names, refused where they cannot be honoured, resolved by copying."""

from __future__ import annotations

import math
from typing import Any

import pytest

from interlace.engine.config import EngineConfig, KVRole, KVTransferConfig
from interlace.engine.errors import ConfigError

BAD: list[tuple[dict[str, Any], str]] = [
    ({"model": ""}, "model must be"),
    ({"model": None}, "model must be"),
    ({"modle": "x"}, "Did you mean 'model'"),
    ({"dtype": "int8"}, "dtype must be one of"),
    ({"device": "tpu"}, "device must be one of 'auto', 'cpu', 'cuda', not 'tpu'"),
    ({"cudagraph_mode": "HALF"}, "cudagraph_mode must be one of None, 'NONE', 'PIECEWISE', 'FULL'"),
    ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be a number from 0.0 to 1.0"),
    ({"max_model_len": 0}, "max_model_len"),
    ({"max_model_len": 1.5}, "max_model_len"),
    ({"max_num_seqs": 0}, "max_num_seqs"),
    ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
    ({"block_size": 0}, "block_size"),
    ({"num_gpu_blocks_override": 1}, "num_gpu_blocks_override"),
    ({"kv_cache_bytes": 0}, "kv_cache_bytes"),
    ({"device": "cpu", "gpu_memory_utilization": 0.9}, "applies to a GPU"),
    ({"disable_hybrid_kv_cache_manager": False}, "no hybrid manager"),
    ({"scheduling_policy": "lifo"}, "scheduling_policy must be one of 'fcfs', 'priority'"),
    ({"device": "cpu", "cudagraph_mode": "FULL"}, "needs a CUDA device"),
    ({"max_inflight_steps": 0}, "max_inflight_steps"),
    ({"max_inflight_steps": 3}, "max_inflight_steps must be a whole number from 1 to 2"),
    ({"max_waiting_requests": 0}, "max_waiting_requests"),
    ({"seed": -1}, "seed"),
    ({"seed": math.nan}, "seed"),
    ({"enable_prefix_caching": "yes"}, "enable_prefix_caching"),
    ({"skip_tokenizer_init": "no"}, "skip_tokenizer_init"),
    ({"kv_transfer_config": {"kv_connector": "X"}}, "must be a KVTransferConfig, not dict"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=lambda one: str(one))
def test_what_cannot_be_honoured_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**fields)


@pytest.mark.parametrize(
    ("role", "produces", "consumes"),
    [("kv_producer", True, False), ("kv_consumer", False, True), ("kv_both", True, True)],
)
def test_roles(role: KVRole, produces: bool, consumes: bool) -> None:
    transfer = KVTransferConfig(
        kv_connector="X", kv_role=role, kv_connector_extra_config={"answer": 42}
    )
    assert EngineConfig(kv_transfer_config=transfer).kv_transfer_config is transfer
    assert transfer.is_kv_transfer_instance
    assert (transfer.is_kv_producer, transfer.is_kv_consumer) == (produces, consumes)
    assert transfer.get_from_extra_config("answer", 0) == 42
    assert transfer.get_from_extra_config("question", "?") == "?"
    assert transfer.compute_hash() == KVTransferConfig().compute_hash()
    nobody = KVTransferConfig()
    assert not nobody.is_kv_transfer_instance
    assert not nobody.is_kv_producer
    assert not nobody.is_kv_consumer


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_connector": "X"}, "needs a kv_role"),
        ({"kv_connector": ""}, "kv_connector must be a name"),
        ({"enable_permute_local_kv": True}, "nothing reads enable_permute_local_kv"),
        ({"kv_connector": 5}, "kv_connector must be a name"),
        ({"kv_connector_module_path": ""}, "kv_connector_module_path must be a name"),
        ({"kv_connector_extra_config": []}, "must be a mapping"),
        ({"kv_role": "both"}, "kv_role must be one of"),
        ({"kv_load_failure_policy": "retry"}, "kv_load_failure_policy must be one of"),
        ({"kv_conector": "X"}, "Did you mean 'kv_connector'"),
    ],
)
def test_kv_transfer_config(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KVTransferConfig(**fields)


def test_every_transfer_config_has_its_own_engine_id() -> None:
    assert KVTransferConfig().engine_id != KVTransferConfig().engine_id


def test_parts_exist_once_everything_is_decided() -> None:
    config = EngineConfig(block_size=8)
    for part in ("cache_config", "scheduler_config"):
        with pytest.raises(ConfigError, match="is decided when the model is loaded"):
            getattr(config, part)
    resolved = config.resolved(
        num_gpu_blocks_override=9,
        max_num_batched_tokens=64,
        max_model_len=100,
        max_inflight_steps=2,
    )
    assert (resolved.cache_config.block_size, resolved.cache_config.num_gpu_blocks) == (8, 9)
    assert resolved.scheduler_config.max_inflight_steps == 2
    assert config.max_model_len is None, "the original is as it was"
    with pytest.raises(ConfigError, match="max_model_len"):
        config.resolved(max_model_len=0)
