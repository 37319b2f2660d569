"""The cached conversion: what is written comes back, and damage is noticed, never loaded."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from interlace.layers.checkpoint import DEFAULT_MODEL, default_model
from interlace.layers.checkpoint.cache_folder import (
    cache_folder,
    private_folder,
    remove_stale_scratch,
)
from interlace.layers.checkpoint.converted import write_converted
from interlace.layers.checkpoint.description import DESCRIPTION, WEIGHTS, read_description
from interlace.layers.checkpoint.loading import Silent
from interlace.layers.weights import LAYOUT_VERSION

TENSORS = {"embed": torch.randn(6, 4), "norm": torch.randn(4), "empty": torch.randn(0, 4)}
SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
PAYLOAD = {"text": "<|im_end|> é \u2028", "numbers": [1, 2.5, True, None]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path)
    return tmp_path


def write(folder: Path) -> None:
    done: list[float] = []
    write_converted(folder, SHAPES, TENSORS.items(), PAYLOAD, done.append)
    assert sum(done) == sum(tensor.nbytes for tensor in TENSORS.values())


def test_it_is_an_ordinary_safetensors_file(folder: Path) -> None:
    loaded = load_file(folder / WEIGHTS)
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], TENSORS[name]) for name in TENSORS)
    assert read_description(folder) == PAYLOAD


def test_only_the_owner_can_read_it(folder: Path) -> None:
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_nothing_there_is_nothing_found(tmp_path: Path) -> None:
    assert read_description(tmp_path) is None


@pytest.mark.parametrize("name", [WEIGHTS, DESCRIPTION])
@pytest.mark.parametrize("damage", ["cut", "empty", "longer", "flipped", "gone"])
def test_damage_is_noticed_and_mended_by_writing_again(
    name: str, damage: str, folder: Path
) -> None:
    file = folder / name
    content = file.read_bytes()
    flipped = content[:20] + bytes([content[20] ^ 1]) + content[21:]
    if damage == "gone":
        file.unlink()
    else:
        longer = content + b"\n"
        cases = {"cut": content[:-1], "empty": b"", "longer": longer, "flipped": flipped}
        file.write_bytes(cases[damage])
    assert read_description(folder) is None
    write(folder)
    assert read_description(folder) == PAYLOAD


def test_a_failure_half_way_leaves_what_was_there(folder: Path) -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield "embed", TENSORS["embed"]
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_converted(folder, SHAPES, failing(), {}, lambda _bytes: None)
    assert read_description(folder) == PAYLOAD
    assert sorted(path.name for path in folder.iterdir()) == [DESCRIPTION, WEIGHTS]


def test_two_writers_at_once_leave_one_whole_conversion(folder: Path) -> None:
    """The second one finishes while the first is between its tensors."""

    def interrupted() -> Iterator[tuple[str, torch.Tensor]]:
        for index, item in enumerate(TENSORS.items()):
            if index == 1:
                write(folder)
            yield item

    write_converted(folder, SHAPES, interrupted(), PAYLOAD, lambda _bytes: None)
    assert read_description(folder) == PAYLOAD
    assert torch.equal(load_file(folder / WEIGHTS)["norm"], TENSORS["norm"])


def test_the_environment_chooses_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INTERLACE_CACHE_DIR", str(tmp_path / "here"))
    assert cache_folder() == tmp_path / "here"
    monkeypatch.setenv("INTERLACE_CACHE_DIR", "~nobody-has-this-name/x")
    assert cache_folder().name == "x"
    monkeypatch.setenv("INTERLACE_CACHE_DIR", " ")
    assert cache_folder().name == "interlace"


def test_a_private_folder_stays_private(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "a" / "b")
    folder.chmod(0o755)
    assert private_folder(folder).stat().st_mode & 0o777 == 0o700


def test_only_old_scratch_is_removed(tmp_path: Path) -> None:
    for name in ("building-old", "building-new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.gguf").write_bytes(b"x")
    for name in ("old.tmp", "new.tmp", "old.safetensors"):
        (tmp_path / name).write_bytes(b"x")
    yesterday = time.time() - 86400
    for name in ("building-old", "old.tmp", "old.safetensors"):
        os.utime(tmp_path / name, (yesterday, yesterday))
    remove_stale_scratch(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["building-new", "new.tmp", "old.safetensors"]


def test_a_start_that_finds_its_model_clears_what_killed_ones_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INTERLACE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(default_model, "read_description", lambda _folder: {})
    monkeypatch.setattr(default_model, "_checkpoint", lambda _file, _payload: None)
    left = tmp_path / f"{DEFAULT_MODEL}-{LAYOUT_VERSION}" / "weights.safetensors.x.tmp"
    left.parent.mkdir()
    left.write_bytes(b"x")
    os.utime(left, (0, 0))
    default_model.open_default_model(Silent())
    assert not left.exists()
