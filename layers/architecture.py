"""What a decoder-only model looks like: sizes, RoPE and the few switches that families differ in.

Plain data, no torch. `checkpoint/hf_config.py` and `checkpoint/gguf_config.py` make it from files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Literal

from interlace.engine.errors import ModelError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How the rotary frequencies are stretched. Which fields count depends on `kind`."""

    kind: Literal["linear", "llama3", "factors"]
    factor: float = 1.0
    """linear, llama3: long wavelengths become this much longer."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_max_position / this are stretched in full."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_max_position / this are left alone."""
    original_max_position: int = 8192
    """llama3: tokens that the model was first trained for."""
    factors: tuple[float, ...] = ()
    """factors: one divisor per frequency, head_dim / 2 of them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One decoder of the Llama kind: RMS norms, rotary positions, gated SiLU feed-forward.

    Raises: `ModelError` at construction if the sizes do not fit one another.
    """

    name: str
    """As the checkpoint calls it, for messages and for the model's identity."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_eps: float
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_position: int
    """Most tokens of one sequence that the model is made for."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm over each head of Q and K, before RoPE."""
    tied_head: bool = False
    """The output head is the embedding matrix."""
    sliding_window: int | None = None
    """Tokens that some layer looks back on, itself included; None if no window applies."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.name}: {self.num_heads} attention heads are not a multiple of "
                f"{self.num_kv_heads} KV heads."
            )
        if self.head_dim % 2:
            raise ModelError(f"{self.name}: head_dim {self.head_dim} is odd; RoPE needs pairs.")

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together; the value heads are as wide."""
        return self.num_kv_heads * self.head_dim

    def check_window(self, max_model_len: int) -> None:
        """Refuse a sliding window that `max_model_len` tokens would outgrow.

        Raises: `ModelError` naming the window.
        """
        if self.sliding_window is not None and self.sliding_window < max_model_len:
            raise ModelError(
                f"{self.name} has a sliding_window of {self.sliding_window} tokens, which is not "
                f"supported below the sequence length of {max_model_len}; "
                f"set max_model_len to {self.sliding_window} or less."
            )

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> Architecture:
        """Read a Hugging Face `config.json`, in the spelling of transformers 4 or 5.

        Raises: `ModelError` naming whatever is missing, malformed or not supported.
        """
        from interlace.layers.checkpoint.hf_config import architecture_from_hf

        return architecture_from_hf(config)

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any], tensor_names: Collection[str]) -> Architecture:
        """Read a GGUF file's metadata; biases and a tied head show in the tensors' names.

        Raises: `ModelError` naming whatever is missing, malformed or not supported.
        """
        from interlace.layers.checkpoint.gguf_config import architecture_from_gguf

        return architecture_from_gguf(fields, tensor_names)
