"""Loads are counted by prefix, in logs that stay small and that nothing depends on."""

from __future__ import annotations

import concurrent.futures
import errno
from pathlib import Path

import pytest
from slab_kit import SPACE, block_hash, folder_in, write_slab

from interlace.connectors.slab_store import hits
from interlace.connectors.slab_store.catalog import Catalog


def test_loads_are_counted_by_prefix(tmp_path: Path) -> None:
    hits.note(tmp_path, [block_hash(1), block_hash(2), block_hash(1)])
    hits.note(tmp_path, [])
    hits.note(tmp_path, [block_hash(1)])
    assert hits.count(tmp_path) == {block_hash(1): 3, block_hash(2): 1}
    assert (tmp_path / hits.LOG).stat().st_mode & 0o777 == 0o600
    hits.remove(tmp_path)
    assert not list(tmp_path.iterdir())
    assert not hits.count(tmp_path)


def test_old_loads_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hits, "MOST_BYTES", 4 * 32)
    for number in range(11):
        hits.note(tmp_path, [block_hash(number)])
    assert hits.count(tmp_path) == {block_hash(n): 1 for n in range(4, 11)}
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 7 * 32


def test_engines_write_side_by_side(tmp_path: Path) -> None:
    def note(number: int) -> None:
        for _ in range(50):
            hits.note(tmp_path, [block_hash(number)] * 3)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(note, range(4)))
    assert hits.count(tmp_path) == {block_hash(n): 150 for n in range(4)}


def test_what_is_no_whole_entry_counts_for_nothing(tmp_path: Path) -> None:
    (tmp_path / hits.LOG).write_bytes(block_hash(1) + b"cut")
    (tmp_path / hits.OLD_LOG).symlink_to(tmp_path / hits.LOG)
    assert hits.count(tmp_path) == {block_hash(1): 1}


def test_a_look_writes_down_what_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the end does; a store that cannot be written to is no matter."""
    folder = folder_in(tmp_path)
    write_slab(folder, [1])
    catalog = Catalog(folder, SPACE)
    catalog.note_load(block_hash(1))
    catalog.look()
    assert hits.count(folder) == {block_hash(1): 1}
    catalog.note_load(block_hash(1))

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(hits, "note", refuse)
        catalog.look()
    catalog.note_load(block_hash(1))
    catalog.close()
    assert hits.count(folder) == {block_hash(1): 2}
