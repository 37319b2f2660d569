"""What a directory of slabs holds: chains, counts, flaws, and what may be removed."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.connectors.kv_folders.identity import KVIdentity
from interlace.connectors.slab_store import files
from interlace.connectors.slab_store import slab as slab_module
from interlace.connectors.slab_store.directory import (
    MARKER,
    Limits,
    NoRoomError,
    SlabDirectory,
    SlabFile,
)
from interlace.connectors.slab_store.inspection import survey as survey_module
from interlace.connectors.slab_store.inspection.chains import Chains, list_prefixes
from interlace.connectors.slab_store.inspection.limits import collect, plan_collection
from interlace.connectors.slab_store.inspection.removal import (
    remove,
    select_all,
    select_model,
    select_older,
    select_prefix,
)
from interlace.connectors.slab_store.inspection.reports import FileReport, Selection
from interlace.connectors.slab_store.inspection.statistics import statistics
from interlace.connectors.slab_store.inspection.survey import (
    BLOCK,
    Look,
    SlabContents,
    Survey,
    open_store,
    survey,
)
from interlace.connectors.slab_store.inspection.verification import verify
from interlace.connectors.slab_store.layout import (
    ENTRY_BYTES,
    MAGIC,
    NO_PARENT,
    VERSION,
    Entry,
    SlabHeader,
    SlabShape,
)
from interlace.connectors.slab_store.slab_writer import NewRecord, SlabWriter
from interlace.connectors.slab_store.space import Space
from interlace.engine.errors import ConfigError

SRC = str(Path(__file__).resolve().parents[2] / "src")
SECOND = 10**9
NOW_NS = 1_700_000_000 * SECOND
SPACE = Space(
    identity=KVIdentity(model="ab" * 32, dtype="float32", block_size=4),
    model_name="toy",
    num_layers=2,
    page_bytes=700,
)
SHAPE = SlabShape(SPACE.record_bytes, 4)
OTHER = dataclasses.replace(
    SPACE, identity=KVIdentity(model="cd" * 32, dtype="float32", block_size=4), model_name="big"
)


def block_hash(number: int) -> bytes:
    """Of a block that is not number 0, which stands for none."""
    return bytes([number]) * 32


class Kit:
    """A store, and ways to fill it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        SlabDirectory(root, Limits()).prepare()

    def write(
        self,
        name: str,
        blocks: dict[int, int],
        *,
        space: Space = SPACE,
        saved_s: int = 100,
        used_s: int = 50,
    ) -> SlabWriter:
        """A slab that is still written to, of blocks and their parents; times are ago."""
        folder = self.root / space.folder_name
        folder.mkdir(exist_ok=True)
        header = SlabHeader(space.facts, SHAPE)
        writer = SlabWriter.create(folder, header, lambda: NOW_NS - saved_s * SECOND)
        path = writer.path.rename(folder / f"{name}.slab")
        records = [
            NewRecord(
                block_hash(number),
                block_hash(parent) if parent else None,
                np.full(SPACE.record_bytes, number, np.uint8),
            )
            for number, parent in blocks.items()
        ]
        if records:
            writer.add(records)
        age(path, used_s)
        return writer

    def seal(self, name: str, blocks: dict[int, int], *, space: Space = SPACE, **ages: int) -> Path:
        """A slab that nobody writes to."""
        self.write(name, blocks, space=space, **ages).close()
        return self.root / space.folder_name / f"{name}.slab"

    @property
    def directory(self) -> SlabDirectory:
        return open_store(self.root, now_ns=lambda: NOW_NS)

    def survey(self) -> Survey:
        return survey(self.directory, Silent())

    def names(self) -> list[str]:
        return sorted(path.name for path in self.root.glob("*/*"))


FULL = {1: 0, 2: 1, 3: 2, 4: 3}
"""Blocks that fill a slab."""


def held(num_records: int) -> int:
    """Bytes on the disk of a slab with so many records."""
    return SHAPE.data_at + num_records * SHAPE.pitch


def age(path: Path, used_s: int) -> None:
    used_ns = NOW_NS - used_s * SECOND
    os.utime(path, ns=(used_ns, used_ns))


def flip(path: Path, offset: int) -> None:
    """One bit."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


class Silent:
    """Progress that adds up what it is told, and may do something meanwhile."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.total: float | None = None
        self.done = 0.0
        self._meanwhile = meanwhile

    @contextlib.contextmanager
    def task(self, description: str, total: float | None) -> Iterator[Callable[[float], None]]:
        self.total = total
        yield self._advance

    def _advance(self, amount: float) -> None:
        self.done += amount
        self._meanwhile()


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return Kit(tmp_path / "kv")


# -------------------------------------------------------------------- what is a store


def test_what_is_no_store_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none cannot be listed"):
        open_store(tmp_path / "none")
    with pytest.raises(ConfigError, match=f"it has no {MARKER}"):
        open_store(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Not a directory"):
        open_store(tmp_path / "file")


@pytest.mark.parametrize("marker", ["{", "[]", json.dumps({"version": VERSION + 1})])
def test_another_version_is_refused(kit: Kit, marker: str) -> None:
    (kit.root / MARKER).write_text(marker)
    with pytest.raises(ConfigError, match="give the store another directory"):
        open_store(kit.root)


def test_looks_leave_no_traces(kit: Kit) -> None:
    kit.seal("a", {1: 0, 2: 1})
    before = [(path, path.lstat().st_mtime_ns) for path in sorted(kit.root.rglob("*"))]
    os.utime(kit.root, ns=(1, 1))
    found = kit.survey()
    list_prefixes(found)
    statistics(found)
    verify(kit.directory, Silent())
    plan_collection(open_store(kit.root, Limits(capacity_bytes=0), lambda: NOW_NS))
    assert kit.root.stat().st_mtime_ns == 1
    assert [(path, path.lstat().st_mtime_ns) for path in sorted(kit.root.rglob("*"))] == before


# -------------------------------------------------------------------- chains


def test_a_chain_is_followed_over_slabs(kit: Kit) -> None:
    kit.seal("a", {1: 0, 2: 1}, saved_s=300, used_s=200)
    kit.seal("b", {3: 2}, saved_s=100, used_s=50)
    (prefix,) = list_prefixes(kit.survey()).prefixes
    assert prefix.first_hash == block_hash(1).hex()
    assert (prefix.num_blocks, prefix.num_tokens, prefix.num_leaves) == (3, 12, 1)
    assert prefix.num_bytes == 3 * SPACE.record_bytes
    assert prefix.saved_ns == NOW_NS - 300 * SECOND
    assert prefix.used_ns == NOW_NS - 50 * SECOND
    assert (prefix.model_names, prefix.model, prefix.dtype) == (("toy",), "ab" * 32, "float32")


def test_chains_that_branch_are_one_prefix(kit: Kit) -> None:
    kit.seal("a", {1: 0, 2: 1, 3: 2, 4: 2})
    kit.seal("b", {5: 1})
    (prefix,) = list_prefixes(kit.survey()).prefixes
    assert (prefix.num_blocks, prefix.num_tokens, prefix.num_leaves) == (5, 12, 3)


def test_the_most_recently_used_prefix_is_first(kit: Kit) -> None:
    kit.seal("a", {1: 0}, used_s=300)
    kit.seal("b", {2: 0}, used_s=100)
    kit.seal("c", {3: 0}, used_s=200, space=OTHER)
    hashes = [prefix.first_hash[:2] for prefix in list_prefixes(kit.survey()).prefixes]
    assert hashes == ["02", "03", "01"]


def test_blocks_whose_beginning_is_gone_are_counted_apart(kit: Kit) -> None:
    kit.seal("a", {1: 0, 4: 3, 5: 4})
    listing = list_prefixes(kit.survey())
    assert [prefix.num_blocks for prefix in listing.prefixes] == [1]
    assert listing.num_lost_blocks == 2


def test_a_block_that_is_there_twice_counts_once(kit: Kit) -> None:
    kit.seal("a", {1: 0, 2: 1}, saved_s=30, used_s=20)
    kit.seal("b", {1: 0}, saved_s=90, used_s=80)
    (prefix,) = list_prefixes(kit.survey()).prefixes
    assert prefix.num_blocks == 2
    assert prefix.saved_ns == NOW_NS - 90 * SECOND
    assert prefix.used_ns == NOW_NS - 20 * SECOND


def test_equal_hashes_of_other_models_are_other_prefixes(kit: Kit) -> None:
    kit.seal("a", {1: 0})
    kit.seal("b", {1: 0, 2: 1}, space=OTHER)
    found = list_prefixes(kit.survey()).prefixes
    assert sorted((one.model_names, one.num_blocks) for one in found) == [
        (("big",), 2),
        (("toy",), 1),
    ]


def test_a_model_may_go_by_several_names(kit: Kit) -> None:
    kit.seal("a", {1: 0})
    kit.seal("b", {2: 1}, space=dataclasses.replace(SPACE, model_name="./toy"))
    (prefix,) = list_prefixes(kit.survey()).prefixes
    assert prefix.model_names == ("./toy", "toy")


def contents(entries: Sequence[Entry]) -> SlabContents:
    file = SlabFile(Path("/kv/space/a.slab"), SHAPE.file_bytes, NOW_NS, is_new=False)
    return SlabContents.of(file, Look(SPACE, SHAPE, list(entries), is_written=False))


@given(st.dictionaries(st.integers(1, 12), st.integers(0, 12), max_size=12))
def test_no_parents_whatever_they_are_lead_astray(parents: dict[int, int]) -> None:
    """Circles and blocks of their own parents included."""
    slab = contents(
        [
            Entry(place, block_hash(one), block_hash(parent) if parent else NO_PARENT, 0, NOW_NS)
            for place, (one, parent) in enumerate(parents.items())
        ]
    )
    empty = contents([])
    chains = Chains([empty, slab, empty])
    lines = {one: line for one in parents if (line := line_of(one, parents))}
    assert {block_hash(line[-1]) for line in lines.values()} == set(
        map(chains.hash_of, chains.first)
    )
    assert chains.num_lost == len(parents) - len(lines)
    found = list_prefixes(survey_of([empty, slab, empty]))
    for prefix in found.prefixes:
        mine = [line for line in lines.values() if block_hash(line[-1]).hex() == prefix.first_hash]
        last = {line[0] for line in mine} - {one for line in mine for one in line[1:]}
        assert prefix.num_blocks == len(mine)
        assert prefix.num_tokens == 4 * max(map(len, mine))
        assert prefix.num_leaves == len(last)
    assert sum(prefix.num_blocks for prefix in found.prefixes) == len(lines)
    for most in range(4):
        assert list_prefixes(survey_of([slab]), most).prefixes == found.prefixes[:most]
    asked = [one for one in chains.first.tolist() if chains.hash_of(one)[0] % 2]
    held = sum(line[-1] % 2 for line in lines.values())
    assert chains.num_held(asked) == [0, held, 0]


def survey_of(slabs: Sequence[SlabContents]) -> Survey:
    return Survey(folders=(), hits={}, slabs=tuple(slabs), left_out=(), being_made=(), leftovers=())


def line_of(number: int, parents: dict[int, int]) -> list[int]:
    """A block, its parent, and so on; nothing if that leads nowhere."""
    line: list[int] = []
    while number in parents and number not in line:
        line.append(number)
        number = parents[number]
    return line if number == 0 else []


def test_hashes_may_end_in_zeros() -> None:
    hashes = [bytes([1]) * length + bytes(32 - length) for length in (1, 2, 31, 32)]
    parents = [NO_PARENT, *hashes[:-1]]
    entries = [
        Entry(n, *pair, 0, NOW_NS) for n, pair in enumerate(zip(hashes, parents, strict=True))
    ]
    (prefix,) = list_prefixes(survey_of([contents(entries)])).prefixes
    assert (prefix.first_hash, prefix.num_blocks) == (hashes[0].hex(), 4)


def test_a_long_chain_is_followed_to_its_end() -> None:
    """Long prompts, many of them: no recursion, and no list of objects."""
    count = 100_000
    hashes = [number.to_bytes(32, "big") for number in range(count + 1)]
    rows = [(hashes[n], hashes[n - 1], NOW_NS) for n in range(1, count + 1)]
    random.Random(0).shuffle(rows)
    slab = dataclasses.replace(contents([]), blocks=np.array(rows, BLOCK))
    tracemalloc.start()
    listing = list_prefixes(survey_of([slab]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [prefix.num_tokens for prefix in listing.prefixes] == [4 * count]
    assert peak < 250 * count


# -------------------------------------------------------------------- counts


def test_counts_of_spaces_and_in_all(kit: Kit) -> None:
    kit.seal("a", {1: 0, 2: 1}, saved_s=300)
    writer = kit.write("b", {3: 2}, saved_s=100)
    kit.seal("c", {1: 0}, space=OTHER, saved_s=200)
    store = statistics(kit.survey())
    writer.close()
    toy, big = sorted(store.spaces, key=lambda one: one.model)
    assert (toy.folder, toy.model, toy.model_names) == (SPACE.folder_name, "ab" * 32, ("toy",))
    assert (toy.num_slabs, toy.num_records, toy.num_written, toy.num_free_records) == (2, 3, 1, 3)
    assert toy.file_bytes == held(2) + held(1)
    assert toy.reserved_bytes == SHAPE.file_bytes - held(1), "its writer may still take it"
    assert toy.record_bytes == 3 * SPACE.record_bytes
    assert (toy.oldest_ns, toy.newest_ns) == (NOW_NS - 300 * SECOND, NOW_NS - 100 * SECOND)
    assert (big.num_slabs, big.num_records, big.num_written, big.num_free_records) == (1, 1, 0, 0)
    total = store.total
    assert (total.folder, total.model, total.model_names) == ("", "", ("big", "toy"))
    assert (total.num_slabs, total.num_records) == (3, 4)
    assert (total.oldest_ns, total.newest_ns) == (NOW_NS - 300 * SECOND, NOW_NS - 100 * SECOND)


def test_an_empty_store_counts_nothing(kit: Kit) -> None:
    store = statistics(kit.survey())
    assert store.spaces == ()
    assert (store.total.num_slabs, store.total.oldest_ns) == (0, None)
    assert list_prefixes(kit.survey()).prefixes == ()
    assert verify(kit.directory, Silent()).flawed == ()


def test_slabs_being_made_and_leftovers(kit: Kit) -> None:
    folder = kit.seal("a", {1: 0}).parent
    for name, used_s in (("fresh", 10), ("old", 100), ("slow", 100)):
        (folder / f"{name}.slab.new").write_bytes(bytes(100))
        age(folder / f"{name}.slab.new", used_s)
    with (folder / "slow.slab.new").open("rb") as slow:
        fcntl.flock(slow, fcntl.LOCK_EX)
        found = kit.survey()
    assert [file.path.name for file in found.leftovers] == ["old.slab.new"]
    assert sorted(file.path.name for file in found.being_made) == [
        "fresh.slab.new",
        "slow.slab.new",
    ]
    total = statistics(found).total
    assert (total.num_leftovers, total.leftover_bytes, total.num_being_made) == (1, 100, 2)
    assert (total.file_bytes, total.reserved_bytes) == (held(1) + 300, 0)


def left_out(kit: Kit) -> dict[str, tuple[str, bool]]:
    """Name -> (why, whether it is damaged)."""
    return {file.path.name: (one.reason, one.is_damaged) for file, one in kit.survey().left_out}


def test_what_engines_leave_out_is_told_with_its_reason(kit: Kit) -> None:
    kit.seal("good", {1: 0})
    with kit.seal("short", {2: 0}).open("r+b") as file:
        file.truncate(9000)
    flip(kit.seal("header", {3: 0}), 40)
    kit.seal("none", {4: 0}).write_bytes(b"")
    wrong = kit.seal("wrong", {5: 0}, space=OTHER)
    wrong.rename(kit.root / SPACE.folder_name / "wrong.slab")
    newer = kit.seal("newer", {6: 0})
    data = bytearray(newer.read_bytes())
    data[len(MAGIC) : len(MAGIC) + 4] = (VERSION + 1).to_bytes(4, "little")
    newer.write_bytes(data)
    (newer.parent / "link.slab").symlink_to("good.slab")
    os.mkfifo(newer.parent / "pipe.slab")
    (newer.parent / "notes.txt").write_text("")
    found = left_out(kit)
    assert found == {
        "short.slab": (f"it has 9000 bytes, and not {SHAPE.file_bytes}", True),
        "header.slab": ("its header has another digest than it says", True),
        "none.slab": ("it has no header of a slab", True),
        "wrong.slab": ("its header says that it holds other KV than its folder", False),
        "newer.slab": (f"it has version {VERSION + 1}, and this Interlace reads {VERSION}", False),
    }
    assert statistics(kit.survey()).total.num_slabs == 1


@pytest.mark.parametrize(
    "change",
    [
        {"model_name": 3},
        {"block_size": "4"},
        {"rank": -1},
        {"model": None},
        {"salt": "more than is known"},
    ],
)
def test_a_header_of_other_facts_is_left_out(kit: Kit, change: dict[str, object]) -> None:
    folder = kit.root / SPACE.folder_name
    folder.mkdir()
    header = SlabHeader({**SPACE.facts, **change}, SHAPE)
    SlabWriter.create(folder, header).close()
    (reason,) = left_out(kit).values()
    assert reason == ("its header does not say what KV it holds", False)


def test_records_of_another_size_are_left_out(kit: Kit) -> None:
    folder = kit.root / SPACE.folder_name
    folder.mkdir()
    SlabWriter.create(folder, SlabHeader(SPACE.facts, SlabShape(1401, 4))).close()
    assert list(left_out(kit).values()) == [("its records have 1401 bytes", False)]


# -------------------------------------------------------------------- verify


def test_a_sound_store_is_read_whole(kit: Kit) -> None:
    kit.seal("a", {1: 0, 2: 1})
    writer = kit.write("b", {3: 2})
    progress = Silent()
    found = verify(kit.directory, progress)
    writer.close()
    assert (found.num_slabs, found.num_records, found.flawed) == (2, 3, ())
    assert found.num_bytes == 3 * SPACE.record_bytes
    assert progress.done == progress.total == held(2) + held(1)


@given(record=st.integers(0, 2), offset=st.integers(0, SPACE.record_bytes - 1))
def test_each_bit_of_a_record_counts(
    tmp_path_factory: pytest.TempPathFactory, record: int, offset: int
) -> None:
    kit = Kit(tmp_path_factory.mktemp("kv") / "kv")
    path = kit.seal("a", {1: 0, 2: 1, 3: 2})
    flip(path, SHAPE.record_at(record) + offset)
    (one,) = verify(kit.directory, Silent()).flawed
    assert [flaw.record for flaw in one.flaws] == [record]
    assert one.flaws[0].reason == "it has another checksum than its entry"
    assert (one.num_good, one.is_damaged) == (2, True)


def test_a_damaged_entry_is_a_flaw_of_a_sealed_slab(kit: Kit) -> None:
    flip(kit.seal("a", {1: 0, 2: 1, 3: 2}), SHAPE.entry_at(1) + ENTRY_BYTES - 1)
    found = verify(kit.directory, Silent())
    (one,) = found.flawed
    assert [(flaw.record, flaw.reason) for flaw in one.flaws] == [
        (1, "its entry is damaged, and nobody finds it")
    ]
    assert (found.num_records, found.num_bad_records, one.num_good) == (3, 1, 2)


Reader = Callable[[int, memoryview, int], int]


def reading(patch: pytest.MonkeyPatch, reader: Callable[[Reader], Reader]) -> None:
    """All reads of slabs go through this."""
    for module in (slab_module, survey_module):
        patch.setattr(module, "read_at", reader(files.read_at))


def failing(offset: int, times: int, code: int = errno.EIO) -> Callable[[Reader], Reader]:
    """The first reads of what lies there fail."""
    left = [times]

    def with_real(real: Reader) -> Reader:
        def read_at(fd: int, buffer: memoryview, at: int) -> int:
            if at <= offset < at + len(buffer) and left[0]:
                left[0] -= 1
                raise OSError(code, os.strerror(code))
            return real(fd, buffer, at)

        return read_at

    return with_real


def flipping(offset: int, times: int) -> Callable[[Reader], Reader]:
    """The first reads of what lies there bring something else."""
    left = [times]

    def with_real(real: Reader) -> Reader:
        def read_at(fd: int, buffer: memoryview, at: int) -> int:
            length = real(fd, buffer, at)
            if at <= offset < at + len(buffer) and left[0]:
                left[0] -= 1
                buffer[offset - at] ^= 1
            return length

        return read_at

    return with_real


PLACES = {
    "header": 40,
    "entry": SHAPE.entry_at(1) + 20,
    "record": SHAPE.record_at(1) + 20,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fault", [failing, flipping])
def test_what_goes_wrong_once_is_no_flaw(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., Any], place: str
) -> None:
    kit.seal("a", {1: 0, 2: 1, 3: 2})
    reading(monkeypatch, fault(PLACES[place], 1))
    found = verify(kit.directory, Silent())
    assert found.flawed == ()
    assert (found.num_slabs, found.num_records) == (1, 3)


@pytest.mark.parametrize("place", PLACES)
def test_what_is_wrong_however_often_it_is_read_is_damage(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    kit.seal("a", {1: 0, 2: 1, 3: 2})
    reading(monkeypatch, flipping(PLACES[place], 10))
    (one,) = verify(kit.directory, Silent()).flawed
    assert [flaw.is_unread for flaw in one.flaws] == [False]
    assert one.is_damaged


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EMFILE, errno.ETIMEDOUT])
def test_what_cannot_be_read_is_told_and_is_no_damage(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, place: str, code: int
) -> None:
    kit.seal("a", {1: 0, 2: 1, 3: 2})
    reading(monkeypatch, failing(PLACES[place], 10, code))
    found = verify(kit.directory, Silent())
    (one,) = found.flawed
    of_record = place == "record"
    assert [(flaw.record, flaw.is_unread) for flaw in one.flaws] == [
        (1 if of_record else None, True)
    ]
    assert f"it cannot be read: {os.strerror(code)}" in one.flaws[0].reason
    assert not one.is_damaged
    assert (found.num_bad_records, found.num_bad_files) == (0, 0)
    assert (found.num_unread_records, found.num_unread_files) == (of_record, not of_record)
    assert one.num_good == found.num_records == (2 if of_record else 0)


def test_damage_beside_what_cannot_be_read_is_damage(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(kit.seal("a", {1: 0, 2: 1, 3: 2}), SHAPE.record_at(0))
    reading(monkeypatch, failing(SHAPE.record_at(1), 10))
    (one,) = verify(kit.directory, Silent()).flawed
    assert [(flaw.record, flaw.is_unread) for flaw in one.flaws] == [(0, False), (1, True)]
    assert (one.is_damaged, one.num_good) == (True, 1)


def test_a_slab_that_may_not_be_opened_is_no_damage(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kit.seal("a", {1: 0})
    real = os.open

    def refuse(where: Any, *rest: Any) -> int:
        if where == path:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(where, *rest)

    monkeypatch.setattr(os, "open", refuse)
    (one,) = verify(kit.directory, Silent()).flawed
    assert [(flaw.record, flaw.is_unread) for flaw in one.flaws] == [(None, True)]
    assert not one.is_damaged


def test_an_entry_under_way_is_no_flaw(kit: Kit) -> None:
    writer = kit.write("a", {1: 0})
    with (kit.root / SPACE.folder_name / "a.slab").open("r+b") as file:
        file.seek(SHAPE.entry_at(1))
        file.write(b"KVREC")
    assert verify(kit.directory, Silent()).flawed == ()
    writer.close()
    assert verify(kit.directory, Silent()).num_bad_records == 1


def test_whole_files_are_flawed_too(kit: Kit) -> None:
    kit.seal("a", {1: 0}).write_bytes(b"x" * 500)
    progress = Silent()
    found = verify(kit.directory, progress)
    (one,) = found.flawed
    assert [flaw.record for flaw in one.flaws] == [None]
    assert (found.num_bad_files, found.num_bad_records, found.num_slabs) == (1, 0, 0)
    assert progress.done == progress.total == 500


def test_slabs_that_go_while_they_are_read_are_passed_over(kit: Kit) -> None:
    paths = [kit.seal(name, {1: 0, 2: 1}) for name in "abc"]

    def remove_all() -> None:
        for path in paths:
            path.unlink(missing_ok=True)

    found = verify(kit.directory, Silent(remove_all))
    assert found.flawed == ()
    assert found.num_slabs == 1, "what is open stays readable"
    paths = [kit.seal(name, {1: 0}) for name in "abc"]
    looked = survey(kit.directory, Silent(remove_all))
    assert (looked.slabs, looked.left_out) == ((), ())


def test_a_slab_cut_off_while_it_is_read_is_flawed(kit: Kit) -> None:
    path = kit.seal("a", {1: 0, 2: 1, 3: 2})
    found = verify(kit.directory, Silent(lambda: os.truncate(path, SHAPE.record_at(1))))
    assert [flaw.record for flaw in found.flawed[0].flaws] == [1, 2]
    assert found.flawed[0].flaws[0].reason == "it is cut off"


# -------------------------------------------------------------------- removal


def reports(kit: Kit, select: Callable[[Survey], Selection]) -> list[str]:
    """Names of what is selected."""
    return sorted(file.path.name.removesuffix(".slab") for file in select(kit.survey()).files)


def test_selections(kit: Kit) -> None:
    kit.seal("a", {1: 0, 2: 1}, used_s=300)
    kit.seal("b", {3: 2, 20: 0}, used_s=200)
    kit.seal("c", {21: 20}, used_s=100)
    other = kit.seal("d", {1: 0}, used_s=50, space=OTHER)
    (other.parent / "old.slab.new").write_bytes(b"")
    age(other.parent / "old.slab.new", 100)
    assert reports(kit, select_all) == ["a", "b", "c", "d", "old.slab.new"]
    assert reports(kit, lambda found: select_older(found, NOW_NS - 200 * SECOND)) == ["a"]
    assert reports(kit, lambda found: select_older(found, NOW_NS - 199 * SECOND)) == ["a", "b"]
    assert reports(kit, lambda found: select_model(found, "big")) == ["d"]
    assert reports(kit, lambda found: select_model(found, "ABABABAB")) == ["a", "b", "c"]
    assert reports(kit, lambda found: select_model(found, "ab")) == []
    assert reports(kit, lambda found: select_model(found, "")) == []
    assert reports(kit, lambda found: select_prefix(found, "14")) == ["b", "c"]
    assert reports(kit, lambda found: select_prefix(found, "01")) == ["a", "b", "d"]
    assert reports(kit, lambda found: select_prefix(found, "02")) == [], "it begins no prompt"


def test_a_selection_tells_what_else_goes(kit: Kit) -> None:
    kit.seal("a", {1: 0, 2: 1, 20: 0, 21: 20})
    found = select_prefix(kit.survey(), "01")
    assert (found.num_records, found.num_other_records) == (4, 2)
    assert found.num_bytes == SHAPE.file_bytes, "it is full"
    assert select_all(kit.survey()).num_other_records == 0


def test_a_name_goes_before_a_digest(kit: Kit) -> None:
    kit.seal("a", {1: 0}, space=dataclasses.replace(OTHER, model_name="abababab"))
    kit.seal("b", {1: 0})
    assert reports(kit, lambda found: select_model(found, "abababab")) == ["a"]


def test_removal_spares_what_is_written_to(kit: Kit) -> None:
    kit.seal("a", {1: 0})
    kit.seal("gone", {1: 0})
    writer = kit.write("b", {2: 0})
    files = list(map(FileReport.of, select_all(kit.survey()).files))
    (kit.root / SPACE.folder_name / "gone.slab").unlink()
    done = remove(kit.directory, files)
    writer.close()
    assert {file.name for file in done.removed} == {
        f"{SPACE.folder_name}/a.slab",
        f"{SPACE.folder_name}/gone.slab",
    }
    assert [file.name for file in done.written] == [f"{SPACE.folder_name}/b.slab"]
    assert done.failed == ()
    assert kit.names() == ["b.slab"]


def test_what_cannot_be_removed_is_told(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    kit.seal("a", {1: 0})
    kit.seal("b", {2: 0})
    files = list(map(FileReport.of, select_all(kit.survey()).files))
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.name == "a.slab":
            raise PermissionError(1, "Operation not permitted", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    done = remove(kit.directory, files)
    assert [(one.file.name[-6:], one.reason) for one in done.failed] == [
        ("a.slab", "Operation not permitted")
    ]
    assert [file.name[-6:] for file in done.removed] == ["b.slab"]


# -------------------------------------------------------------------- limits


def filled(root: Path) -> Kit:
    """Three slabs, one of them written to for as long as the process lives, and a leftover."""
    kit = Kit(root)
    for name, used_s in (("a", 400), ("c", 200), ("d", 100)):
        kit.seal(name, FULL, used_s=used_s)
    leftover = kit.root / SPACE.folder_name / "x.slab.new"
    leftover.write_bytes(bytes(100))
    age(leftover, 70)
    return kit


def as_told(names: Sequence[FileReport]) -> list[str]:
    return [file.name.split("/")[1] for file in names]


@pytest.mark.parametrize("num_slabs", [None, 4, 3, 2, 1, 0])
def test_a_plan_is_what_a_collection_does(tmp_path: Path, num_slabs: int | None) -> None:
    kit = filled(tmp_path / "kv")
    writer = kit.write("b", {2: 0}, used_s=300)
    capacity = None if num_slabs is None else num_slabs * SHAPE.file_bytes
    limits = Limits(capacity_bytes=capacity)
    planned = plan_collection(open_store(kit.root, limits, lambda: NOW_NS))
    assert len(kit.names()) == 5, "nothing is removed by a plan"
    done = collect(open_store(kit.root, limits, lambda: NOW_NS))
    writer.close()
    assert sorted(as_told(planned.removed)) == sorted(as_told(done.removed))
    assert planned.shortfall == done.shortfall
    assert (planned.shortfall is None) == (done.shortfall is None) == (num_slabs != 0)
    gone = {None: "", 4: "", 3: "a", 2: "ac", 1: "acd", 0: "acd"}[num_slabs]
    assert as_told(planned.removed) == ["x.slab.new", *(f"{name}.slab" for name in gone)]
    assert planned.num_bytes == 100 + len(gone) * SHAPE.file_bytes
    assert set(kit.names()) == {f"{name}.slab" for name in set("abcd") - set(gone)}


def test_a_floor_of_free_bytes(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, used_s in (("a", 300), ("b", 200), ("c", 100)):
        kit.seal(name, FULL, used_s=used_s)
    status = os.statvfs(kit.root)
    free = status.f_bavail * status.f_frsize
    monkeypatch.setattr(os, "statvfs", lambda _path: status)
    limits = Limits(min_free_bytes=free + SHAPE.file_bytes + 1)
    planned = plan_collection(open_store(kit.root, limits, lambda: NOW_NS))
    done = collect(open_store(kit.root, limits, lambda: NOW_NS))
    assert as_told(planned.removed) == as_told(done.removed) == ["a.slab", "b.slab"]


@pytest.mark.parametrize("num_slabs", [1, 2, 2.4, 3, 5])
def test_a_plan_for_a_slab_is_what_making_one_does(tmp_path: Path, num_slabs: float) -> None:
    """One that fills up included, and slabs that hold less than others."""
    kit = Kit(tmp_path / "kv")
    kit.seal("a", {1: 0}, used_s=400)
    kit.seal("c", FULL, used_s=200)
    limits = Limits(capacity_bytes=int(num_slabs * SHAPE.file_bytes))
    directory = open_store(kit.root, limits, lambda: NOW_NS)
    before = kit.names()
    with contextlib.closing(kit.write("b", {2: 0}, used_s=300)):
        plan = directory.plan(SHAPE.file_bytes)
        with (
            pytest.raises(NoRoomError, match="bytes are missing")
            if plan.missing_bytes
            else contextlib.nullcontext()
        ):
            directory.create_slab("0" * 16, SlabHeader(SPACE.facts, SHAPE)).close()
    gone = [name for name in before if name not in kit.names()]
    assert [file.path.name for file in plan.files] == gone
    assert (plan.missing_bytes > 0) == (num_slabs == 1)
    assert len(gone) == {1: 0, 2: 2, 2.4: 2, 3: 1, 5: 0}[num_slabs]


def test_whoever_holds_the_lock_is_named_and_nothing_went(kit: Kit) -> None:
    kit.seal("a", {1: 0})
    clock = iter(range(100))
    directory = SlabDirectory(
        kit.root,
        Limits(capacity_bytes=0),
        clock=lambda: float(next(clock)),
        sleep=lambda _seconds: None,
    )
    collect_lock = kit.root / "interlace-slabs.lock"
    with collect_lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = collect(directory)
    assert done.removed == ()
    assert done.shortfall is not None
    assert "others have been making a slab" in done.shortfall


def test_no_torch_is_loaded() -> None:
    code = (
        "import sys\n"
        "from interlace.connectors.slab_store.inspection import chains, limits, removal\n"
        "from interlace.connectors.slab_store.inspection import statistics, verification\n"
        "assert not {'torch', 'typer', 'rich'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": SRC},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
