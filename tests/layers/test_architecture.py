"""config.json in both spellings, with transformers' defaults; what is not supported is named."""

from __future__ import annotations

from typing import Any

import pytest

from interlace.engine.errors import ModelError
from interlace.layers.architecture import Architecture, RopeScaling

LLAMA3_FACTORS = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(name: str = "Llama", **config: Any) -> Architecture:
    return Architecture.from_hf_config({"architectures": [f"{name}ForCausalLM"], **config})


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_missing_fields_default_as_in_transformers(name: str) -> None:
    import transformers

    config = getattr(transformers, f"{name}Config")()
    ours = read(name)
    assert ours.num_layers == config.num_hidden_layers
    assert ours.hidden_size == config.hidden_size
    assert ours.intermediate_size == config.intermediate_size
    assert ours.num_heads == config.num_attention_heads
    assert ours.num_kv_heads == config.num_key_value_heads
    assert ours.head_dim == (getattr(config, "head_dim", None) or 128)
    assert ours.vocab_size == config.vocab_size
    assert ours.max_position == config.max_position_embeddings
    assert ours.rms_eps == config.rms_norm_eps
    assert ours.rope_theta == config.rope_parameters["rope_theta"]
    assert ours.rope_scaling is None
    assert ours.tied_head == config.tie_word_embeddings
    assert ours.sliding_window == config.sliding_window if name == "Mistral" else True


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_FACTORS}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3_FACTORS}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_FACTORS}},
    ],
    ids=["4", "oldest", "5"],
)
def test_rope_in_every_spelling(config: dict[str, Any]) -> None:
    ours = read(max_position_embeddings=131072, **config)
    assert ours.rope_theta == 5e5
    assert ours.rope_scaling == RopeScaling(kind="llama3", factor=8.0)
    assert ours.max_position == 131072


def test_linear_scaling_stretches_the_limit() -> None:
    ours = read(max_position_embeddings=4096, rope_scaling={"type": "linear", "factor": 4})
    assert ours.rope_scaling == RopeScaling(kind="linear", factor=4.0)
    assert ours.max_position == 16384


@pytest.mark.parametrize("config", [{"rope_scaling": None}, {"rope_scaling": {"type": "default"}}])
def test_no_scaling(config: dict[str, Any]) -> None:
    assert read(rope_theta=1e6, **config).rope_scaling is None


def test_biases_are_where_the_family_has_them() -> None:
    def biases(architecture: Architecture) -> tuple[bool, bool, bool]:
        return architecture.qkv_bias, architecture.o_bias, architecture.mlp_bias

    assert biases(read("Llama")) == (False, False, False)
    assert biases(read("Llama", attention_bias=True, mlp_bias=True)) == (True, True, True)
    assert biases(read("Mistral", attention_bias=True, mlp_bias=True)) == (False, False, False)
    assert biases(read("Qwen2")) == (True, False, False)
    assert biases(read("Qwen3", attention_bias=True)) == (True, True, False)


def test_head_dim_may_be_anything_even() -> None:
    assert read(head_dim=24, hidden_size=100, num_attention_heads=7).head_dim == 24
    with pytest.raises(ModelError, match="head_dim 25 is odd"):
        read(head_dim=25)
    with pytest.raises(ModelError, match="hidden_size 100 is not a multiple of 7 heads"):
        read(hidden_size=100, num_attention_heads=7)


def test_model_type_serves_where_architectures_is_missing() -> None:
    assert Architecture.from_hf_config({"model_type": "qwen3"}).name == "Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM is not supported"),
        ({"architectures": [["LlamaForCausalLM"]]}, "is not supported"),
        ({"architectures": [], "model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantization_config \(awq\)"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_type 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4}}, "rope_type 'dynamic'"),
        ({"rope_parameters": {"full_attention": {}}}, "per layer type"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"hidden_size": "wide"}, "hidden_size must be a whole number"),
        ({"hidden_size": True}, "hidden_size must be a whole number"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be a whole number from 1 to 1024"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false"),
        ({"num_attention_heads": 32, "num_key_value_heads": 5}, "not a multiple of 5 KV heads"),
    ],
)
def test_what_is_not_supported_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(**config)


@pytest.mark.parametrize(
    ("name", "config", "window"),
    [
        ("Llama", {"sliding_window": 64}, None),
        ("Mistral", {"sliding_window": None}, None),
        ("Mistral", {"sliding_window": 64}, 64),
        ("Mistral", {}, 4096),
        ("Qwen2", {"sliding_window": 64, "use_sliding_window": False}, None),
        ("Qwen2", {"sliding_window": 64, "use_sliding_window": True}, 64),
        ("Qwen2", {"sliding_window": None, "use_sliding_window": True}, None),
        (
            "Qwen3",
            {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 32},
            None,
        ),
        ("Qwen3", {"sliding_window": 64, "layer_types": ["full_attention"] * 32}, None),
        ("Qwen3", {"sliding_window": 64, "layer_types": ["sliding_attention"]}, 64),
    ],
)
def test_a_window_counts_only_where_it_applies(
    name: str, config: dict[str, Any], window: int | None
) -> None:
    architecture = read(name, **config)
    assert architecture.sliding_window == window
    if window is not None:
        architecture.check_window(window)
        with pytest.raises(ModelError, match=f"sliding_window of {window} tokens"):
            architecture.check_window(window + 1)


def test_other_kinds_of_layers_are_named() -> None:
    with pytest.raises(ModelError, match="layer_types has chunked_attention"):
        read("Qwen3", layer_types=["full_attention", "chunked_attention"])
