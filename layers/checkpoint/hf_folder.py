"""A folder in Hugging Face layout: config.json, safetensors weights, tokenizer files."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from interlace.engine.errors import ModelError
from interlace.engine.ports import Progress
from interlace.engine.tokenizer import Tokenizer
from interlace.layers.architecture import Architecture
from interlace.layers.checkpoint.assemble import Parts, assemble
from interlace.layers.checkpoint.checkpoint import Checkpoint, WeightOrigin
from interlace.layers.checkpoint.file_digest import stamps_of
from interlace.layers.checkpoint.hf_config import eos_from_hf
from interlace.layers.checkpoint.safetensors_source import SafetensorsSource, tensor_names
from interlace.layers.weights import weight_shapes

_MAX_JSON_BYTES = 64 << 20
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PARTS = {
    "attn_norm": ("input_layernorm.weight",),
    "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "o": ("self_attn.o_proj.weight",),
    "o_bias": ("self_attn.o_proj.bias",),
    "mlp_norm": ("post_attention_layernorm.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "gate_up_bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "down": ("mlp.down_proj.weight",),
    "down_bias": ("mlp.down_proj.bias",),
}
_TOP = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}


def open_hf_folder(folder: Path, name: str | None = None) -> Checkpoint:
    """Open `folder`. Raises: `ModelError` naming what is missing, damaged or not supported."""
    config = read_json(folder / "config.json")
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    architecture = Architecture.from_hf_config(config)

    def read_weights(
        dtype: torch.dtype, device: torch.device, progress: Progress
    ) -> dict[str, torch.Tensor]:
        source = _source(folder, architecture)
        parts = _parts(architecture)
        return assemble(architecture, parts, source, dtype=dtype, device=device, progress=progress)

    return Checkpoint(
        name=name or str(folder),
        architecture=architecture,
        eos_token_ids=eos_from_hf(config, generation),
        read_weights=read_weights,
        read_tokenizer=functools.partial(Tokenizer.from_folder, folder),
        weight_origin=lambda: WeightOrigin(files=stamps_of(_weight_files(folder))),
    )


def read_json(file: Path) -> Mapping[str, Any]:
    """The object in `file`. Raises: `ModelError` if there is none, or it cannot be read."""
    try:
        if file.stat().st_size > _MAX_JSON_BYTES:
            raise ModelError(f"{file} is larger than {_MAX_JSON_BYTES} bytes.")
        content = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(
            f"{file.parent} has no {file.name}: it is not a model folder in Hugging Face layout."
        ) from error
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} does not hold a JSON object.")
    return content


def _source(folder: Path, architecture: Architecture) -> SafetensorsSource:
    """All tensors of the folder, without those that the decoder makes for itself or ties."""
    file_of = _file_of(folder)
    unneeded = {name for name in file_of if name.endswith("rotary_emb.inv_freq")}
    if architecture.tied_head:
        unneeded.add(_TOP["head"])
    return SafetensorsSource(
        str(folder), {name: file for name, file in file_of.items() if name not in unneeded}
    )


def _file_of(folder: Path) -> dict[str, Path]:
    """Tensor -> the file that holds it."""
    single, index = folder / _SINGLE, folder / _INDEX
    if single.is_file():
        return dict.fromkeys(tensor_names(single), single)
    if index.is_file():
        return _shards(folder, index)
    raise ModelError(
        f"{folder} has neither {_SINGLE} nor {_INDEX}; "
        "other weight formats (.bin, .pt) are not read: convert them to safetensors."
    )


def _weight_files(folder: Path) -> list[Path]:
    """The files that determine the weights: the index says which tensor is taken from where."""
    single, index = folder / _SINGLE, folder / _INDEX
    if single.is_file() or not index.is_file():
        return [single]
    return [index, *sorted(set(_shards(folder, index).values()))]


def _shards(folder: Path, index: Path) -> dict[str, Path]:
    """Tensor -> shard file, as the index says; a shard must lie inside `folder`."""
    stated = read_json(index).get("weight_map")
    if not isinstance(stated, dict):
        raise ModelError(f"{index} has no weight_map.")
    return {str(name): _inside(folder, index, shard) for name, shard in stated.items()}


def _inside(folder: Path, index: Path, shard: object) -> Path:
    # Checked as text: in a hub cache the files themselves are links to a folder beside it.
    path = PurePosixPath(shard) if isinstance(shard, str) else PurePosixPath("/")
    if (
        path.is_absolute()
        or ".." in path.parts
        or "\\" in str(path)
        or path.suffix != ".safetensors"
    ):
        raise ModelError(f"{index} names the shard {shard!r}, which is not a file of its folder.")
    return folder / path


def _parts(architecture: Architecture) -> Parts:
    return {name: _sources_of(name) for name in weight_shapes(architecture)}


def _sources_of(name: str) -> tuple[str, ...]:
    if name in _TOP:
        return (_TOP[name],)
    _, index, kind = name.split(".")
    return tuple(f"model.layers.{index}.{part}" for part in _PARTS[kind])
