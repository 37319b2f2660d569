"""What lies where: what others add and remove, damage, blocks in two slabs, the cost of looks."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import logging
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slab_kit import (
    SPACE,
    block_hash,
    flip,
    folder_in,
    found,
    header,
    place_of,
    read,
    record,
    said,
    start,
    write_slab,
)

from interlace.connectors.slab_store import catalog as catalog_module
from interlace.connectors.slab_store import slab as slab_module
from interlace.connectors.slab_store.catalog import Catalog
from interlace.connectors.slab_store.layout import (
    ENTRY_BYTES,
    HEADER_BYTES,
    NO_PARENT,
    DamagedSlabError,
    Entry,
    SlabHeader,
    SlabShape,
    pack_entries,
    parse_entries,
)
from interlace.connectors.slab_store.slab_writer import NewRecord, SlabWriter

HASHES = [block_hash(number) for number in range(12)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_in(tmp_path)


@pytest.fixture
def catalog(folder: Path) -> Iterator[Catalog]:
    catalog = Catalog(folder, SPACE)
    yield catalog
    catalog.close()


def lose(catalog: Catalog, number: int) -> None:
    """Read it, find it damaged, and say so."""
    place = place_of(catalog, number)
    with pytest.raises(DamagedSlabError):
        read(place.slab, place.entry)
    catalog.forget(block_hash(number), place)


def damage(path: Path, record_number: int) -> None:
    flip(path, header().shape.record_at(record_number) + 5)


# ---------------------------------------------------------------- what others do


def test_two_catalogs_see_what_others_add(folder: Path, catalog: Catalog) -> None:
    with contextlib.closing(Catalog(folder, SPACE)) as other:
        writers = [SlabWriter.create(folder, header(8)) for _ in range(2)]
        for number in range(6):
            writers[number % 2].add([record(number)])
            for one in (catalog, other):
                assert block_hash(number) not in one, "not before a look"
                one.look()
                assert found(one, range(9)) == list(range(number + 1))
                assert len(one) == number + 1
        for writer in writers:
            writer.close()


WRITER = """
import sys
from pathlib import Path
from slab_kit import write_slab
print(write_slab(Path(sys.argv[1]), [int(number) for number in sys.argv[2:]], 4))
"""


def test_what_another_process_adds_and_removes(folder: Path, catalog: Catalog) -> None:
    paths = [Path(said(start(WRITER, folder, *numbers))) for numbers in ((1, 2), (3,))]
    catalog.look()
    assert found(catalog, range(5)) == [1, 2, 3]
    paths[0].unlink()
    assert len(catalog) == 3, "nobody has looked"
    catalog.look()
    assert found(catalog, range(5)) == [3]
    shutil.rmtree(folder)
    catalog.look()
    assert len(catalog) == 0
    folder.mkdir()
    write_slab(folder, [4])
    catalog.look()
    assert found(catalog, range(5)) == [4]


def test_b66_removed_slabs_are_let_go_of(folder: Path, catalog: Catalog) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for round_ in range(3):
        path = write_slab(folder, [round_])
        catalog.look()
        path.unlink()
    catalog.look()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_many_slabs_need_few_open_files(folder: Path, catalog: Catalog) -> None:
    """A process may have a thousand by default. What is being written is kept in sight."""
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for number in range(20):
        write_slab(folder, [number])
    catalog.look()
    assert found(catalog, range(20)) == [*range(20)]
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    catalog.use_slabs([place_of(catalog, 3).slab])
    catalog.look()
    assert found(catalog, range(20)) == [*range(20)]


def test_another_file_by_the_same_name_is_another_slab(folder: Path, catalog: Catalog) -> None:
    path = write_slab(folder, [1])
    catalog.look()
    place = catalog.find(block_hash(1))
    assert place is not None
    other = write_slab(folder, [2])
    other.replace(path)
    with pytest.raises(DamagedSlabError, match="is another file now"):
        place.slab.read(place.entry, np.empty(SPACE.record_bytes, np.uint8))
    catalog.look()
    assert found(catalog, range(3)) == [2]


def test_what_was_saved_before_some_time_is_forgotten_whoever_saved_it(
    folder: Path, catalog: Catalog
) -> None:
    write_slab(folder, [1, 2])
    catalog.look()
    catalog.forget_before(time.time_ns())
    assert found(catalog, range(5)) == []
    write_slab(folder, [2, 3])
    catalog.look()
    assert found(catalog, range(5)) == [2, 3]


def test_a_folder_that_nobody_has_made_is_empty(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "none", SPACE)
    catalog.look()
    assert len(catalog) == 0
    assert catalog.num_stored(HASHES) == 0
    catalog.close()


def test_a_folder_that_cannot_be_read_is_an_error_and_what_is_known_stays(
    folder: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_slab(folder, [1])
    catalog.look()

    def refuse(path: Path) -> Iterator[Path]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", refuse)
        with pytest.raises(PermissionError):
            catalog.look()
    assert found(catalog, [1]) == [1]


def test_questions(folder: Path, catalog: Catalog) -> None:
    write_slab(folder, [0, 1, 2, 4])
    catalog.look()
    assert catalog.num_stored(HASHES) == 3
    assert catalog.num_stored(HASHES[:2]) == 2
    assert catalog.num_stored(HASHES[4:]) == 1
    assert catalog.num_stored([]) == 0
    assert block_hash(4) in catalog
    assert catalog.find(block_hash(3)) is None


def test_own_records_may_be_told_before_a_look_finds_them(folder: Path, catalog: Catalog) -> None:
    writer = SlabWriter.create(folder, header())
    entries = writer.add([record(1)])
    catalog.look()
    slab = place_of(catalog, 1).slab
    catalog.add(slab, entries)
    catalog.add(slab, writer.add([record(2)]))
    catalog.look()
    assert found(catalog, range(4)) == [1, 2]
    assert not catalog._spares, "told twice, and stored once"
    writer.close()
    writer.path.unlink()
    catalog.look()
    assert len(catalog) == 0


# ---------------------------------------------------------------- what is left out

OTHERS = {
    "model": {"model": "cd" * 32},
    "dtype": {"dtype": "bfloat16"},
    "layout": {"layout": "other"},
    "rank": {"rank": 1},
    "block size": {"block_size": 8},
}


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS.keys())
def test_b71_b72_a_slab_of_other_kv_that_was_copied_here_is_left_out(
    folder: Path,
    catalog: Catalog,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
) -> None:
    space = dataclasses.replace(SPACE, identity=dataclasses.replace(SPACE.identity, **changes))
    writer = SlabWriter.create(folder, header(space=space))
    writer.add([record(1)])
    writer.close()
    for _ in range(3):
        catalog.look()
    assert len(catalog) == 0
    assert writer.path.exists()
    (message,) = caplog.messages
    assert "holds other KV than its folder; remove it" in message


def test_pages_of_another_shape_are_left_out(folder: Path, catalog: Catalog) -> None:
    """Even if records are as long; or if facts are equal, and records are not."""
    space = dataclasses.replace(SPACE, num_layers=SPACE.page_bytes, page_bytes=SPACE.num_layers)
    for one in (
        SlabHeader(space.facts, SlabShape(SPACE.record_bytes, 4)),
        SlabHeader(SPACE.facts, SlabShape(SPACE.record_bytes + 1, 4)),
        SlabHeader({}, SlabShape(SPACE.record_bytes, 4)),
    ):
        writer = SlabWriter.create(folder, one)
        data = np.zeros(one.shape.record_bytes, np.uint8)
        writer.add([NewRecord(block_hash(1), None, data)])
        writer.close()
    catalog.look()
    assert len(catalog) == 0


def test_a_model_of_another_name_is_the_same_model(folder: Path, catalog: Catalog) -> None:
    space = dataclasses.replace(SPACE, model_name="/models/\udcfftoy")
    writer = SlabWriter.create(folder, header(space=space))
    writer.add([record(1)])
    writer.close()
    catalog.look()
    assert found(catalog, [1]) == [1]


def test_b65_what_is_no_slab_is_left_out_once_and_harms_nobody(
    folder: Path, catalog: Catalog, caplog: pytest.LogCaptureFixture
) -> None:
    write_slab(folder, [1])
    (folder / "a.slab").write_bytes(b"")
    (folder / "b.slab").symlink_to("nowhere")
    (folder / "c.slab").mkdir()
    os.mkfifo(folder / "d.slab")
    (folder / "e.slab").write_bytes(b"ILKVSLAB" * 2000)
    (folder / "f.slab.new").write_bytes(b"")
    (folder / "notes").write_bytes(b"")
    for _ in range(3):
        catalog.look()
    assert found(catalog, range(3)) == [1]
    assert len(caplog.messages) == 5


def test_b65_a_slab_that_is_cut_off_is_dropped(
    folder: Path, catalog: Catalog, caplog: pytest.LogCaptureFixture
) -> None:
    path, _ = write_slab(folder, [1]), write_slab(folder, [2])
    catalog.look()
    os.truncate(path, 9000)
    for _ in range(2):
        catalog.look()
    assert found(catalog, range(3)) == [2]
    assert len(caplog.messages) == 1
    assert "it has 9000 bytes" in caplog.text


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO, errno.EACCES])
def test_a_slab_that_cannot_be_opened_for_now_is_found_later(
    folder: Path,
    catalog: Catalog,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: int,
) -> None:
    write_slab(folder, [1])

    def refuse(*args: Any) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        for _ in range(3):
            catalog.look()
    assert len(catalog) == 0
    assert len(caplog.messages) == 1, "once, and not at every look"
    catalog.look()
    assert found(catalog, [1]) == [1]


def test_an_index_that_cannot_be_read_for_now_is_read_later(
    folder: Path,
    catalog: Catalog,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write_slab(folder, [1])
    write_slab(folder, [2])
    real = slab_module.Slab._parse

    def refuse(slab: slab_module.Slab, *args: Any, **named: Any) -> Any:
        if slab.path.name == min(path.name for path in folder.iterdir()):
            raise OSError(errno.EIO, "Input/output error")
        return real(slab, *args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(slab_module.Slab, "_parse", refuse)
        for _ in range(3):
            catalog.look()
    assert found(catalog, range(3)) == [2]
    assert len(caplog.messages) == 1
    catalog.look()
    assert found(catalog, range(3)) == [1, 2]


def test_nothing_is_kept_about_files_that_are_gone(folder: Path, catalog: Catalog) -> None:
    caught = logging.getLogger(catalog_module.__name__)
    caught.disabled = True
    try:
        for round_ in range(5):
            broken = folder / f"{round_}.slab"
            broken.write_bytes(b"")
            (folder / f"x{round_}.slab").mkdir()
            path = write_slab(folder, [1, 2], 4)
            damage(path, 0)
            catalog.look()
            lose(catalog, 1)
            for one in (broken, path):
                one.unlink()
            (folder / f"x{round_}.slab").rmdir()
    finally:
        caught.disabled = False
    catalog.look()
    kept = (catalog._ignored, catalog._complained, catalog._lost, catalog._slabs, catalog._hashes)
    assert not any(kept), kept


# ---------------------------------------------------------------- damage


def test_b62_a_damaged_record_is_forgotten_and_the_others_are_not(
    folder: Path, catalog: Catalog
) -> None:
    writer = SlabWriter.create(folder, header())
    writer.add([record(1), record(2)])
    damage(writer.path, 0)
    catalog.look()
    lose(catalog, 1)
    others: list[Path] = []
    for number in range(3, 9):  # slabs come and go, and its own one grows
        others.append(write_slab(folder, [number]))
        if number < 5:
            writer.add([record(20 + number)])
        catalog.look()
        assert block_hash(1) not in catalog
        assert found(catalog, [1, 2, number, 23]) == [2, number, 23]
        if number % 2:
            others.pop(0).unlink()
    writer.close()
    catalog.look()
    assert block_hash(1) not in catalog


def test_damage_is_remembered_when_a_slab_could_not_be_asked_for_a_while(
    folder: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_slab(folder, [1, 2], 4)
    damage(path, 0)
    catalog.look()
    lose(catalog, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "_is_there", staticmethod(lambda slab: False))
        catalog.look()
    catalog.look()
    assert found(catalog, [1, 2]) == [2]


def test_what_is_stored_again_is_found_again(folder: Path, catalog: Catalog) -> None:
    path = write_slab(folder, [1], 4)
    damage(path, 0)
    catalog.look()
    lose(catalog, 1)
    write_slab(folder, [1])
    catalog.look()
    assert found(catalog, [1]) == [1]


def test_forgetting_a_place_of_long_ago_harms_no_newer_one(folder: Path, catalog: Catalog) -> None:
    """B65: cleanup must not remove a newer replacement."""
    path = write_slab(folder, [1])
    catalog.look()
    old = place_of(catalog, 1)
    path.unlink()
    write_slab(folder, [1])
    catalog.look()
    catalog.forget(block_hash(1), old)
    catalog.forget(block_hash(9), old)
    assert found(catalog, [1]) == [1]


# ---------------------------------------------------------------- blocks in two slabs


@pytest.mark.parametrize("gone", [0, 1])
def test_a_block_in_two_slabs_survives_the_loss_of_one(
    folder: Path, catalog: Catalog, gone: int
) -> None:
    paths = [write_slab(folder, [1, 2]), write_slab(folder, [2, 3])]
    catalog.look()
    assert len(catalog) == 3
    paths[gone].unlink()
    catalog.look()
    assert found(catalog, range(5)) == ([2, 3], [1, 2])[gone]
    paths[1 - gone].unlink()
    catalog.look()
    assert len(catalog) == 0


def test_a_block_in_two_places_survives_the_damage_of_one(folder: Path, catalog: Catalog) -> None:
    """Also if both are in one slab."""
    paths = [write_slab(folder, [1, 2, 2], 4), write_slab(folder, [2], 4)]
    damage(paths[0], 1)
    damage(paths[1], 0)
    catalog.look()
    while True:
        place = place_of(catalog, 2)
        try:
            read(*place)
            break
        except DamagedSlabError:
            catalog.forget(block_hash(2), place)
    assert (place.slab.path, place.entry.record) == (paths[0], 2)
    paths[0].unlink()
    catalog.look()
    assert place_of(catalog, 2).slab.path == paths[1]
    lose(catalog, 2)
    assert len(catalog) == 0


@settings(max_examples=40, deadline=None)
@given(
    actions=st.lists(
        st.tuples(
            st.sampled_from(["write", "remove", "damage", "look"]),
            st.integers(0, 5),
            st.integers(1, 4),
        ),
        max_size=14,
    )
)
def test_after_a_look_the_catalog_is_what_lies_there(
    actions: list[tuple[str, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Slabs overlap in every way; what is damaged was said to be."""
    folder = tmp_path_factory.mktemp("slabs")
    there: dict[Path, list[int]] = {}
    with contextlib.closing(Catalog(folder, SPACE)) as catalog:
        for action, first, count in actions:
            if action == "write":
                numbers = list(range(first, first + count))
                there[write_slab(folder, numbers, 4)] = numbers
            elif action == "look":
                catalog.look()
            elif there:
                path = list(there)[first % len(there)]
                if action == "remove":
                    path.unlink()
                    del there[path]
                elif len(there[path]):
                    damage(path, 0)
                    catalog.look()
                    for number in range(10):
                        _forget_if_damaged(catalog, number)
                    there[path] = _without_first(path, there[path])
        catalog.look()
        for number in range(10):
            _forget_if_damaged(catalog, number)
        assert set(found(catalog, range(10))) == {n for numbers in there.values() for n in numbers}
        assert len(catalog) == len(found(catalog, range(10)))


def _without_first(path: Path, numbers: list[int]) -> list[int]:
    """The first record was damaged, or mended by a second flip: then it was forgotten before."""
    with slab_module.Slab.open(path) as slab:
        first = slab.look()[0]
    number = int.from_bytes(first.block_hash, "big")
    return [one for one in numbers if one != number]


def _forget_if_damaged(catalog: Catalog, number: int) -> None:
    while (place := catalog.find(block_hash(number))) is not None:
        try:
            read(*place)
        except DamagedSlabError:
            catalog.forget(block_hash(number), place)
        else:
            return


# ---------------------------------------------------------------- use


def test_used_slabs_are_touched_at_the_next_look(folder: Path, catalog: Catalog) -> None:
    used, other = write_slab(folder, [1]), write_slab(folder, [2])
    catalog.look()
    for path in (used, other):
        os.utime(path, (1, 1))
    catalog.use_slabs([place_of(catalog, 1).slab])
    assert used.stat().st_mtime == 1, "questions touch no file"
    catalog.look()
    assert used.stat().st_mtime > 1
    assert other.stat().st_mtime == 1


def test_used_slabs_are_touched_though_no_look_comes_any_more(folder: Path) -> None:
    """A chat of one prompt has ended before it is time for one."""
    catalog, used = Catalog(folder, SPACE), write_slab(folder, [1])
    catalog.look()
    os.utime(used, (1, 1))
    catalog.use_slabs([place_of(catalog, 1).slab])
    catalog.close()
    assert used.stat().st_mtime > 1


def test_use_waits_for_nobody(folder: Path, catalog: Catalog) -> None:
    """It is for the event loop too, and what is added may be much."""
    write_slab(folder, [1])
    catalog.look()
    slab = place_of(catalog, 1).slab
    with catalog._lock:
        thread = threading.Thread(target=lambda: catalog.use_slabs([slab]))
        thread.start()
        thread.join(20.0)
        assert not thread.is_alive()
    assert catalog._used


def test_what_is_used_of_a_slab_that_has_gone_is_not_written_down(
    folder: Path, catalog: Catalog
) -> None:
    """Who uses it found it before."""
    path = write_slab(folder, [1])
    catalog.look()
    slab = place_of(catalog, 1).slab
    path.unlink()
    catalog.look()
    catalog.use_slabs([slab])
    assert not catalog._used
    catalog.look()


def test_after_the_end_nothing_is_found(folder: Path) -> None:
    catalog = Catalog(folder, SPACE)
    write_slab(folder, [1])
    catalog.look()
    place = place_of(catalog, 1)
    catalog.use_slabs([place.slab])
    catalog.close()
    catalog.close()
    assert len(catalog) == 0
    with pytest.raises(DamagedSlabError, match="is closed"):
        read(*place)


# ---------------------------------------------------------------- what it costs

MANY = 100_000


SMALL = dataclasses.replace(SPACE, num_layers=1, page_bytes=1)
"""Records of one byte: what counts is the index."""


def many_records(folder: Path, num_slabs: int) -> None:
    each = MANY // num_slabs
    for first in range(0, MANY, each):
        writer = SlabWriter.create(folder, SlabHeader(SMALL.facts, SlabShape(1, each)))
        entries = [Entry(n, block_hash(first + n), NO_PARENT, 0, 0) for n in range(each)]
        with writer.path.open("r+b") as file:
            file.seek(HEADER_BYTES)
            file.write(pack_entries(entries))
        writer.close()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """System calls of looks, and entries they parse."""
    counted: Counter[str] = Counter()
    real_parse = parse_entries

    def count(module: Any, name: str) -> None:
        real = getattr(module, name)

        def call(*args: Any, **named: Any) -> Any:
            counted[name] += 1
            return real(*args, **named)

        monkeypatch.setattr(module, name, call)

    def parse(data: bytes, first: int, **how: bool) -> Any:
        counted["entries"] += len(data) // ENTRY_BYTES
        return real_parse(data, first, **how)

    for name in ("open", "preadv", "fstat", "scandir", "listdir", "utime", "stat", "close"):
        count(os, name)
    count(fcntl, "flock")
    monkeypatch.setattr(slab_module, "parse_entries", parse)
    return counted


def test_b69_a_look_at_100000_records_reads_each_entry_once(
    folder: Path, calls: Counter[str]
) -> None:
    many_records(folder, num_slabs=20)
    catalog = Catalog(folder, SMALL)
    calls.clear()
    catalog.look()
    assert len(catalog) == MANY
    assert calls["entries"] == MANY
    assert calls["open"] == 20
    assert calls["preadv"] <= 20 * (1 + -(-MANY // 20 // 512))
    assert sum(calls.values()) - MANY < 400
    calls.clear()
    catalog.look()
    assert calls["entries"] == calls["preadv"] == calls["open"] == calls["flock"] == 0
    assert sum(calls.values()) <= 2 * 20 + 1, "whether they are still there"
    calls.clear()
    hashes = [block_hash(number) for number in range(2000)]
    assert catalog.num_stored(hashes) == 2000
    assert all(one in catalog and catalog.find(one) for one in hashes)
    catalog.use_slabs({place_of(catalog, number).slab for number in range(2000)})
    assert not calls
    catalog.close()
