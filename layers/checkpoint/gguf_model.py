"""A model in one GGUF file: weights dequantised in memory at each load, tokenizer from metadata."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from interlace.engine.errors import ModelError
from interlace.engine.ports import Progress
from interlace.layers.architecture import Architecture, RopeScaling
from interlace.layers.checkpoint.assemble import Parts, assemble
from interlace.layers.checkpoint.checkpoint import Checkpoint, WeightOrigin
from interlace.layers.checkpoint.file_digest import stamps_of
from interlace.layers.checkpoint.gguf_config import eos_from_gguf
from interlace.layers.checkpoint.gguf_file import GGUFFile
from interlace.layers.checkpoint.gguf_tokenizer import tokenizer_from_gguf
from interlace.layers.weights import weight_shapes

ROPE_FACTORS = "rope_freqs.weight"
_PARTS = {
    "attn_norm": ("attn_norm.weight",),
    "qkv": ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
    "qkv_bias": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
    "q_norm": ("attn_q_norm.weight",),
    "k_norm": ("attn_k_norm.weight",),
    "o": ("attn_output.weight",),
    "o_bias": ("attn_output.bias",),
    "mlp_norm": ("ffn_norm.weight",),
    "gate_up": ("ffn_gate.weight", "ffn_up.weight"),
    "gate_up_bias": ("ffn_gate.bias", "ffn_up.bias"),
    "down": ("ffn_down.weight",),
    "down_bias": ("ffn_down.bias",),
}
_TOP = {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}


def open_gguf(path: Path) -> Checkpoint:
    """Open the file `path`. Raises: `ModelError` if it is damaged, foreign or not supported."""
    file = GGUFFile(path)
    architecture = architecture_of(file)

    def read_weights(
        dtype: torch.dtype, device: torch.device, progress: Progress
    ) -> dict[str, torch.Tensor]:
        source, parts = GGUFSource(file, architecture), gguf_parts(architecture)
        return assemble(architecture, parts, source, dtype=dtype, device=device, progress=progress)

    return Checkpoint(
        name=str(path),
        architecture=architecture,
        eos_token_ids=eos_from_gguf(file.fields),
        read_weights=read_weights,
        read_tokenizer=functools.partial(tokenizer_from_gguf, file.fields, str(path)),
        weight_origin=lambda: WeightOrigin(files=stamps_of([path])),
    )


def architecture_of(file: GGUFFile) -> Architecture:
    """The file's architecture, RoPE factors of a `rope_freqs.weight` tensor included."""
    architecture = Architecture.from_gguf(file.fields, file.tensors)
    if ROPE_FACTORS not in file.tensors:
        return architecture
    factors = tuple(file.read(ROPE_FACTORS).reshape(-1).tolist())
    usable = len(factors) == architecture.head_dim // 2 and all(0 < f < 1e6 for f in factors)
    if not usable or architecture.rope_scaling is not None:
        raise ModelError(f"{file.path}: {ROPE_FACTORS} does not fit the model's configuration.")
    scaling = RopeScaling(kind="factors", factors=factors)
    return dataclasses.replace(architecture, rope_scaling=scaling)


def gguf_parts(architecture: Architecture) -> Parts:
    """Which tensors of the file make up which weight of ours."""
    return {name: _sources_of(name) for name in weight_shapes(architecture)}


def _sources_of(name: str) -> tuple[str, ...]:
    if name in _TOP:
        return (_TOP[name],)
    _, index, kind = name.split(".")
    return tuple(f"blk.{index}.{part}" for part in _PARTS[kind])


class GGUFSource:
    """A `TensorSource` whose tensors are float32, rows in the order of rotate-half RoPE."""

    def __init__(self, file: GGUFFile, architecture: Architecture) -> None:
        self.where = str(file.path)
        self._file = file
        self._heads_of = _permuted(architecture)
        self._head_dim = architecture.head_dim

    @property
    def names(self) -> frozenset[str]:
        """All tensors that are weights."""
        return frozenset(self._file.tensors) - {ROPE_FACTORS}

    def read(self, name: str) -> torch.Tensor:
        """A dequantised tensor, in memory of its own."""
        values = torch.from_numpy(np.require(self._file.read(name), requirements=["C", "W"]))
        kind = name.split(".", 2)[-1]
        if kind in self._heads_of:
            values = self._rotate_half_order(name, values, self._heads_of[kind])
        return values

    keep = read

    def _rotate_half_order(self, name: str, values: torch.Tensor, heads: int) -> torch.Tensor:
        """Undo the interleaving of each head's two halves."""
        rows, tail = values.shape[0], values.shape[1:]
        if rows != heads * self._head_dim:
            raise ModelError(
                f"{self.where}: {name} has {rows} rows for {heads} heads of {self._head_dim}."
            )
        pairs = values.reshape(heads, self._head_dim // 2, 2, *tail)
        return pairs.transpose(1, 2).reshape(rows, *tail)


def _permuted(architecture: Architecture) -> Mapping[str, int]:
    """Tensor kind -> heads, for those whose rows the format interleaves: only `llama` does."""
    if architecture.name != "llama":
        return {}
    heads: dict[str, int] = {}
    for suffix in ("weight", "bias"):
        heads[f"attn_q.{suffix}"] = architecture.num_heads
        heads[f"attn_k.{suffix}"] = architecture.num_kv_heads
    return heads
