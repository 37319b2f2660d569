"""Damage on request: exactly the block that was named, wherever it lies."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from slab_kit import block_hash, folder_in, is_right, write_slab

from interlace.connectors.slab_store.faults import FAULT_KINDS, damage
from interlace.connectors.slab_store.layout import DamagedSlabError
from interlace.connectors.slab_store.slab import Slab


def right_ones(path: Path) -> list[int]:
    """Numbers of the blocks of a slab that are what was written."""
    right: list[int] = []
    with Slab.open(path) as slab:
        for entry in slab.look():
            with contextlib.suppress(DamagedSlabError):
                assert is_right(slab, entry)
                right.append(int.from_bytes(entry.block_hash, "big"))
    return right


@pytest.mark.parametrize("kind", FAULT_KINDS)
def test_one_block_is_lost_in_all_slabs_and_no_other(kind: str, tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    paths = [write_slab(folder, numbers) for numbers in ([1, 2, 3], [4, 2], [5, 6])]
    assert damage(folder, kind, block_hash(2)) == {block_hash(2)}
    assert [right_ones(path) for path in paths] == [[1, 3], [4], [5, 6]]


@pytest.mark.parametrize("kind", FAULT_KINDS)
def test_what_is_not_stored_is_not_lost(kind: str, tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    path = write_slab(folder, [1, 2])
    (folder / "other.slab").write_bytes(b"no slab")
    assert damage(folder, kind, block_hash(7)) == set()
    assert right_ones(path) == [1, 2]


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        damage(folder_in(tmp_path), "burnt", block_hash(1))
