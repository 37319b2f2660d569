"""Which slabs are mapped, and that a mapping is of what was published."""

from __future__ import annotations

import dataclasses
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from slab_kit import SPACE, block_hash, header

from interlace.connectors.slab_store.layout import DamagedSlabError
from interlace.connectors.slab_store.mapping import MappedSlab, Outlook, Scout
from interlace.connectors.slab_store.slab import Slab
from interlace.connectors.slab_store.slab_writer import NewRecord, SlabWriter
from interlace.connectors.slab_store.space import Space

PAGED = dataclasses.replace(SPACE, page_bytes=4096)
RECORD_BYTES = PAGED.record_bytes


def content(number: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(number).integers(0, 256, RECORD_BYTES, np.uint8)


def begun(
    folder: Path, numbers: Sequence[int], used_s: float, *, room: int = 4, space: Space = PAGED
) -> SlabWriter:
    """A slab with these records, last used then."""
    writer = SlabWriter.create(folder, header(room, space))
    size = space.record_bytes
    new = [NewRecord(block_hash(i), None, content(i)[:size]) for i in numbers]
    if new:
        writer.add(new)
    os.utime(writer.path, (used_s, used_s))
    return writer


def sealed(folder: Path, numbers: Sequence[int], used_s: float, space: Space = PAGED) -> str:
    writer = begun(folder, numbers, used_s, space=space)
    writer.close()
    os.utime(writer.path, (used_s, used_s))
    return writer.path.name


def scout(folder: Path, most_records: float = 100, **tests: object) -> Scout:
    return Scout(folder, PAGED, int(most_records * RECORD_BYTES), **tests)  # type: ignore[arg-type]


def names(outlook: Outlook) -> list[str]:
    """Of fresh ones, which are closed."""
    found = [slab.name for slab in outlook.fresh]
    for slab in outlook.fresh:
        slab.close()
    return found


def test_what_is_mapped_is_what_was_published(tmp_path: Path) -> None:
    sealed(tmp_path, [3, 1, 2], 100.0)
    (slab,) = scout(tmp_path).look(()).fresh
    assert slab.rows.shape == (3, RECORD_BYTES), "and not the hole behind"
    assert slab.num_bytes == 3 * RECORD_BYTES
    for row, number in zip(slab.rows, (3, 1, 2), strict=True):
        assert np.array_equal(row, content(number))
    assert slab.address % 4096 == 0
    assert slab.is_resident
    removed = [slab.is_removed]
    (tmp_path / slab.name).unlink()
    assert [*removed, slab.is_removed] == [False, True]
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    slab.close()
    slab.close()
    assert len(os.listdir("/proc/self/fd")) < before  # noqa: PTH208


def test_the_ones_used_last_come_first_as_long_as_they_fit(tmp_path: Path) -> None:
    old, new, middle = (
        sealed(tmp_path, [first, first + 1], used_s)
        for first, used_s in ((0, 100.0), (2, 300.0), (4, 200.0))
    )
    assert names(scout(tmp_path).look(())) == [new, middle, old]
    assert names(scout(tmp_path, 4.5).look(())) == [new, middle]
    assert names(scout(tmp_path, 1.9).look(())) == []
    outlook = scout(tmp_path, 4).look({old, new})
    assert names(outlook) == [middle]
    assert outlook.stale == {old}
    os.utime(tmp_path / old, (400.0, 400.0))
    outlook = scout(tmp_path, 4).look({new, middle})
    assert names(outlook) == [old]
    assert outlook.stale == {middle}


def test_what_is_being_written_is_left_alone_until_it_is_sealed(tmp_path: Path) -> None:
    writer = begun(tmp_path, [1], 100.0)
    one = scout(tmp_path)
    assert names(one.look(())) == []
    writer.close()
    assert names(one.look(())) == [writer.path.name]


def test_what_cannot_be_used_is_not_mapped(tmp_path: Path) -> None:
    assert names(scout(tmp_path / "missing").look(())) == []
    sealed(tmp_path, [], 100.0)
    other = dataclasses.replace(PAGED, identity=dataclasses.replace(PAGED.identity, dtype="half"))
    sealed(tmp_path, [1], 100.0, other)
    sealed(tmp_path, [2], 100.0, dataclasses.replace(PAGED, page_bytes=700))
    (tmp_path / "0-garbage.slab").write_bytes(b"x" * 50_000)
    (tmp_path / "0-folder.slab").mkdir()
    (tmp_path / "0-link.slab").symlink_to("nowhere")
    assert names(scout(tmp_path).look(())) == []
    small = Scout(tmp_path, dataclasses.replace(PAGED, page_bytes=700), 1 << 20)
    assert names(small.look(())) == [], "its records do not lie as those in memory"


def test_another_name_of_the_model_is_no_other_model(tmp_path: Path) -> None:
    name = sealed(tmp_path, [1], 100.0, dataclasses.replace(PAGED, model_name="other"))
    assert names(scout(tmp_path).look(())) == [name]


def test_what_is_not_in_memory_is_mapped_when_it_is(tmp_path: Path) -> None:
    name = sealed(tmp_path, [1], 100.0)
    resident = False
    one = scout(tmp_path, is_resident=lambda slab: resident)
    assert names(one.look(())) == []
    resident = True
    assert names(one.look(())) == [name]


def test_pages_that_were_dropped_are_not_in_memory(tmp_path: Path) -> None:
    """Where the file system drops them: one in memory keeps them."""
    name = sealed(tmp_path, [1, 2], 100.0)
    fd = os.open(tmp_path / name, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        with Slab.open(tmp_path / name) as slab:
            first_byte = slab.header.shape.data_at
        mapped = MappedSlab.open(
            tmp_path / name, first_byte=first_byte, num_records=2, record_bytes=RECORD_BYTES
        )
        before = mapped.is_resident
        os.pread(fd, first_byte + 2 * RECORD_BYTES, 0)
        assert mapped.is_resident
        mapped.close()
        if before:
            pytest.skip("this file system keeps its pages")
    finally:
        os.close(fd)


def test_a_file_that_was_cut_off_is_not_mapped(tmp_path: Path) -> None:
    name = sealed(tmp_path, [1, 2], 100.0)
    one = scout(tmp_path)
    assert names(one.look(())) == [name]
    os.truncate(tmp_path / name, 9000)
    assert names(one.look(())) == []
    with pytest.raises(DamagedSlabError, match="was cut off"):
        MappedSlab.open(tmp_path / name, first_byte=8192, num_records=1, record_bytes=RECORD_BYTES)


def test_a_file_that_is_cut_off_at_that_moment_is_not_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python looks at its size once more, and has an error of its own for it."""
    name = sealed(tmp_path, [1, 2], 100.0)
    looking = scout(tmp_path)
    map_file = mmap.mmap

    def cut_off_first(fd: int, num_bytes: int, *args: int, **options: int) -> mmap.mmap:
        os.truncate(tmp_path / name, 100)
        return map_file(fd, num_bytes, *args, **options)

    monkeypatch.setattr(mmap, "mmap", cut_off_first)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    assert names(looking.look(())) == []
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
