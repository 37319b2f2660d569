"""transformers on our weights: the same numbers, the same memory."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_model import dense_causal

from interlace.bench import transformers_arm
from interlace.bench.transformers_arm import TransformersArm, build_model
from interlace.bench.workload import Work
from interlace.engine.clock import MonotonicClock
from interlace.engine.device_thread import DeviceThread
from interlace.engine.errors import ConfigError
from interlace.layers.architecture import Architecture, RopeScaling
from interlace.layers.decoder import Decoder
from interlace.layers.weights import weight_shapes

KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tied_head": True},
    "llama with biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "llama 3.1": {"rope_scaling": RopeScaling(kind="llama3", factor=8.0, original_max_position=16)},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
}


def tiny(kind: str) -> tuple[Architecture, dict[str, torch.Tensor]]:
    architecture = Architecture(
        name=kind,
        num_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=64,
        rms_eps=1e-5,
        max_position=128,
        **KINDS[kind],
    )
    random = torch.Generator().manual_seed(1)
    weights = {
        name: torch.randn(shape, generator=random) * 0.2
        for name, shape in weight_shapes(architecture).items()
    }
    return architecture, weights


@pytest.mark.parametrize("kind", KINDS)
def test_gives_our_logits_on_our_memory(kind: str) -> None:
    architecture, weights = tiny(kind)
    model = build_model(architecture, weights)
    ids = torch.arange(3, 23) % 64
    with torch.inference_mode():
        theirs = model(ids.unsqueeze(0)).logits[0]
        decoder = Decoder(architecture, weights, max_model_len=128)
        ours = decoder.logits(decoder.forward(ids, torch.arange(20), dense_causal))
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
    shared = {tensor.untyped_storage().data_ptr() for tensor in weights.values()}
    assert {p.untyped_storage().data_ptr() for p in model.parameters()} == shared


@pytest.fixture
def arm() -> Iterator[TransformersArm]:
    with contextlib.closing(DeviceThread()) as device:
        yield TransformersArm(build_model(*tiny("llama")), MonotonicClock(), device)


async def test_an_answer_is_timed_token_by_token(arm: TransformersArm) -> None:
    sample = await arm.run(Work((tuple(range(9)),), output_tokens=4))
    assert (sample.batch_size, sample.prompt_tokens) == (1, 9)
    assert (sample.decode_tokens, sample.decode_steps) == (3, 3)
    assert sample.first_token_s > 0
    assert sample.decode_s > 0
    assert sample.worst_lag_s is None


async def test_cancelling_stops_the_thread_at_its_next_token(arm: TransformersArm) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await arm.run(Work((tuple(range(9)),), output_tokens=10**9))


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    really_import = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "transformers":
            raise ImportError(name)
        return really_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"interlace\[dev\]"):
        transformers_arm.import_transformers()
