"""Folders in Hugging Face layout: what is wrong with one is said, and nothing outside is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from interlace.engine.errors import ConfigError, ModelError
from interlace.layers.checkpoint import LoadedModel, load_checkpoint
from interlace.layers.checkpoint.hf_folder import open_hf_folder
from interlace.layers.checkpoint.loading import Silent

CONFIG: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "sliding_window": None,
    "eos_token_id": 7,
}
LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (32, 16),
    f"{LAYER}input_layernorm.weight": (16,),
    f"{LAYER}self_attn.q_proj.weight": (16, 16),
    f"{LAYER}self_attn.k_proj.weight": (8, 16),
    f"{LAYER}self_attn.v_proj.weight": (8, 16),
    f"{LAYER}self_attn.o_proj.weight": (16, 16),
    f"{LAYER}post_attention_layernorm.weight": (16,),
    f"{LAYER}mlp.gate_proj.weight": (24, 16),
    f"{LAYER}mlp.up_proj.weight": (24, 16),
    f"{LAYER}mlp.down_proj.weight": (16, 24),
    "model.norm.weight": (16,),
    "lm_head.weight": (32, 16),
}


def make(folder: Path, **config: Any) -> Path:
    """A whole little model; returns its weight file."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    file = folder / "model.safetensors"
    save_file({name: torch.randn(shape) for name, shape in SHAPES.items()}, file)
    return file


def change(file: Path, **tensors: torch.Tensor | None) -> None:
    """Rewrite `file` with some tensors replaced, or removed where None (dots as two underlines)."""
    content = load_file(file)
    for name, tensor in tensors.items():
        content.pop(name.replace("__", "."), None)
        if tensor is not None:
            content[name.replace("__", ".")] = tensor
    save_file(content, file)


def load(folder: Path, **options: Any) -> LoadedModel:
    return load_checkpoint(str(folder), skip_tokenizer=True, **options)


def refused(folder: Path, message: str, **options: Any) -> None:
    with pytest.raises(ModelError, match=message):
        load(folder, **options)


def test_a_whole_folder_loads(tmp_path: Path) -> None:
    make(tmp_path)
    model = load(tmp_path)
    assert (model.max_model_len, model.eos_token_ids) == (64, (7,))
    assert model.tokenizer is None
    assert "MistralForCausalLM" in repr(model.decoder)


def test_generation_config_knows_the_ends_better(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert load(tmp_path).eos_token_ids == (3, 4)


def test_max_model_len_may_only_be_lowered(tmp_path: Path) -> None:
    make(tmp_path)
    assert load(tmp_path, max_model_len=10).max_model_len == 10
    with pytest.raises(ConfigError, match="max_model_len 65 is more than the 64 tokens"):
        load(tmp_path, max_model_len=65)


def test_a_window_is_refused_unless_it_covers_the_length(tmp_path: Path) -> None:
    make(tmp_path, sliding_window=32)
    refused(tmp_path, "sliding_window of 32 tokens.*set max_model_len to 32")
    assert load(tmp_path, max_model_len=32).max_model_len == 32


def is_mapped(tensor: torch.Tensor, file: Path) -> bool:
    """Whether the tensor's bytes are pages of `file`."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    spans = [line.split()[0].split("-") for line in lines if line.endswith(str(file))]
    return any(int(low, 16) <= tensor.data_ptr() < int(high, 16) for low, high in spans)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
def test_weights_that_need_no_change_are_used_in_place(tmp_path: Path) -> None:
    file = make(tmp_path)
    read = open_hf_folder(tmp_path).read_weights
    weights = read(torch.float32, torch.device("cpu"), Silent())
    copied = [name for name, weight in weights.items() if not is_mapped(weight, file)]
    assert sorted(copied) == ["layers.0.gate_up", "layers.0.qkv"]
    del weights
    cast = read(torch.bfloat16, torch.device("cpu"), Silent())
    assert not any(is_mapped(weight, file) for weight in cast.values())
    assert str(file) not in Path("/proc/self/maps").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "shard",
    ["../model.safetensors", "/etc/model.safetensors", "a/../../x.safetensors", "x.bin", 3, None],
)
def test_a_shard_outside_the_folder_is_refused(shard: object, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    make(folder).rename(tmp_path / "model.safetensors")
    index = {"weight_map": dict.fromkeys(SHAPES, shard)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "which is not a file of its folder")


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    make(tmp_path).unlink()
    index = {"weight_map": dict.fromkeys(SHAPES, "model-00001-of-00002.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(tmp_path, r"model-00001-of-00002\.safetensors")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 0.999])
def test_truncated_weights_are_told_so(share: float, tmp_path: Path) -> None:
    file = make(tmp_path)
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    refused(tmp_path, "truncated or not a safetensors file")


def test_foreign_weights_are_told_so(tmp_path: Path) -> None:
    make(tmp_path).write_bytes(b"\xff" * 4096)
    refused(tmp_path, "truncated or not a safetensors file")


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    file = make(tmp_path)
    norm = "model__norm__weight"
    change(file, **{norm: None})
    refused(tmp_path, r"model\.norm\.weight is missing")
    change(file, **{norm: torch.ones(15)})
    refused(tmp_path, r"model\.norm\.weight should make \[16\].* has \[15\]")
    change(file, **{norm: torch.ones(())})
    refused(tmp_path, r"model\.norm\.weight should make \[16\]")
    change(file, **{norm: torch.ones(16, dtype=torch.int32)})
    refused(tmp_path, r"unsupported type torch\.int32")
    bias = "model__layers__0__self_attn__q_proj__bias"
    change(file, **{norm: torch.ones(16), bias: torch.zeros(16)})
    refused(tmp_path, r"such as model\.layers\.0\.self_attn\.q_proj\.bias")


def test_old_rope_buffers_are_no_leftovers(tmp_path: Path) -> None:
    file = make(tmp_path)
    change(file, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "no config.json: it is not a model folder"),
        ("config.json", "{", "not valid JSON"),
        ("config.json", "[]", "does not hold a JSON object"),
        ("config.json", "[" * 100_000, "not valid JSON"),
        ("model.safetensors", None, "neither model.safetensors nor"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id must be"),
    ],
)
def test_files_that_are_missing_or_damaged_are_named(
    name: str, content: str | None, message: str, tmp_path: Path
) -> None:
    make(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    refused(tmp_path, message)


def test_a_folder_without_tokenizer_says_how_to_give_one(tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(ModelError, match="--tokenizer DIR"):
        load_checkpoint(str(tmp_path))


def test_options_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    make(tmp_path)
    for options in ({"dtype": "int4"}, {"device": "toaster"}):
        with pytest.raises(ConfigError):
            load(tmp_path, **options)


def test_a_name_that_is_nothing_lists_what_is_possible(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'smollm2-135m', the path of a \.gguf file"):
        load_checkpoint("no such model")
    for name in ("a" * 5000, "nul\0", "~nobody-has-this-name/x"):
        with pytest.raises(ModelError, match="there is no model") as caught:
            load_checkpoint(name)
        assert len(str(caught.value)) < 500
    file = make(tmp_path)
    with pytest.raises(ModelError, match="give the folder"):
        load_checkpoint(str(file))
