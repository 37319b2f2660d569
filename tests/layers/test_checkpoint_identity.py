"""The identity of a model: what changes it, what does not, and what a second start reads."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import tiny_model

from interlace.layers.architecture import Architecture, RopeScaling
from interlace.layers.checkpoint import LoadedModel, file_digest, identity, load_checkpoint
from interlace.layers.checkpoint import model_identity as identity_of
from interlace.layers.checkpoint.cache_folder import CACHE_VARIABLE
from interlace.layers.checkpoint.checkpoint import WeightOrigin
from interlace.layers.checkpoint.file_digest import default_memo, digests_of, stamps_of
from interlace.layers.checkpoint.identity import normalised

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "vocab_size": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (16, 8),
    "model.norm.weight": (8,),
    f"{LAYER}input_layernorm.weight": (8,),
    f"{LAYER}post_attention_layernorm.weight": (8,),
    **{f"{LAYER}self_attn.{n}_proj.weight": (8, 8) for n in "qkvo"},
    f"{LAYER}mlp.gate_proj.weight": (12, 8),
    f"{LAYER}mlp.up_proj.weight": (12, 8),
    f"{LAYER}mlp.down_proj.weight": (8, 12),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    random = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}
    save_file(tensors, folder / "model.safetensors")
    settle(folder)
    return folder


def settle(folder: Path) -> None:
    """Let all files be an hour old: a younger one might still change unnoticed."""
    for file in folder.iterdir():
        then = file.stat().st_mtime - 3600
        os.utime(file, (then, then))


def load(folder: Path, **options: Any) -> LoadedModel:
    return load_checkpoint(str(folder), skip_tokenizer=True, **options)


def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, reading weights for a digest fails the test."""

    def refuse(*_: object) -> str:
        raise AssertionError("weights were read")

    monkeypatch.setattr(file_digest, "_sha256", refuse)
    monkeypatch.setattr(identity, "_of_tensors", refuse)


def test_a_copy_in_another_folder_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    first = identity_of(load(folder))
    assert len(bytes.fromhex(first)) == 32
    assert identity_of(load(Path(shutil.copytree(folder, tmp_path / "copy")))) == first


def test_other_weights_under_the_same_name_are_another_model(folder: Path) -> None:
    before = identity_of(load(folder))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] += 1e-3
    save_file(tensors, folder / "model.safetensors")
    assert identity_of(load(folder)) != before


def test_a_change_that_keeps_size_and_time_but_not_the_file_is_seen(folder: Path) -> None:
    file = folder / "model.safetensors"
    before = identity_of(load(folder))
    content, status = bytearray(file.read_bytes()), file.stat()
    content[-1] ^= 1
    (folder / "new").write_bytes(content)
    (folder / "new").replace(file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert identity_of(load(folder)) != before


def test_dtype_and_configuration_count_and_limits_do_not(folder: Path) -> None:
    plain = identity_of(load(folder))
    assert identity_of(load(folder, dtype="bfloat16")) != plain
    assert identity_of(load(folder, max_model_len=32)) == plain
    (folder / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 48}))
    assert identity_of(load(folder)) == plain
    (folder / "config.json").write_text(json.dumps(CONFIG | {"rope_theta": 5e5}))
    assert identity_of(load(folder)) != plain


SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "rms_eps": 1e-5,
}
OTHER: dict[str, Any] = {name: value * 2 for name, value in SIZES.items()} | {
    "rope_theta": 5e5,
    "rope_scaling": RopeScaling(kind="linear", factor=2.0),
    **dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias", "qk_norm", "tied_head"), True),
}


def test_every_field_that_changes_numbers_counts() -> None:
    plain = Architecture(name="a", max_position=64, **SIZES)
    fields = {field.name for field in dataclasses.fields(Architecture)}
    assert fields == OTHER.keys() | {"name", "max_position", "sliding_window"}
    texts = {normalised(dataclasses.replace(plain, **{k: v})) for k, v in OTHER.items()}
    assert len(texts | {normalised(plain)}) == len(OTHER) + 1
    limits = dataclasses.replace(plain, name="b", max_position=9, sliding_window=9)
    assert normalised(limits) == normalised(plain)


def test_all_shards_and_the_index_count(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    whole = identity_of(load(folder))
    (folder / "model.safetensors").unlink()
    shards = {"a.safetensors": tensors, "b.safetensors": {k: v + 1 for k, v in tensors.items()}}
    for name, content in shards.items():
        save_file(content, folder / name)

    def with_shard(shard: str) -> str:
        index = {"weight_map": {**dict.fromkeys(SHAPES, "a.safetensors"), some: shard}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return identity_of(load(folder))

    some, other = "model.norm.weight", "b.safetensors"
    assert len({whole, with_shard("a.safetensors"), with_shard(other)}) == 3
    before = with_shard(other)
    save_file({k: v + 2 for k, v in tensors.items()}, folder / other)
    assert with_shard(other) != before


def test_a_second_start_reads_no_weights(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = identity_of(load(folder))
    assert default_memo() == cache / "weights" / "digests.json"
    assert stat.S_IMODE(default_memo().stat().st_mode) == 0o600
    assert [file.name for file in default_memo().parent.iterdir()] == ["digests.json"]
    no_reading(monkeypatch)
    assert identity_of(load(folder)) == first


def test_a_link_is_known_by_the_file_behind_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = identity_of(load(folder))
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in folder.iterdir():
        (linked / file.name).symlink_to(file)
    no_reading(monkeypatch)
    assert identity_of(load(linked)) == first


def test_a_file_that_has_just_been_written_is_not_remembered(folder: Path) -> None:
    os.utime(folder / "model.safetensors")
    identity_of(load(folder))
    assert not default_memo().exists()


@pytest.mark.parametrize(
    "damage",
    ["", "[", "[]", "null", '{"x": 1}', "[" * 100_000, "known: []", "known: [1]", "known: null"],
)
def test_a_damaged_memo_costs_a_reading(damage: str, folder: Path) -> None:
    first = identity_of(load(folder))
    (key,) = json.loads(default_memo().read_text())
    if damage.startswith("known: "):
        damage = f'{{"{key}": {damage.removeprefix("known: ")}}}'
    default_memo().write_text(damage)
    assert identity_of(load(folder)) == first
    assert key in json.loads(default_memo().read_text())


@pytest.mark.parametrize("digest", [7, None, "", "z" * 64, ["a"]])
def test_a_digest_that_is_none_is_not_believed(digest: object, folder: Path) -> None:
    first = identity_of(load(folder))
    memo = json.loads(default_memo().read_text())
    next(iter(memo.values()))[3] = digest
    default_memo().write_text(json.dumps(memo))
    assert identity_of(load(folder)) == first


def test_a_cache_that_cannot_be_written_is_done_without(folder: Path, cache: Path) -> None:
    cache.write_text("not a folder")
    assert identity_of(load(folder)) == identity_of(load(folder))


def test_what_is_remembered_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_digest, "_MAX_REMEMBERED", 3)
    (tmp_path / "files").mkdir()
    files = [tmp_path / "files" / str(number) for number in range(5)]
    for file in files:
        file.write_text(file.name)
    settle(tmp_path / "files")
    digests_of(stamps_of(files), lambda _: None)
    assert len(json.loads(default_memo().read_text())) == 3
    monkeypatch.setattr(file_digest, "_sha256", lambda *_: pytest.fail("read again"))
    assert digests_of(stamps_of(files[2:]), lambda _: None) is not None


def test_files_that_changed_since_loading_are_not_what_counts(folder: Path) -> None:
    loaded = load(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({k: v + 1 for k, v in tensors.items()}, folder / "new.safetensors")
    (folder / "new.safetensors").replace(folder / "model.safetensors")
    of_tensors = dataclasses.replace(loaded, weight_origin=WeightOrigin())
    assert identity_of(loaded) == identity_of(of_tensors)
    assert identity_of(loaded) != identity_of(load(folder))
    shutil.rmtree(folder)
    assert identity_of(loaded) == identity_of(of_tensors)


def changed(change: Callable[[dict[str, torch.Tensor]], None]) -> LoadedModel:
    """The tiny model with other weights, which are not written anywhere."""
    model = tiny_model()
    weights = {name: weight.clone() for name, weight in model.weights.items()}
    change(weights)
    return dataclasses.replace(model, weights=weights)


def test_a_model_without_files_is_told_by_its_tensors() -> None:
    first = identity_of(tiny_model())
    assert identity_of(tiny_model()) == first
    assert identity_of(tiny_model(max_model_len=64)) == first
    assert identity_of(tiny_model(dtype=torch.float32)) != first
    assert identity_of(tiny_model(dtype=torch.bfloat16)) != first

    def last_bit(weights: dict[str, torch.Tensor]) -> None:
        weights["norm"].view(torch.int64)[-1] ^= 1

    def swapped(weights: dict[str, torch.Tensor]) -> None:
        for name in ("qkv", "down"):
            a, b = f"layers.0.{name}", f"layers.1.{name}"
            weights[a], weights[b] = weights[b], weights[a]

    def transposed(weights: dict[str, torch.Tensor]) -> None:
        weights["layers.0.o"] = weights["layers.0.o"].T

    ways = (last_bit, swapped, transposed)
    assert len({first, *(identity_of(changed(way)) for way in ways)}) == 4
    assert identity_of(changed(lambda w: w.update(dict(reversed(w.items()))))) == first


class Told:
    """A progress that remembers, or ends the work at the first advance."""

    def __init__(self, *, ends: bool = False) -> None:
        self.total = self.done = 0.0
        self._ends = ends

    @contextlib.contextmanager
    def task(self, description: str, total: float | None) -> Iterator[Callable[[float], None]]:
        assert total is not None
        self.total += total
        yield self._advance

    def _advance(self, amount: float) -> None:
        if self._ends:
            raise InterruptedError
        self.done += amount


def test_progress_is_shown_when_it_takes_long(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folder)
    told = Told()
    identity_of(model, told, memo=folder / "memo.json")
    assert told.total == 0, "a little model takes no time"
    monkeypatch.setattr(identity, "_SHOWN_BYTES", 1)
    identity_of(model, told)
    size = (folder / "model.safetensors").stat().st_size
    assert (told.total, told.done) == (size, size)
    identity_of(model, told)
    assert told.total == size, "the second start reads nothing"
    tensors = tiny_model()
    identity_of(tensors, told)
    assert told.total == told.done == size + sum(w.nbytes for w in tensors.weights.values())
    with pytest.raises(InterruptedError):
        identity_of(tensors, Told(ends=True))


def test_the_default_model_is_known_without_reading(
    default_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_reading(monkeypatch)
    assert len(identity_of(default_model)) == 64
    assert not default_memo().exists()
