"""`Architecture` from a Hugging Face config.json, in both spellings.

A field that changes the mathematics and is not supported is refused by name; missing fields take
the defaults that transformers' configuration classes have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from interlace.engine.errors import ModelError
from interlace.layers.architecture import Architecture, RopeScaling
from interlace.layers.checkpoint.fields import MAX_LAYERS, MAX_POSITIONS, Fields


@dataclasses.dataclass(frozen=True, slots=True)
class _Family:
    """Defaults of one transformers configuration class, and what its model class fixes."""

    vocab_size: int
    intermediate_size: int
    max_position: int
    num_kv_heads: int | None
    head_dim: int | None = None
    qkv_bias: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_id: int | None = None


_FAMILIES = {
    "LlamaForCausalLM": _Family(
        32000, 11008, 2048, None, reads_attention_bias=True, reads_mlp_bias=True, eos_token_id=2
    ),
    "MistralForCausalLM": _Family(32000, 14336, 131072, 8, eos_token_id=2),
    "Qwen2ForCausalLM": _Family(151936, 22016, 32768, 32, qkv_bias=True),
    "Qwen3ForCausalLM": _Family(
        151936, 22016, 32768, 32, 128, reads_attention_bias=True, qk_norm=True
    ),
}
_MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_SILU = ("silu", "swish")  # two names of one function


def architecture_from_hf(config: Mapping[str, Any]) -> Architecture:
    """Read `config`. Raises `ModelError` naming what is missing, malformed or not supported."""
    name = _family_name(config)
    family = _FAMILIES[name]
    fields = Fields(config, f"config.json ({name})")
    _refuse_unsupported(fields)
    num_heads = fields.count("num_attention_heads", 32)
    max_position = fields.count("max_position_embeddings", family.max_position, MAX_POSITIONS)
    theta, scaling = _rope(fields, max_position)
    bias = family.reads_attention_bias and fields.flag("attention_bias")
    return Architecture(
        name=name,
        num_layers=fields.count("num_hidden_layers", 32, MAX_LAYERS),
        hidden_size=fields.count("hidden_size", 4096),
        intermediate_size=fields.count("intermediate_size", family.intermediate_size),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, family, num_heads),
        head_dim=_head_dim(fields, family, num_heads),
        vocab_size=fields.count("vocab_size", family.vocab_size),
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position=stretched_limit(max_position, scaling),
        qkv_bias=family.qkv_bias or bias,
        o_bias=bias,
        mlp_bias=family.reads_mlp_bias and fields.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        tied_head=fields.flag("tie_word_embeddings"),
        sliding_window=_window(fields, name),
    )


def eos_from_hf(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """End-of-sequence ids: of generation_config.json, else of config.json, else the class's."""
    family = _FAMILIES[_family_name(config)]
    for source in (generation, config):
        if "eos_token_id" in source:
            value = source["eos_token_id"]
            break
    else:
        value = family.eos_token_id
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ModelError(f"eos_token_id must be a token id or a list of them, not {value!r}.")
    return tuple(ids)


def stretched_limit(max_position: int, scaling: RopeScaling | None) -> int:
    """Tokens a model is made for: linear scaling stretches the limit that the file states."""
    if scaling is not None and scaling.kind == "linear":
        return min(int(max_position * scaling.factor), MAX_POSITIONS)
    return max_position


def _family_name(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if isinstance(names, list) and names:
        name = str(names[0])
    else:
        model_type = config.get("model_type")
        name = _MODEL_TYPES.get(str(model_type), f"model_type {model_type!r}")
    if name not in _FAMILIES:
        raise ModelError(
            f"config.json: architecture {name} is not supported; supported: {', '.join(_FAMILIES)}."
        )
    return name


def _refuse_unsupported(fields: Fields) -> None:
    quantization = fields.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ModelError(
            f"{fields.where}: quantization_config ({method or 'unknown method'}) is not supported; "
            "use the unquantised checkpoint or a GGUF file."
        )
    act = fields.get("hidden_act")
    if act is not None and act not in _SILU:
        raise ModelError(f"{fields.where}: hidden_act {act!r} is not supported, only 'silu'.")


def _num_kv_heads(fields: Fields, family: _Family, num_heads: int) -> int:
    # A null means "as many as heads"; only a field that is absent takes the class's default.
    absent = family.num_kv_heads if not fields.has("num_key_value_heads") else None
    return fields.count("num_key_value_heads", absent or num_heads)


def _head_dim(fields: Fields, family: _Family, num_heads: int) -> int:
    if fields.get("head_dim") is not None or family.head_dim is not None:
        return fields.count("head_dim", family.head_dim)
    hidden = fields.count("hidden_size", 4096)
    if hidden % num_heads:
        raise ModelError(
            f"{fields.where}: hidden_size {hidden} is not a multiple of {num_heads} heads, "
            "and there is no head_dim."
        )
    return hidden // num_heads


def _rope(fields: Fields, max_position: int) -> tuple[float, RopeScaling | None]:
    """Base and scaling. What lies inside the RoPE dict wins over fields beside it."""
    inner = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(inner, dict):
        raise ModelError(f"{fields.where}: rope_scaling must be an object, not {inner!r}.")
    rope = Fields(inner, f"{fields.where}, RoPE parameters")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    for source in (rope, fields):
        if source.number("partial_rotary_factor", 1.0) != 1.0:
            raise ModelError(f"{source.where}: partial_rotary_factor is not supported.")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=rope.number("factor"))
    if kind == "llama3":
        original = rope.count("original_max_position_embeddings", max_position)
        return theta, RopeScaling(
            kind="llama3",
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position=fields.count("original_max_position_embeddings", original),
        )
    if kind != "default" or any(isinstance(value, dict) for value in inner.values()):
        what = repr(kind) if kind != "default" else "per layer type"
        raise ModelError(
            f"{fields.where}: rope_type {what} is not supported; "
            "supported: default, linear, llama3."
        )
    return theta, None


def _window(fields: Fields, name: str) -> int | None:
    """The sliding window, if one applies to any layer."""
    if name == "LlamaForCausalLM":
        return None  # the class has none
    if name == "MistralForCausalLM":
        absent = not fields.has("sliding_window")
        window = fields.get("sliding_window")
        return 4096 if absent else None if window is None else fields.count("sliding_window")
    kinds = _layer_kinds(fields)
    return fields.count("sliding_window", 4096) if "sliding_attention" in kinds else None


def _layer_kinds(fields: Fields) -> set[str]:
    """Kinds of attention that Qwen's layers use."""
    stated = fields.get("layer_types")
    if stated is not None:
        kinds = {str(kind) for kind in stated} if isinstance(stated, list) else {repr(stated)}
        unknown = kinds - {"full_attention", "sliding_attention"}
        if unknown:
            raise ModelError(
                f"{fields.where}: layer_types has {', '.join(sorted(unknown))}, not supported."
            )
        return kinds
    first = fields.get("max_window_layers")
    first = 28 if first is None else first
    slides = fields.flag("use_sliding_window") and (
        not isinstance(first, int) or first < fields.count("num_hidden_layers", 32, MAX_LAYERS)
    )
    if slides and fields.has("sliding_window") and fields.get("sliding_window") is None:
        slides = False
    return {"sliding_attention"} if slides else {"full_attention"}
