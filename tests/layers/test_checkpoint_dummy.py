"""Dummy models: known shapes, weights from a seed alone, identity, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import dense_causal, plain_logits

from interlace.engine.config import EngineConfig
from interlace.engine.errors import ConfigError, ModelError, RequestError
from interlace.engine.sampling_params import SamplingParams
from interlace.front_door import AsyncEngine
from interlace.layers.architecture import RopeScaling
from interlace.layers.checkpoint import (
    LoadedModel,
    identity,
    load_checkpoint,
    made_weights,
    memory,
    model_identity,
)
from interlace.layers.checkpoint.assemble import total_bytes
from interlace.layers.checkpoint.dummy import open_dummy
from interlace.layers.hardware.host import Memory
from interlace.layers.weights import weight_shapes

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 32,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "attention_bias": True,
}


def config_file(folder: Path, **changes: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(CONFIG | changes))
    return file


def load(folder: Path, *, dtype: str = "float32", seed: int = 0, **changes: Any) -> LoadedModel:
    return load_checkpoint(f"dummy:{config_file(folder, **changes)}", dtype=dtype, seed=seed)


def test_the_known_shapes_are_those_of_the_real_models() -> None:
    llama = open_dummy("dummy:llama-3.1-8b", 0)
    a = llama.architecture
    assert llama.name == "dummy:llama-3.1-8b"
    assert (a.num_layers, a.hidden_size, a.intermediate_size, a.vocab_size) == (
        32,
        4096,
        14336,
        128256,
    )
    assert (a.num_heads, a.num_kv_heads, a.head_dim, a.max_position) == (32, 8, 128, 131072)
    assert (a.rms_eps, a.rope_theta, a.tied_head, a.qk_norm) == (1e-5, 500000.0, False, False)
    assert a.rope_scaling == RopeScaling(kind="llama3", factor=8.0)
    assert total_bytes(a, torch.bfloat16) == 2 * 8_030_261_248

    b = open_dummy("dummy:qwen3-0.6b", 0).architecture
    assert (b.num_layers, b.hidden_size, b.intermediate_size, b.vocab_size) == (
        28,
        1024,
        3072,
        151936,
    )
    assert (b.num_heads, b.num_kv_heads, b.head_dim, b.rope_theta) == (16, 8, 128, 1e6)
    assert (b.tied_head, b.qk_norm, b.rope_scaling) == (True, True, None)
    assert total_bytes(b, torch.bfloat16) == 2 * 596_049_920


def test_weights_have_the_layout_of_the_engine_and_spread_as_stated(tmp_path: Path) -> None:
    model = load(tmp_path)
    shapes = {name: tuple(weight.shape) for name, weight in model.weights.items()}
    assert shapes == weight_shapes(model.architecture)
    for name, weight in model.weights.items():
        kind = name.rpartition(".")[2]
        if kind.endswith("norm"):
            assert bool((weight == 1).all()), name
            continue
        std = 0.02 / 8 if kind in ("o", "down") else 0.02
        assert float(weight.abs().max()) <= std * 3**0.5 * 1.0001, name
        if weight.numel() > 4096:
            assert abs(float(weight.mean())) < 0.04 * std, name
            assert abs(float(weight.std()) / std - 1) < 0.03, name


def test_weights_and_their_neighbours_have_nothing_to_do_with_one_another(tmp_path: Path) -> None:
    w = load(tmp_path).weights
    first, second = w["layers.0.gate_up"].flatten(), w["layers.1.gate_up"].flatten()
    assert len(torch.unique(first)) > 0.99 * first.numel()
    pairs = [(first, second), (first[1:], first[:-1]), (first[64:], first[:-64])]
    for x, y in pairs:
        assert abs(float(torch.corrcoef(torch.stack((x, y)))[0, 1])) < 0.03


def test_the_seed_and_nothing_else_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = load(tmp_path, seed=1).weights, load(tmp_path, seed=2).weights
    for name, weight in one.items():
        assert torch.equal(weight, other[name]) == name.endswith("norm"), name
    monkeypatch.setattr(made_weights, "_CPU_CHUNK", 1000)
    again = load(tmp_path, seed=1).weights
    assert all(torch.equal(weight, again[name]) for name, weight in one.items())
    rounded = load(tmp_path, seed=1, dtype="bfloat16").weights
    assert all(torch.equal(w.to(torch.bfloat16), rounded[name]) for name, w in one.items())


def test_the_numbers_are_these_on_every_machine(tmp_path: Path) -> None:
    """If they change, `RECIPE_VERSION` must: stores know the model's KV by it."""
    weights = load(tmp_path, seed=3).weights
    assert weights["embed"][0, :4].tolist() == [
        -0.02786204218864441,
        -0.01799045316874981,
        0.029957981780171394,
        0.012196357361972332,
    ]
    assert weights["layers.31.down"][-1, -2:].tolist() == [
        0.0006321266409941018,
        0.0006994942668825388,
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_thirty_two_layers_stay_finite_and_of_one_size(tmp_path: Path, dtype: str) -> None:
    model = load(tmp_path, dtype=dtype)
    states = {
        i: torch.empty(100, 64, dtype=model.decoder.dtype, device=model.decoder.device)
        for i in (1, 31)
    }
    ids = torch.arange(100)
    with torch.inference_mode():
        model.decoder.forward(ids, ids, dense_causal, states=states)
    sizes = {i: float(state.float().square().mean().sqrt()) for i, state in states.items()}
    assert 0.01 < sizes[1] <= sizes[31] < 3
    logits = plain_logits(model, range(100))
    assert bool(logits.isfinite().all())
    assert 0.05 < float(logits.std()) < 10


def test_identity_is_configuration_and_seed_and_reads_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> str:
        raise AssertionError("weights were read")

    monkeypatch.setattr(identity, "_of_tensors", refuse)
    first = model_identity(load(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    assert model_identity(load(tmp_path / "elsewhere")) == first
    others = {
        model_identity(load(tmp_path, seed=1)),
        model_identity(load(tmp_path, dtype="bfloat16")),
        model_identity(load(tmp_path, num_hidden_layers=31)),
        model_identity(load(tmp_path, rope_theta=5000.0)),
    }
    assert len({first, *others}) == 5


@pytest.mark.parametrize("name", ["", "llama", "no/such/config.json", "a" * 5000, "nul\0"])
def test_an_unknown_name_lists_what_is_possible(name: str) -> None:
    with pytest.raises(ModelError, match=r"'dummy:llama-3\.1-8b'.*'dummy:qwen3-0\.6b'.*PATH") as e:
        load_checkpoint(f"dummy:{name}")
    assert len(str(e.value)) < 500
    with pytest.raises(ModelError, match="dummy:NAME"):
        load_checkpoint("no such model")


def test_a_config_is_read_as_any_other(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="GPT2"):
        load(tmp_path, architectures=["GPT2LMHeadModel"])
    file = config_file(tmp_path)
    file.write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        load_checkpoint(f"dummy:{file}")
    with pytest.raises(ModelError, match="there is no dummy model"):
        load_checkpoint(f"dummy:{tmp_path}")


def test_weights_that_do_not_fit_are_refused_before_the_machine_suffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "memory", lambda: Memory(2**35, 2**20))
    with pytest.raises(ModelError, match=r"take 29\.9 GiB on cpu.*0\.0 GiB are free.*'bfloat16'"):
        load_checkpoint("dummy:llama-3.1-8b", dtype="float32")
    with pytest.raises(ModelError, match=r"take 15\.0 GiB .* choose a smaller model"):
        load_checkpoint("dummy:llama-3.1-8b", dtype="bfloat16")


def test_running_out_of_memory_says_how_much_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_free_bytes", lambda _device: None)
    with pytest.raises(ModelError, match=r"take \d+\.\d GiB on cpu in float32: choose"):
        load(tmp_path, vocab_size=2**24, hidden_size=2**22)
    for error in (torch.OutOfMemoryError("CUDA out of memory"), MemoryError()):
        monkeypatch.setattr(torch, "empty", raising(error))
        with pytest.raises(ModelError, match="on cpu in float32: choose"):
            load(tmp_path)
    monkeypatch.setattr(torch, "empty", raising(RuntimeError("something else")))
    with pytest.raises(RuntimeError, match="something else"):
        load(tmp_path)


def raising(error: Exception) -> Any:
    def raise_it(*_: object, **__: object) -> None:
        raise error

    return raise_it


def test_cuda_where_there_is_none_is_refused_before_the_model_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "init", raising(RuntimeError("Found no NVIDIA driver")))
    with pytest.raises(ConfigError, match="'cuda' cannot be used: Found no NVIDIA driver"):
        load_checkpoint("no such model", device="cuda")


async def test_an_engine_answers_token_ids_and_refuses_text(tmp_path: Path) -> None:
    config = EngineConfig(model=f"dummy:{config_file(tmp_path)}", kv_cache_bytes=1 << 24)
    async with AsyncEngine.from_config(config) as engine:
        params = SamplingParams(max_tokens=5, temperature=0.0)
        answer = await engine.complete([1, 2, 3], params)
        assert len(answer.token_ids) == 5
        assert answer.finish_reason == "length"
        with pytest.raises(RequestError, match="no tokenizer"):
            await engine.complete("Hello", params)
