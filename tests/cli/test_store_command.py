"""`interlace store` as it is typed: what it prints, exit codes, bad input."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slab_kit import flip
from typer.testing import CliRunner

from interlace.cli import store as store_module
from interlace.cli.app import app
from interlace.cli.store_arguments import parse_size
from interlace.connectors.kv_folders.identity import KVIdentity
from interlace.connectors.slab_store import files, hits
from interlace.connectors.slab_store import slab as slab_module
from interlace.connectors.slab_store.directory import MARKER, Limits, SlabDirectory
from interlace.connectors.slab_store.layout import SlabHeader, SlabShape
from interlace.connectors.slab_store.slab_writer import NewRecord, SlabWriter
from interlace.connectors.slab_store.space import Space
from interlace.engine.errors import InterlaceError
from interlace.layers.checkpoint import tokenizer_at_hand

SRC = str(Path(__file__).resolve().parents[2] / "src")
SECOND, MINUTE, HOUR, DAY = 1, 60, 3600, 86400
NOW_NS = 1_700_000_000 * 10**9
TOY = Space(
    identity=KVIdentity(model="ab" * 32, dtype="float32", block_size=16),
    model_name="toy",
    num_layers=2,
    page_bytes=700,
)
BIG = dataclasses.replace(
    TOY,
    identity=KVIdentity(model="cd" * 32, dtype="bfloat16", block_size=16, rank=1, world_size=2),
    model_name="big\x1b[2J\nmodel\t\u202e",
)
SHAPE = SlabShape(TOY.record_bytes, 4)
TOY_FOLDER, BIG_FOLDER = TOY.folder_name, BIG.folder_name


def run(*args: str, given: str | None = None) -> tuple[int, str, str]:
    """Exit code, standard output and standard error, the latter on one line. Our own errors, which
    `main` would tell, have the code 1."""
    result = CliRunner().invoke(
        app, ["store", *args], obj=lambda: NOW_NS, input=given, env={"COLUMNS": "400"}
    )
    failed = result.exception
    assert failed is None or isinstance(failed, SystemExit | InterlaceError), result.exception
    message = str(failed) if isinstance(failed, InterlaceError) else ""
    return result.exit_code, result.stdout, " ".join((result.stderr + message).split())


def said(*args: str, code: int = 0) -> Any:
    """What the JSON says."""
    found, out, err = run(*args, "--json")
    assert found == code, out + err
    return json.loads(out)


def write(root: Path, name: str, blocks: dict[int, int], space: Space, *ages_s: int) -> SlabWriter:
    """A slab of blocks and their parents, that is still written to; saved and used so long ago."""
    saved_s, used_s = ages_s
    folder = root / space.folder_name
    folder.mkdir(exist_ok=True)
    header = SlabHeader(space.facts, SHAPE)
    writer = SlabWriter.create(folder, header, lambda: NOW_NS - saved_s * 10**9)
    path = writer.path.rename(folder / f"{name}.slab")
    data = np.zeros(TOY.record_bytes, np.uint8)
    writer.add(
        [
            NewRecord(
                bytes([one]) * 32,
                bytes([parent]) * 32 if parent else None,
                data,
                first_tokens=() if parent else (7, 0, 3 + one),
            )
            for one, parent in blocks.items()
        ]
    )
    age(path, used_s)
    return writer


def age(path: Path, used_s: int) -> None:
    used_ns = NOW_NS - used_s * 10**9
    os.utime(path, ns=(used_ns, used_ns))


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    root = tmp_path / "kv"
    SlabDirectory(root, Limits()).prepare()
    return root


@pytest.fixture
def store(empty: Path) -> Iterator[Path]:
    """Two models: three sealed slabs, one that is written to, and a leftover."""
    write(empty, "a", {1: 0, 2: 1, 3: 1}, TOY, 3 * DAY, 2 * DAY).close()
    write(empty, "b", {4: 3, 20: 0, 31: 30}, TOY, 5 * HOUR, 3 * HOUR).close()
    write(empty, "c", {1: 0}, BIG, 90 * SECOND, 7 * SECOND).close()
    writer = write(empty, "d", {5: 4}, TOY, 10 * MINUTE, 5 * MINUTE)
    hits.note(empty / TOY_FOLDER, [bytes([1]) * 32] * 3)
    leftover = empty / TOY_FOLDER / "e.slab.new"
    leftover.write_bytes(bytes(1500))
    age(leftover, 4 * HOUR)
    yield empty
    writer.close()


def held(num_records: int) -> int:
    """Bytes on the disk of a slab with so many records."""
    return SHAPE.data_at + num_records * SHAPE.pitch


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("*/*.slab*"))


# -------------------------------------------------------------------- ls

LS = """\
        HASH  TOKENS  CHAINS  BLOCKS   BYTES  AGE  USED  HITS  BLOCK     DTYPE  RANK  MODEL
010101010101      16       1       1  1.4 kB  90s    7s     0     16  bfloat16   1/2  big^[[2J^Jmodel^I<U+202E>
010101010101      64       2       5  7.0 kB   3d    5m     3     16   float32   0/1  toy
141414141414      16       1       1  1.4 kB   5h    3h     0     16   float32   0/1  toy
1 block beside these whose prefix has begun with blocks that are gone: found again once those are stored again
"""  # noqa: E501 - as it is printed


def test_prefixes_are_listed(store: Path) -> None:
    assert run("ls", str(store)) == (0, LS, "")


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A tokenizer of few words is that of the model "toy" alone; names that were asked for."""
    asked: list[str] = []
    texts = ["be", "have", "so", "me", "more", "less", "x\x1b[2J\n", " not", *map(str, range(30))]
    whole = {text: number for number, text in enumerate(texts)}

    class Few:
        vocab_size = len(texts)

        def decode(self, token_ids: Sequence[int]) -> str:
            return "".join(list(whole)[one] for one in token_ids)

    def at_hand(model: str) -> Few | None:
        asked.append(model)
        return Few() if model == "toy" else None

    monkeypatch.setattr(tokenizer_at_hand, "tokenizer_at_hand", at_hand)
    return asked


def test_first_words_are_shown_where_a_tokenizer_is_at_hand(store: Path, words: list[str]) -> None:
    code, out, _ = run("ls", str(store))
    assert code == 0
    lines = out.splitlines()
    assert lines[0].endswith("  BEGINS")
    assert [line.split("  ")[-1] for line in lines[1:4]] == ["-", "notbemore", "notbe15"]
    assert sorted(words) == [BIG.model_name, "toy"], "each once"
    found = said("ls", str(store))["prefixes"]
    assert [one["first_words"] for one in found] == [None, "notbemore", "notbe15"]
    assert found[1]["first_tokens"] == [7, 0, 4]


def test_another_tokenizer_may_be_named(store: Path, words: list[str]) -> None:
    found = said("ls", str(store), "--tokenizer", "toy")["prefixes"]
    assert [one["first_words"] for one in found] == ["notbemore", "notbemore", "notbe15"]
    assert words == ["toy"]
    code, _, err = run("ls", str(store), "--tokenizer", "other")
    assert code == 2
    assert "no tokenizer of 'other' on this machine: give smollm2-135m" in err


def test_what_is_no_word_of_the_tokenizer_is_not_shown(empty: Path, words: list[str]) -> None:
    """Of another model of that name, for instance; nor can words drive a terminal."""
    write(empty, "a", {60: 0, 3: 0}, TOY, 10, 10).close()
    found = said("ls", str(empty))["prefixes"]
    assert {one["first_words"] for one in found} == {None, "notbex\x1b[2J"}
    assert "\x1b" not in run("ls", str(empty))[1]


def test_the_most_recently_used_are_listed(store: Path) -> None:
    code, out, _ = run("ls", str(store), "--limit", "1")
    assert code == 0
    assert out.splitlines()[1:3] == [
        LS.splitlines()[1],
        "2 more that were used less recently: --limit shows them",
    ]
    assert len(said("ls", str(store), "--limit", "2")["prefixes"]) == 2
    assert run("ls", str(store), "--limit", "0")[0] == 2


def test_prefixes_as_json(store: Path) -> None:
    found = said("ls", str(store))
    assert (found["num_prefixes"], found["num_lost_blocks"]) == (3, 1)
    assert found["prefixes"][0]["model_names"] == [BIG.model_name]
    assert found["prefixes"][1] == {
        "first_hash": "01" * 32,
        "model_names": ["toy"],
        "model": "ab" * 32,
        "dtype": "float32",
        "block_size": 16,
        "group": 0,
        "rank": 0,
        "world_size": 1,
        "num_tokens": 64,
        "num_leaves": 2,
        "num_blocks": 5,
        "num_bytes": 7000,
        "saved_ns": NOW_NS - 3 * DAY * 10**9,
        "used_ns": NOW_NS - 5 * MINUTE * 10**9,
        "num_hits": 3,
        "first_tokens": [7, 0, 4],
        "first_words": None,
    }


def test_a_name_of_any_bytes_is_shown(empty: Path) -> None:
    space = dataclasses.replace(TOY, model_name="m\udcff\x9b模型")
    write(empty, "a", {1: 0}, space, 10, 10).close()
    code, out, _ = run("ls", str(empty))
    assert code == 0
    assert out.splitlines()[1].endswith("  m<U+DCFF><U+009B>模型")
    assert said("ls", str(empty))["prefixes"][0]["model_names"] == [space.model_name]


# -------------------------------------------------------------------- stat

STAT_TOY = f"""\
{TOY_FOLDER} (toy)
  digest of the model abababababababab
  slabs               3, 1 of them with a living writer
  records             7, 3 free in slabs that are written to
  bytes of files      67.0 kB, 12.3 kB more reserved by writers
  bytes of records    9.8 kB
  hits                3 loads
  oldest and newest   saved 3d and 10m ago
  leftovers           1, 1.5 kB: interlace store gc removes them
"""
STAT_BIG = f"""\
{BIG_FOLDER} (big^[[2J^Jmodel^I<U+202E>)
  digest of the model cdcdcdcdcdcdcdcd
  slabs               1, 0 of them with a living writer
  records             1, 0 free in slabs that are written to
  bytes of files      16.4 kB
  bytes of records    1.4 kB
  hits                0 loads
  oldest and newest   saved 90s and 90s ago
  left out            {BIG_FOLDER}/bad.slab: it has no header of a slab
"""
STAT_ALL = f"""\
in all
  slabs               4, 1 of them with a living writer
  records             8, 3 free in slabs that are written to
  bytes of files      83.4 kB, 12.3 kB more reserved by writers
  bytes of records    11.2 kB
  hits                3 loads
  oldest and newest   saved 3d and 90s ago
  leftovers           1, 1.5 kB: interlace store gc removes them
  left out            {BIG_FOLDER}/bad.slab: it has no header of a slab
"""


def test_statistics(store: Path) -> None:
    (store / BIG_FOLDER / "bad.slab").write_bytes(b"bad")
    spaces = "".join(text for _, text in sorted([(TOY_FOLDER, STAT_TOY), (BIG_FOLDER, STAT_BIG)]))
    assert run("stat", str(store)) == (0, spaces + STAT_ALL, "")


def test_a_slab_that_is_being_made_is_told(store: Path) -> None:
    fresh = store / TOY_FOLDER / "f.slab.new"
    fresh.write_bytes(b"")
    age(fresh, 5)
    assert "  being made          1 slab\n" in run("stat", str(store))[1]


def test_statistics_as_json(store: Path) -> None:
    (store / BIG_FOLDER / "bad.slab").write_bytes(b"bad")
    found = said("stat", str(store))
    assert [one["folder"] for one in found["spaces"]] == sorted([TOY_FOLDER, BIG_FOLDER])
    assert found["total"] == {
        "folder": "",
        "model_names": [BIG.model_name, "toy"],
        "model": "",
        "num_slabs": 4,
        "num_records": 8,
        "file_bytes": 2 * held(3) + 2 * held(1) + 1503,
        "reserved_bytes": SHAPE.file_bytes - held(1),
        "record_bytes": 11200,
        "num_hits": 3,
        "num_free_records": 3,
        "oldest_ns": NOW_NS - 3 * DAY * 10**9,
        "newest_ns": NOW_NS - 90 * 10**9,
        "num_written": 1,
        "num_being_made": 0,
        "num_leftovers": 1,
        "leftover_bytes": 1500,
        "left_out": [
            {
                "name": f"{BIG_FOLDER}/bad.slab",
                "reason": "it has no header of a slab",
                "is_damaged": True,
                "is_unread": False,
            }
        ],
    }


# -------------------------------------------------------------------- verify


def test_a_sound_store(store: Path) -> None:
    code, out, err = run("verify", str(store))
    assert (code, err) == (0, "verify ...")
    assert out == "4 slabs, 8 records, 11.2 kB read: none bad\n"


@pytest.fixture
def damaged(store: Path) -> Path:
    """Bad: a record of a, a record of d that is written to, all of c."""
    flip(store / TOY_FOLDER / "a.slab", SHAPE.record_at(1) + 77, bit=3)
    flip(store / TOY_FOLDER / "d.slab", SHAPE.record_at(0), bit=3)
    flip(store / BIG_FOLDER / "c.slab", 30, bit=3)
    age(store / TOY_FOLDER / "a.slab", 2 * DAY)
    age(store / TOY_FOLDER / "d.slab", 5 * MINUTE)
    age(store / BIG_FOLDER / "c.slab", 7)
    return store


VERIFY = f"""\
bad {TOY_FOLDER}/a.slab record 1: it has another checksum than its entry
bad {TOY_FOLDER}/d.slab record 0: it has another checksum than its entry
bad {BIG_FOLDER}/c.slab: its header has another digest than it says
3 slabs, 7 records, 9.8 kB read: 2 records and 1 whole file bad
"""
DROPPED = f"""\
removed {TOY_FOLDER}/a.slab
removed {BIG_FOLDER}/c.slab
kept {TOY_FOLDER}/d.slab: a process writes to it
2 files removed, 41.0 kB, and with them 2 good records
"""


def test_damage_is_found_and_stays(damaged: Path) -> None:
    assert run("verify", str(damaged))[:2] == (1, VERIFY)
    assert run("verify", str(damaged))[:2] == (1, VERIFY)


def test_damage_is_dropped(damaged: Path) -> None:
    assert run("verify", str(damaged), "--drop")[:2] == (1, VERIFY + DROPPED)
    assert names(damaged) == ["b.slab", "d.slab", "e.slab.new"]
    code, out, _ = run("verify", str(damaged), "--drop")
    assert code == 1, "d stays"
    assert out.endswith(
        "kept " + f"{TOY_FOLDER}/d.slab: a process writes to it\nnothing was removed\n"
    )


def test_what_was_dropped_is_found_no_more(store: Path) -> None:
    flip(store / TOY_FOLDER / "b.slab", SHAPE.record_at(2), bit=3)
    assert run("verify", str(store), "--drop")[0] == 1
    assert run("verify", str(store))[:2] == (0, "3 slabs, 5 records, 7.0 kB read: none bad\n")


def test_what_cannot_be_read_is_not_dropped(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = files.read_at
    flip(store / BIG_FOLDER / "c.slab", SHAPE.record_at(0), bit=3)

    def read_at(fd: int, buffer: memoryview, offset: int) -> int:
        if offset == SHAPE.record_at(2):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffer, offset)

    monkeypatch.setattr(slab_module, "read_at", read_at)
    code, out, _ = run("verify", str(store), "--drop")
    assert code == 1
    told = [
        f"unread {TOY_FOLDER}/{name}.slab record 2: it cannot be read: Input/output error"
        for name in "ab"
    ]
    assert set(told) < set(out.splitlines())
    assert "4 slabs, 6 records, 8.4 kB read: 1 record bad; 2 records could not be read\n" in out
    assert names(store) == ["a.slab", "b.slab", "d.slab", "e.slab.new"]
    found = said("verify", str(store), code=1)
    assert (found["num_bad_records"], found["num_unread_records"]) == (0, 2)


def test_a_slab_of_another_version_is_not_dropped(store: Path) -> None:
    path = store / TOY_FOLDER / "b.slab"
    with path.open("r+b") as file:
        file.seek(8)
        file.write(b"\x07")
    code, out, _ = run("verify", str(store), "--drop")
    assert code == 1
    assert f"bad {TOY_FOLDER}/b.slab: it has version 7" in out
    assert path.exists()


def test_verification_as_json(damaged: Path) -> None:
    found = said("verify", str(damaged), "--drop", code=1)
    dropped = found.pop("dropped")
    flawed = found.pop("flawed")
    assert flawed[0]["flaws"] == [
        {"record": 1, "reason": "it has another checksum than its entry", "is_unread": False}
    ], "file and record are said once"
    assert [one["file"]["name"] for one in flawed] == [
        f"{TOY_FOLDER}/a.slab",
        f"{TOY_FOLDER}/d.slab",
        f"{BIG_FOLDER}/c.slab",
    ]
    assert found == {
        "num_slabs": 3,
        "num_records": 7,
        "num_bytes": 9800,
        "num_bad_records": 2,
        "num_bad_files": 1,
        "num_unread_records": 0,
        "num_unread_files": 0,
    }
    assert (len(dropped["removed"]), len(dropped["written"])) == (2, 1)
    assert (dropped["num_bytes"], dropped["num_good_records"]) == (held(3) + held(1), 2)


# -------------------------------------------------------------------- gc

LEFTOVER = f"{TOY_FOLDER}/e.slab.new: 1.5 kB, left over 4h ago"
OLDEST = f"{TOY_FOLDER}/a.slab: 24.6 kB, used 2d ago"


def test_leftovers_go_without_limits(store: Path) -> None:
    planned = run("gc", str(store), "--dry-run")
    assert planned == (0, f"would go {LEFTOVER}\n1 file would go, 1.5 kB\n", "")
    assert "e.slab.new" in names(store)
    done = run("gc", str(store))
    assert done == (0, f"removed {LEFTOVER}\n1 file removed, 1.5 kB\n", "")
    assert "e.slab.new" not in names(store)
    assert run("gc", str(store)) == (0, "nothing was removed\n", "")
    assert run("gc", str(store), "--dry-run") == (0, "nothing would go\n", "")


def test_a_capacity_is_kept(store: Path) -> None:
    options = ("--capacity", "0.08MB", "--min-free", "1")
    code, out, _ = run("gc", str(store), *options, "--dry-run")
    assert (code, out) == (
        0,
        f"would go {LEFTOVER}\nwould go {OLDEST}\n2 files would go, 26.1 kB\n",
    )
    code, out, _ = run("gc", str(store), *options)
    assert (code, out) == (0, f"removed {LEFTOVER}\nremoved {OLDEST}\n2 files removed, 26.1 kB\n")
    assert names(store) == ["b.slab", "c.slab", "d.slab"]


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_limits_that_cannot_be_kept(store: Path, options: tuple[str, ...]) -> None:
    code, out, err = run("gc", str(store), "--capacity", "0", *options)
    assert code == 1
    assert out.splitlines()[-1].startswith("4 files ")
    assert "the limits are not kept: 28672 bytes are missing" in err
    assert "d.slab" in names(store)


def test_a_collection_as_json(store: Path) -> None:
    found = said("gc", str(store), "--dry-run")
    assert found == {
        "dry_run": True,
        "removed": [
            {
                "name": f"{TOY_FOLDER}/e.slab.new",
                "num_bytes": 1500,
                "used_ns": NOW_NS - 4 * HOUR * 10**9,
                "is_new": True,
            }
        ],
        "shortfall": None,
        "num_bytes": 1500,
    }
    found = said("gc", str(store), "--capacity", "0", code=1)
    assert (found["dry_run"], len(found["removed"])) == (False, 4)
    assert found["shortfall"].startswith("28672 bytes are missing")


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("12B", 12),
        ("1k", 1000),
        ("200GB", 200 * 10**9),
        ("1.5GiB", 3 << 29),
        ("1.1 TB", 11 * 10**11),
        ("2mib", 2 << 20),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size("--capacity", text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GB", "-1", "1e9", "1,5GB", "5 PB", "1iB", "1.GB", "٣", "nan"]
)
@pytest.mark.parametrize("option", ["--capacity", "--min-free"])
def test_what_is_no_size_is_refused(store: Path, option: str, text: str) -> None:
    code, out, err = run("gc", str(store), f"{option}={text}")
    assert (code, out) == (2, "")
    assert option in err
    assert "200GB or 1.5GiB" in err


# -------------------------------------------------------------------- rm


def test_a_models_slabs_go(store: Path) -> None:
    code, out, err = run("rm", str(store), "--model", "toy", "--yes")
    assert (code, err) == (0, "")
    assert out == (
        f"removed {TOY_FOLDER}/a.slab\nremoved {TOY_FOLDER}/b.slab\n"
        f"kept {TOY_FOLDER}/d.slab: a process writes to it\n2 files removed, 49.2 kB\n"
    )
    assert names(store) == ["c.slab", "d.slab", "e.slab.new"]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (["--model", "cdcdcdcd"], "abde"),
        (["--model", BIG.model_name], "abde"),
        (["--model", "to"], "abcde"),
        (["--prefix", "14"], "acde"),
        (["--prefix", "0101"], "de"),
        (["--prefix", "02"], "abcde"),
        (["--older-than", "1d"], "bcde"),
        (["--older-than", "3.5h"], "bcd"),
        (["--older-than", "200m"], "bcd"),
        (["--older-than", "1s"], "d"),
        (["--all"], "d"),
    ],
)
def test_what_is_chosen_goes(store: Path, options: list[str], left: str) -> None:
    code, _, err = run("rm", str(store), *options, "--yes")
    assert (code, err) == (0, "")
    assert [name[0] for name in names(store)] == list(left)


def test_a_removal_as_json(store: Path) -> None:
    found = said("rm", str(store), "--all", "--yes")
    assert [one["name"].split("/")[1] for one in found["removed"]] == [
        "a.slab",
        "b.slab",
        "c.slab",
        "e.slab.new",
    ]
    assert [one["name"] for one in found["written"]] == [f"{TOY_FOLDER}/d.slab"]
    assert (found["failed"], found["num_bytes"]) == ([], 2 * held(3) + held(1) + 1500)
    assert found["choices"] is None, "something was chosen"


def test_a_pipe_is_not_asked(store: Path) -> None:
    before = names(store)
    code, out, err = run("rm", str(store), "--all", given="y\n")
    assert (code, out) == (2, "")
    assert "add --yes" in err
    assert names(store) == before
    code, out, _ = run("rm", str(store), "--model", "none")
    assert (code, out.splitlines()[0]) == (0, "nothing was removed")


BIG_NAME = "big^[[2J^Jmodel^I<U+202E> (cdcdcdcd)"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            ["--model", "tiy"],
            f"no slab is of a model 'tiy': there are toy (abababab), {BIG_NAME}",
        ),
        (
            ["--model", "BIG model"],
            f"no slab is of a model 'BIG model': there are {BIG_NAME}, toy (abababab)",
        ),
        (
            ["--prefix", "02"],
            "no prefix has a hash that begins with 02: there are 010101010101, 141414141414",
        ),
        (["--older-than", "3d"], "no slab is as old: the least recent use was 2d ago"),
    ],
)
def test_who_chooses_nothing_hears_what_there_is(
    store: Path, options: list[str], told: str
) -> None:
    before = names(store)
    assert run("rm", str(store), *options) == (0, f"nothing was removed\n{told}\n", "")
    assert names(store) == before


def test_a_few_of_many_choices_are_named(empty: Path) -> None:
    for number in range(7):
        space = dataclasses.replace(
            TOY,
            identity=KVIdentity(model=f"{number:02x}" * 32, dtype="float32", block_size=16),
            model_name=f"model-{number}",
        )
        write(empty, "a", {number + 1: 0}, space, 10, 10 + number).close()
    _, out, _ = run("rm", str(empty), "--model", "modle-6")
    line = out.splitlines()[1]
    assert "there are model-6 (06060606), model-0 (00000000), " in line, "the most alike first"
    assert line.endswith("model-3 (03030303) and 2 more, which interlace store stat shows")
    _, out, _ = run("rm", str(empty), "--prefix", "ff")
    line = out.splitlines()[1]
    assert "there are 010101010101, 020202020202, " in line, "the last used first"
    assert line.endswith(", 050505050505 and 2 more, which interlace store ls shows")


def test_choices_as_json(store: Path) -> None:
    found = said("rm", str(store), "--model", "tiy")
    assert found == {
        "removed": [],
        "written": [],
        "failed": [],
        "num_bytes": 0,
        "choices": {
            "models": [
                {"name": "toy", "digest": "ab" * 32},
                {"name": BIG.model_name, "digest": "cd" * 32},
            ],
            "num_models": 2,
            "first_hashes": ["01" * 32, "14" * 32],
            "num_first_hashes": 2,
            "used_ns": NOW_NS - 2 * DAY * 10**9,
        },
    }


def test_choices_where_no_model_is_known(empty: Path) -> None:
    assert run("rm", str(empty), "--model", "toy")[1].endswith("\nthe store has no slabs\n")
    (empty / TOY_FOLDER).mkdir()
    (empty / TOY_FOLDER / "a.slab").write_bytes(b"bad")
    for options, told in (
        (["--model", "toy"], "no slab is of a model 'toy': there is none whose model is known"),
        (["--prefix", "01"], "no prefix has a hash that begins with 01: there is none"),
    ):
        assert run("rm", str(empty), *options)[:2] == (0, f"nothing was removed\n{told}\n")


@pytest.fixture
def _at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "is_terminal", lambda _stream: True)


@pytest.mark.usefixtures("_at_a_terminal")
def test_a_terminal_is_asked(store: Path) -> None:
    before = names(store)
    for answer in ("n\n", "\n", ""):
        code, out, err = run("rm", str(store), "--prefix", "14", given=answer)
        assert (code, out.strip()) == (1, answer.strip()), "only what was typed"
        assert (
            f"Remove 1 slab of {store} with 3 records, 2 of them of other prefixes, 24.6 kB? [y/N]:"
        ) in err
        assert "Aborted" in err
        assert names(store) == before
    code, out, _ = run("rm", str(store), "--prefix", "14", given="y\n")
    assert code == 0
    assert f"removed {TOY_FOLDER}/b.slab" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give one of --model, --prefix, --older-than and --all"),
        (["--all", "--model", "toy"], "give one of"),
        (["--model", ""], "--model"),
        (["--prefix", ""], "give hex digits"),
        (["--prefix", "xyz"], "give hex digits"),
        (["--prefix", "0" * 65], "give hex digits"),
        (["--older-than", "30"], "30d, 12h or 15m"),
        (["--older-than", "-1d"], "30d, 12h or 15m"),
        (["--older-than", ""], "30d, 12h or 15m"),
    ],
)
def test_bad_choices_are_refused(store: Path, options: list[str], message: str) -> None:
    before = names(store)
    code, out, err = run("rm", str(store), *options, "--yes")
    assert (code, out) == (2, "")
    assert message in err
    assert names(store) == before


def test_what_cannot_be_removed_ends_with_1(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    code, out, _ = run("rm", str(store), "--model", "cdcdcdcd", "--yes")
    assert code == 1
    assert out.splitlines()[0] == (
        f"failed {BIG_FOLDER}/c.slab: it cannot be removed (Operation not permitted)"
    )


# -------------------------------------------------------------------- all of them

COMMANDS = (["ls"], ["stat"], ["verify"], ["gc"], ["rm", "--all", "--yes"])


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_what_is_no_store_is_refused(command: list[str], tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "no\x1bne", "no^[ne cannot be listed (No such file or directory): name the"),
        (tmp_path, f"is no store of slabs (it has no {MARKER}): name the directory"),
    ):
        code, out, err = run(command[0], str(path), *command[1:])
        assert (code, out) == (2, "")
        assert message in err
        assert list(tmp_path.iterdir()) == []
    (tmp_path / MARKER).write_text('{"version": 99}')
    code, _, err = run(command[0], str(tmp_path), *command[1:])
    assert code == 2
    assert "holds slabs of version 99, and this Interlace reads and writes version" in err


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_store_that_cannot_be_read(
    command: list[str], empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_directory: SlabDirectory) -> list[Path]:
        raise PermissionError(13, "Permission denied", str(empty))

    monkeypatch.setattr(SlabDirectory, "spaces", refuse)
    code, out, err = run(command[0], str(empty), *command[1:])
    assert (code, out) == (1, "")
    assert f"{empty} cannot be read or changed (Permission denied): run this as the user" in err


EMPTY = {
    "ls": "no prefixes are stored\n",
    "stat": (
        "in all\n"
        "  slabs               0, 0 of them with a living writer\n"
        "  records             0, 0 free in slabs that are written to\n"
        "  bytes of files      0 B\n"
        "  bytes of records    0 B\n"
        "  hits                0 loads\n"
    ),
    "verify": "0 slabs, 0 records, 0 B read: none bad\n",
    "gc": "nothing was removed\n",
    "rm": "nothing was removed\n",
}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_an_empty_store(command: list[str], empty: Path) -> None:
    assert run(command[0], str(empty), *command[1:])[:2] == (0, EMPTY[command[0]])
    assert isinstance(said(command[0], str(empty), *command[1:]), dict)


@pytest.mark.parametrize(
    "command", [["ls"], ["stat"], ["verify"], ["gc", "--dry-run", "--capacity", "60kB"]]
)
def test_who_only_looks_leaves_no_file(command: list[str], store: Path) -> None:
    before = [(path, path.lstat().st_mtime_ns) for path in sorted(store.rglob("*"))]
    os.utime(store, ns=(1, 1))
    assert run(command[0], str(store), *command[1:])[0] in (0, 1)
    assert store.stat().st_mtime_ns == 1
    assert [(path, path.lstat().st_mtime_ns) for path in sorted(store.rglob("*"))] == before


OTHER_PROCESS = """
import sys
import time
from pathlib import Path
import numpy as np
from interlace.connectors.kv_folders.identity import KVIdentity
from interlace.connectors.slab_store.directory import Limits, SlabDirectory
from interlace.connectors.slab_store.layout import SlabHeader, SlabShape
from interlace.connectors.slab_store.slab_writer import NewRecord
from interlace.connectors.slab_store.space import Space

identity = KVIdentity(model="ab" * 32, dtype="float32", block_size=16)
space = Space(identity=identity, model_name="toy", num_layers=2, page_bytes=700)
shape = SlabShape(space.record_bytes, 4)
directory = SlabDirectory(Path(sys.argv[1]), Limits(capacity_bytes=8 * shape.file_bytes))
data = np.zeros(space.record_bytes, np.uint8)
print("go", flush=True)
for number in range(1, 1 << 30):
    writer = directory.create_slab(space.folder_name, SlabHeader(space.facts, shape))
    writer.add([NewRecord(number.to_bytes(32, "big"), None, data)])
    writer.close()
    time.sleep(0.002)  # the lock is free for others now and then
"""


@pytest.mark.soak(quick=10, full=300)
def test_another_process_adds_and_removes_slabs_meanwhile(num_runs: int, empty: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS, str(empty)],
        env={**os.environ, "PYTHONPATH": SRC},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "go\n"
        seen = 0
        for _ in range(num_runs):
            seen += len(said("ls", str(empty))["prefixes"])
            for command in (["stat"], ["verify"], ["gc"], ["rm", "--all", "--yes"]):
                code, out, err = run(command[0], str(empty), *command[1:])
                assert code == 0, (command, out, err)
        assert seen > 0
        assert other.poll() is None
    finally:
        other.kill()
        other.communicate()


def test_no_torch_is_loaded(store: Path) -> None:
    code = (
        "import sys\n"
        "from interlace.cli.app import app\n"
        f"app(['store', 'verify', {str(store)!r}], standalone_mode=False)\n"
        "assert not {'torch', 'triton', 'transformers'} & set(sys.modules)"
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


def test_hits_are_forgotten_with_the_last_slab(store: Path) -> None:
    log = store / TOY_FOLDER / hits.LOG
    assert run("rm", str(store), "--prefix", "14" * 32, "--yes")[0] == 0
    assert log.exists(), "other prefixes are left"
    for path in (store / TOY_FOLDER).glob("d.slab"):
        path.unlink()
    assert run("rm", str(store), "--all", "--yes")[0] == 0
    assert not log.exists()
