"""`Architecture` from the metadata of a GGUF file.

A metadata key of the architecture that is not known here may change the mathematics, so it is
refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from interlace.engine.errors import ModelError
from interlace.layers.architecture import Architecture, RopeScaling
from interlace.layers.checkpoint.fields import MAX_LAYERS, MAX_POSITIONS, Fields
from interlace.layers.checkpoint.hf_config import stretched_limit

SUPPORTED = ("llama", "qwen2", "qwen3")
_KNOWN_KEYS = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "expert_count",
        "expert_used_count",
        "feed_forward_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "tensor_data_layout",
        "vocab_size",
    }
)
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def architecture_from_gguf(
    fields: Mapping[str, Any], tensor_names: Collection[str]
) -> Architecture:
    """Read `fields`; which biases exist and whether the head is tied show in `tensor_names`.

    Factors in a `rope_freqs.weight` tensor are the loader's to add.
    Raises: `ModelError` naming what is missing, malformed or not supported.
    """
    name = _supported_name(fields)
    own = {
        key.removeprefix(f"{name}."): value
        for key, value in fields.items()
        if key.startswith(f"{name}.")
    }
    _refuse_unknown(name, own)
    meta = Fields(own, f"GGUF metadata of {name}")
    num_heads = meta.count("attention.head_count")
    hidden_size = meta.count("embedding_length")
    scaling = _scaling(meta)
    return Architecture(
        name=name,
        num_layers=meta.count("block_count", most=MAX_LAYERS),
        hidden_size=hidden_size,
        intermediate_size=meta.count("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=meta.count("attention.head_count_kv", num_heads),
        head_dim=_head_dim(meta, hidden_size, num_heads),
        vocab_size=_vocab_size(meta, fields),
        rms_eps=meta.number("attention.layer_norm_rms_epsilon"),
        rope_theta=meta.number("rope.freq_base", 10000.0),
        rope_scaling=scaling,
        max_position=stretched_limit(meta.count("context_length", most=MAX_POSITIONS), scaling),
        qkv_bias="blk.0.attn_q.bias" in tensor_names,
        o_bias="blk.0.attn_output.bias" in tensor_names,
        mlp_bias="blk.0.ffn_down.bias" in tensor_names,
        qk_norm="blk.0.attn_q_norm.weight" in tensor_names,
        tied_head="output.weight" not in tensor_names,
        sliding_window=meta.count("attention.sliding_window")
        if meta.get("attention.sliding_window")
        else None,
    )


def eos_from_gguf(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Token ids that end a sequence, a turn or a message."""
    ids = (fields.get(f"tokenizer.ggml.{key}") for key in _EOS_KEYS)
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int) and not isinstance(i, bool)))


def _supported_name(fields: Mapping[str, Any]) -> str:
    name = fields.get("general.architecture")
    if name not in SUPPORTED:
        raise ModelError(
            f"GGUF architecture {name!r} is not supported; supported: {', '.join(SUPPORTED)}."
        )
    kind = fields.get("general.type", "model")
    if kind != "model":
        raise ModelError(f"this GGUF file holds a {kind}, not a model (general.type).")
    if fields.get("split.count", 0) not in (0, 1):
        raise ModelError("split GGUF files are not supported (split.count); merge them first.")
    return str(name)


def _refuse_unknown(name: str, own: Mapping[str, Any]) -> None:
    unknown = sorted(set(own) - _KNOWN_KEYS)
    if unknown:
        raise ModelError(f"GGUF metadata {name}.{unknown[0]} is not supported.")
    if own.get("expert_count"):
        raise ModelError(f"mixtures of experts are not supported ({name}.expert_count).")


def _head_dim(meta: Fields, hidden_size: int, num_heads: int) -> int:
    head_dim = meta.count("attention.key_length", max(1, hidden_size // num_heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if meta.count(key, head_dim) != head_dim:
            raise ModelError(
                f"{meta.where}: {key} {meta.get(key)} differs from the head size of {head_dim}, "
                "which is not supported."
            )
    return head_dim


def _vocab_size(meta: Fields, fields: Mapping[str, Any]) -> int:
    tokens = fields.get("tokenizer.ggml.tokens")
    return meta.count("vocab_size", len(tokens) if isinstance(tokens, list) else None)


def _scaling(meta: Fields) -> RopeScaling | None:
    kind = meta.get("rope.scaling.type") or "none"
    if kind == "linear":
        return RopeScaling(kind="linear", factor=meta.number("rope.scaling.factor"))
    if kind != "none":
        raise ModelError(
            f"{meta.where}: rope.scaling.type {kind!r} is not supported; supported: none, linear."
        )
    factor = meta.number("rope.scale_linear", 1.0)
    return None if factor == 1.0 else RopeScaling(kind="linear", factor=factor)
