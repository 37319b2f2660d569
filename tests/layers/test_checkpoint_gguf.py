"""GGUF files: what is written comes back as the same model, and a damaged file is told so."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.engine.errors import ModelError
from interlace.layers.architecture import Architecture
from interlace.layers.checkpoint import load_checkpoint
from interlace.layers.checkpoint.gguf_file import GGUFFile
from interlace.layers.checkpoint.gguf_model import gguf_parts
from interlace.layers.rotary import inverse_frequencies
from interlace.layers.weights import weight_shapes

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 96,
    "rms_eps": 1e-5,
    "max_position": 64,
}
ARCHITECTURES = {
    "llama": Architecture(name="llama", tied_head=True, **SIZES),
    "llama with biases": Architecture(
        name="llama", qkv_bias=True, o_bias=True, mlp_bias=True, **{**SIZES, "head_dim": 16}
    ),
    "qwen2": Architecture(name="qwen2", qkv_bias=True, rope_theta=1e6, **SIZES),
    "qwen3": Architecture(name="qwen3", qk_norm=True, tied_head=True, **{**SIZES, "head_dim": 16}),
}


def random_weights(architecture: Architecture) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=generator)
        for name, shape in weight_shapes(architecture).items()
    }


def interleave(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """How the format stores Q and K of `llama`: the halves of a head dealt out in turns."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def split(
    architecture: Architecture, weights: Mapping[str, torch.Tensor]
) -> dict[str, npt.NDArray[np.float32]]:
    """The file's tensors: the opposite of what the loader does, written from the format's side."""
    a = architecture
    sizes = {"qkv": [a.q_size, a.kv_size, a.kv_size], "gate_up": [a.intermediate_size] * 2}
    tensors = {}
    for name, sources in gguf_parts(a).items():
        kind = name.split(".")[-1].removesuffix("_bias")
        rows = sizes.get(kind, [weights[name].shape[0]])
        for source, part in zip(sources, torch.split(weights[name], rows), strict=True):
            tensors[source] = part.numpy()
    if a.name == "llama":
        for stem, heads in (("attn_q.", a.num_heads), ("attn_k.", a.num_kv_heads)):
            permuted = {n: interleave(t, heads) for n, t in tensors.items() if stem in n}
            tensors |= permuted
    return tensors


def write(
    path: Path,
    architecture: Architecture,
    tensors: Mapping[str, npt.NDArray[np.float32]],
    **more: Any,
) -> Path:
    """A GGUF file by the format's own library; `more` are extra metadata fields by dotted name."""
    a = architecture
    writer = gguf.GGUFWriter(path, a.name)
    writer.add_block_count(a.num_layers)
    writer.add_context_length(a.max_position)
    writer.add_embedding_length(a.hidden_size)
    writer.add_feed_forward_length(a.intermediate_size)
    writer.add_head_count(a.num_heads)
    writer.add_head_count_kv(a.num_kv_heads)
    writer.add_key_length(a.head_dim)
    writer.add_value_length(a.head_dim)
    writer.add_rope_dimension_count(a.head_dim)
    writer.add_rope_freq_base(a.rope_theta)
    writer.add_layer_norm_rms_eps(a.rms_eps)
    writer.add_vocab_size(a.vocab_size)
    writer.add_eos_token_id(2)
    for name, value in more.items():
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_random(path: Path, name: str = "llama", **more: Any) -> dict[str, torch.Tensor]:
    architecture = ARCHITECTURES[name]
    weights = random_weights(architecture)
    write(path, architecture, split(architecture, weights), **more)
    return weights


def loaded_weights(path: Path) -> tuple[Architecture, dict[str, torch.Tensor]]:
    from interlace.layers.checkpoint.gguf_model import open_gguf
    from interlace.layers.checkpoint.loading import Silent

    checkpoint = open_gguf(path)
    weights = checkpoint.read_weights(torch.float32, torch.device("cpu"), Silent())
    return checkpoint.architecture, weights


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_written_model_comes_back(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    weights = write_random(path, name)
    architecture, loaded = loaded_weights(path)
    expected = ARCHITECTURES[name]
    assert architecture.rms_eps == pytest.approx(expected.rms_eps)
    assert {f: getattr(architecture, f) for f in SIZES if f != "rms_eps"} == {
        f: getattr(expected, f) for f in SIZES if f != "rms_eps"
    }
    assert architecture.rope_theta == expected.rope_theta
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[weight], weights[weight]) for weight in weights)
    model = load_checkpoint(str(path), skip_tokenizer=True, dtype="bfloat16", max_model_len=32)
    assert (model.decoder.dtype, model.max_model_len) == (torch.bfloat16, 32)
    assert model.eos_token_ids == (2,)


def test_quantised_tensors_are_dequantised(tmp_path: Path) -> None:
    architecture = ARCHITECTURES["qwen3"]
    tensors = split(architecture, random_weights(architecture))
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            quantised = gguf.quantize(tensor, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(path)
    for name in file.tensors:
        assert file.read(name).shape == tensors[name].shape
        np.testing.assert_allclose(file.read(name), tensors[name], atol=0.03)


def test_rope_factors_in_a_tensor_divide_the_frequencies(tmp_path: Path) -> None:
    plain = ARCHITECTURES["llama"]
    tensors = split(plain, random_weights(plain))
    factors = np.array([1.0, 1.0, 2.5, 8.0], dtype=np.float32)
    path = write(tmp_path / "m.gguf", plain, {**tensors, "rope_freqs.weight": factors})
    architecture, _ = loaded_weights(path)
    expected = inverse_frequencies(plain) / torch.from_numpy(factors)
    assert torch.equal(inverse_frequencies(architecture), expected)
    path = write(tmp_path / "n.gguf", plain, {**tensors, "rope_freqs.weight": factors[:3]})
    with pytest.raises(ModelError, match=r"rope_freqs\.weight does not fit"):
        loaded_weights(path)


def test_linear_scaling_stretches_rope_and_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    more: dict[str, Any] = {"type": "linear", "factor": 4.0}
    write_random(path, **{f"llama.rope.scaling.{name}": value for name, value in more.items()})
    architecture, _ = loaded_weights(path)
    assert architecture.max_position == 256
    plain = inverse_frequencies(ARCHITECTURES["llama"])
    assert torch.equal(inverse_frequencies(architecture), plain / 4)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"llama.rope.scaling.type": "yarn"}, r"rope\.scaling\.type 'yarn'"),
        ({"llama.expert_count": 8}, "mixtures of experts"),
        ({"llama.attention.scale": 0.5}, r"llama\.attention\.scale is not supported"),
        ({"llama.attention.sliding_window": 16}, "sliding_window of 16"),
        ({"split.count": 2}, "split GGUF files"),
        ({"general.type": "adapter"}, "holds a adapter"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(
    more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_random(path, **more)
    with pytest.raises(ModelError, match=message):
        load_checkpoint(str(path), skip_tokenizer=True)


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="'gemma3' is not supported; supported: llama, qwen2"):
        load_checkpoint(str(path))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"tokenizer\.ggml\.model None .* --tokenizer DIR"),
        ({"tokenizer.ggml.model": "llama"}, r"tokenizer\.ggml\.model 'llama' .* --tokenizer DIR"),
        ({"tokenizer.ggml.model": "gpt2"}, r"tokenizer\.ggml\.tokens is missing"),
    ],
)
def test_a_tokenizer_that_is_not_supported_is_refused_by_name(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_random(path, **fields)
    with pytest.raises(ModelError, match=message):
        load_checkpoint(str(path))


@pytest.mark.parametrize("lost", ["blk.1.attn_k.weight", "output_norm.weight"])
def test_a_missing_tensor_is_named(lost: str, tmp_path: Path) -> None:
    architecture = ARCHITECTURES["qwen2"]
    tensors = split(architecture, random_weights(architecture))
    del tensors[lost]
    path = write(tmp_path / "m.gguf", architecture, tensors)
    with pytest.raises(ModelError, match=f"{lost} is missing"):
        loaded_weights(path)


def test_a_tensor_too_many_or_of_another_shape_is_named(tmp_path: Path) -> None:
    architecture = ARCHITECTURES["qwen2"]
    tensors = split(architecture, random_weights(architecture))
    extra = {**tensors, "blk.0.attn_gate.weight": np.ones((4, 4), dtype=np.float32)}
    with pytest.raises(ModelError, match=r"such as blk\.0\.attn_gate\.weight"):
        loaded_weights(write(tmp_path / "m.gguf", architecture, extra))
    wrong = {**tensors, "blk.0.ffn_up.weight": np.ones((63, 32), dtype=np.float32)}
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_up\.weight should make \[128, 32\]"):
        loaded_weights(write(tmp_path / "n.gguf", architecture, wrong))


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_random(path, **{"general.name": "tiny"})
    return path.read_bytes()


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.001, 0.01, 0.02, 0.05, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_told_so(share: float, whole_file: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole_file[: int(len(whole_file) * share)])
    with pytest.raises(ModelError, match=r"truncated|is empty"):
        load_checkpoint(str(path))


def test_a_foreign_file_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(1000))
    with pytest.raises(ModelError, match="does not begin with 'GGUF'"):
        load_checkpoint(str(path))


@pytest.mark.parametrize("offset", [8, 16])
def test_counts_that_lie_are_not_believed(offset: int, whole_file: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    huge = (2**62).to_bytes(8, "little")
    path.write_bytes(whole_file[:offset] + huge + whole_file[offset + 8 :])
    with pytest.raises(ModelError, match="its header lies"):
        load_checkpoint(str(path))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_damage_to_the_header_ends_in_anything_but_our_error(
    data: st.DataObject, whole_file: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(whole_file)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, 2500))
        content[at] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(content)
    with contextlib.suppress(ModelError):
        load_checkpoint(str(path), skip_tokenizer=True)
