"""Writers that are killed at any instant: what they published is whole, and others go on."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from slab_kit import (
    PATIENCE_S,
    SPACE,
    found,
    header,
    is_right,
    record,
    said,
    start,
)

from interlace.connectors.slab_store.catalog import Catalog
from interlace.connectors.slab_store.directory import Limits, SlabDirectory
from interlace.connectors.slab_store.slab import Slab

AT_ONCE = 4
MOST_SAID = 60
LONGEST_S = 0.005
"""After a writer has said so much, it is killed within this time."""
EACH = 1_000_000
"""Numbers of records that a writer has for itself."""

WRITERS = """
import itertools, os, signal, sys, time
from pathlib import Path
from slab_kit import SPACE, header, record
from interlace.connectors.slab_store.directory import Limits, NoRoomError, SlabDirectory
store = SlabDirectory(Path(sys.argv[1]), Limits())
store.prepare()

def write(numbers, heard):
    writer = None
    for size in (1, 2, 3, 5) * 1000:  # and not for ever, should nobody kill it
        while writer is None or writer.num_free < size:
            if writer: writer.close()
            try:
                writer = store.create_slab(SPACE.folder_name, header(64))
            except NoRoomError:  # the others are very busy
                pass
        mine = list(itertools.islice(numbers, size))
        writer.add([record(number) for number in mine])
        os.write(heard, "".join(f"{number}\\n" for number in mine).encode())

signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who is killed is gone at once
for line in sys.stdin:
    first, heard = line.split()
    pid = os.fork()
    if not pid:
        write(itertools.count(int(first)), os.open(heard, os.O_WRONLY))
        time.sleep(60)
        os._exit(1)
    print(pid, flush=True)
"""
"""Makes writers, as many as it is asked for: one that is new takes longer to start than to kill."""


class Writers:
    """Processes that write as fast as they can, each until it is killed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._maker = start(WRITERS, root)

    def kill_one(self, number: int) -> list[int]:
        """Start a writer, and kill it at some instant; what it said that it had published."""
        rng = random.Random(number)
        heard = self._root.parent / f"heard-{number}"
        heard.touch()
        pid = self._start(f"{number * EACH} {heard}")
        until_s, num_lines = time.monotonic() + PATIENCE_S, 1 + rng.randrange(MOST_SAID)
        try:
            while heard.read_bytes().count(b"\n") < num_lines:
                assert time.monotonic() < until_s
                assert lives(pid)
                time.sleep(0.0005)
            time.sleep(rng.uniform(0, LONGEST_S))
        finally:
            os.kill(pid, signal.SIGKILL)
        while lives(pid):
            assert time.monotonic() < until_s
            time.sleep(0.0005)
        *lines, _ = heard.read_text().split("\n")  # the last one may be half a line
        return [int(line) for line in lines]

    def _start(self, line: str) -> int:
        stdin, stdout = self._maker.stdin, self._maker.stdout
        assert stdin is not None
        assert stdout is not None
        with self._lock:
            print(line, file=stdin, flush=True)
            return int(stdout.readline())

    def close(self) -> None:
        said(self._maker)


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def check_published(root: Path, numbers: Sequence[int]) -> None:
    with contextlib.closing(Catalog(root / SPACE.folder_name, SPACE)) as catalog:
        catalog.look()
        assert found(catalog, numbers) == list(numbers)


def check_everything(root: Path) -> int:
    """Every entry of every slab is right, and nobody writes any more; how many there are."""
    count = 0
    for file in SlabDirectory(root, Limits()).slabs():
        if file.is_new:
            continue
        with Slab.open(file.path) as slab:
            entries = slab.look()
            assert slab.is_sealed
            assert all(is_right(slab, one) for one in entries)
            count += len(entries)
    return count


def check_a_new_writer(root: Path, number: int) -> None:
    store = SlabDirectory(root, Limits())
    store.prepare()
    writer = store.create_slab(SPACE.folder_name, header())
    writer.add([record(number)])
    check_published(root, [number])
    writer.close()


@pytest.mark.soak(quick=40, full=200)
def test_what_was_published_survives_sigkill_at_any_instant(num_runs: int, tmp_path: Path) -> None:
    root = tmp_path / "kv"

    def kill_and_check(number: int) -> int:
        numbers = writers.kill_one(number)
        check_published(root, numbers)
        check_a_new_writer(root, number * EACH + EACH - 1)
        return len(numbers)

    with (
        contextlib.closing(Writers(root)) as writers,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        published = list(pool.map(kill_and_check, range(num_runs)))
    assert sum(published) > num_runs, "they were killed at work"
    assert check_everything(root) >= sum(published) + num_runs
    later_ns = time.time_ns() + 120 * 10**9
    store = SlabDirectory(root, Limits(), now_ns=lambda: later_ns)
    store.collect()
    assert not [file for file in store.slabs() if file.is_new]
    emptied = SlabDirectory(root, Limits(capacity_bytes=0))
    emptied.collect()
    assert not emptied.slabs(), "nobody holds one"


MAKER = """
import os, sys
from pathlib import Path
from slab_kit import SPACE, header
from interlace.connectors.slab_store.directory import Limits, SlabDirectory
real = getattr(os, sys.argv[2])
def die(*args, **named):
    if sys.argv[3] == "after":
        real(*args, **named)
    os.kill(os.getpid(), 9)
setattr(os, sys.argv[2], die)
SlabDirectory(Path(sys.argv[1]), Limits()).create_slab(SPACE.folder_name, header())
"""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", ["posix_fallocate", "ftruncate", "pwrite", "rename"])
def test_a_maker_that_dies_leaves_a_leftover_or_an_empty_slab(
    tmp_path: Path, step: str, when: str
) -> None:
    store = SlabDirectory(tmp_path, Limits())
    store.prepare()
    process = start(MAKER, tmp_path, step, when)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == -9
    (file,) = store.slabs()
    assert file.is_new is ((step, when) != ("rename", "after"))
    check_published(tmp_path, [])
    check_a_new_writer(tmp_path, 1)
    later_ns = time.time_ns() + 120 * 10**9
    SlabDirectory(tmp_path, Limits(), now_ns=lambda: later_ns).collect()
    assert not [one for one in store.slabs() if one.is_new]


ADDER = """
import os, sys
from pathlib import Path
from slab_kit import SPACE, header, record
from interlace.connectors.slab_store.directory import Limits, SlabDirectory
real, calls = os.pwrite, iter(range(100))
def die(fd, data, offset):
    if next(calls) == int(sys.argv[2]):
        real(fd, data[:len(data) // 2], offset)
        os.kill(os.getpid(), 9)
    return real(fd, data, offset)
os.pwrite = die
writer = SlabDirectory(Path(sys.argv[1]), Limits()).create_slab(SPACE.folder_name, header())
writer.add([record(1), record(2)])
writer.add([record(3)])
"""


@pytest.mark.parametrize(
    ("call", "expected"), [(1, []), (2, []), (3, [1]), (4, [1, 2]), (5, [1, 2]), (6, [1, 2, 3])]
)
def test_a_writer_that_dies_half_way_in_a_write(
    tmp_path: Path, call: int, expected: list[int]
) -> None:
    """Of a header, two records, their entries, a record, its entry; or later."""
    SlabDirectory(tmp_path, Limits()).prepare()
    start(ADDER, tmp_path, call).communicate(timeout=PATIENCE_S)
    with contextlib.closing(Catalog(tmp_path / SPACE.folder_name, SPACE)) as catalog:
        catalog.look()
        assert found(catalog, range(5)) == expected
    assert check_everything(tmp_path) == len(expected)
    check_a_new_writer(tmp_path, 4)


# ---------------------------------------------------------------- equal everywhere

SEEDED = """
from slab_kit import SPACE, content, header
from interlace.connectors.slab_store.checksum import checksum
print(SPACE.folder_name, checksum(content(1)), header().to_bytes().rstrip(bytes(1)).hex())
"""


def test_b78_folder_names_checksums_and_headers_are_equal_in_every_process() -> None:
    answers = {said(start(SEEDED, seed=seed)) for seed in ("1", "2")}
    assert len(answers) == 1
    name = answers.pop().split()[0]
    assert name == SPACE.folder_name == "6bdfd88dd55e6151"
