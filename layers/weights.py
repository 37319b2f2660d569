"""The engine's own weight layout: names and shapes, with fused matrices.

Every source of weights (folder, GGUF file, cached conversion) is brought into this form, and the
decoder reads nothing else. Changing it means a new `LAYOUT_VERSION`.
"""

from __future__ import annotations

from interlace.layers.architecture import Architecture

LAYOUT_VERSION = 1


def weight_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Every weight that a decoder of `architecture` has, in order of use.

    Matrices are [out, in]. `qkv` stacks the rows of Q, K and V; `gate_up` those of gate and up.
    """
    a = architecture
    shapes: dict[str, tuple[int, ...]] = {"embed": (a.vocab_size, a.hidden_size)}
    for index in range(a.num_layers):
        for name, shape in _layer_shapes(a).items():
            shapes[f"layers.{index}.{name}"] = shape
    shapes["norm"] = (a.hidden_size,)
    if not a.tied_head:
        shapes["head"] = (a.vocab_size, a.hidden_size)
    return shapes


def _layer_shapes(a: Architecture) -> dict[str, tuple[int, ...]]:
    qkv_size = a.q_size + 2 * a.kv_size
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (a.hidden_size,),
        "qkv": (qkv_size, a.hidden_size),
        "o": (a.hidden_size, a.q_size),
        "mlp_norm": (a.hidden_size,),
        "gate_up": (2 * a.intermediate_size, a.hidden_size),
        "down": (a.hidden_size, a.intermediate_size),
    }
    if a.qkv_bias:
        shapes["qkv_bias"] = (qkv_size,)
    if a.o_bias:
        shapes["o_bias"] = (a.hidden_size,)
    if a.qk_norm:
        shapes |= {"q_norm": (a.head_dim,), "k_norm": (a.head_dim,)}
    if a.mlp_bias:
        shapes |= {"gate_up_bias": (2 * a.intermediate_size,), "down_bias": (a.hidden_size,)}
    return shapes
