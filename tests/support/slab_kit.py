"""Small slabs, records that follow from a number, and what writes them: a lane, or a process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from interlace.connectors.kv_folders.identity import KVIdentity
from interlace.connectors.slab_store.catalog import Catalog, Place
from interlace.connectors.slab_store.directory import Limits, SlabDirectory
from interlace.connectors.slab_store.layout import Entry, SlabHeader, SlabShape
from interlace.connectors.slab_store.slab import Slab
from interlace.connectors.slab_store.slab_writer import NewRecord, SlabWriter
from interlace.connectors.slab_store.space import Space
from interlace.connectors.slab_store.writing import Write, WriteBehind
from interlace.engine.ports import Lane

_SUPPORT = Path(__file__).resolve().parent
_SRC = _SUPPORT.parents[1] / "src"
PATIENCE_S = 60.0
SPACE = Space(
    identity=KVIdentity(model="ab" * 32, dtype="float32", block_size=4),
    model_name="toy",
    num_layers=3,
    page_bytes=700,
)
RECORD_BYTES = SPACE.record_bytes
"""Neither whole pages nor whole words."""
PITCH = 4096
"""Of a record on the disk."""
SLAB_BYTES = 8192 + 4096 + 3 * (PITCH + 128)
"""Three records."""


def until(is_so: Callable[[], bool], pause_s: float = 0.0002) -> None:
    """Ask again and again, without an event loop; fails if it never is."""
    until_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(pause_s)


def block_hash(number: int) -> bytes:
    return number.to_bytes(32, "big")


def content(number: int) -> npt.NDArray[np.uint8]:
    """Of the record of that number."""
    return np.random.default_rng(number).integers(0, 256, RECORD_BYTES, np.uint8)


def record(number: int) -> NewRecord:
    parent = block_hash(number - 1) if number else None
    return NewRecord(block_hash(number), parent, content(number))


def header(num_records: int = 4, space: Space = SPACE) -> SlabHeader:
    return SlabHeader(space.facts, SlabShape(space.record_bytes, num_records))


def folder_in(root: Path) -> Path:
    """Of the space, made."""
    folder = root / SPACE.folder_name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_slab(folder: Path, numbers: Sequence[int], num_records: int | None = None) -> Path:
    """A sealed slab with these records."""
    writer = SlabWriter.create(folder, header(num_records or max(1, len(numbers))))
    if numbers:
        writer.add([record(number) for number in numbers])
    writer.close()
    return writer.path


def read(slab: Slab, entry: Entry) -> npt.NDArray[np.uint8]:
    buffer = np.full(slab.header.shape.record_bytes, 0xEE, np.uint8)
    slab.read(entry, buffer)
    return buffer


def is_right(slab: Slab, entry: Entry) -> bool:
    """Whether it is what `record` made for that hash. Raises what `Slab.read` does."""
    number = int.from_bytes(entry.block_hash, "big")
    return bool(np.array_equal(read(slab, entry), content(number)))


def found(catalog: Catalog, numbers: Sequence[int]) -> list[int]:
    """Which of these the catalog finds; what it finds is right."""
    places = {number: catalog.find(block_hash(number)) for number in numbers}
    there = {number: place for number, place in places.items() if place is not None}
    assert all(is_right(*place) for place in there.values())
    return list(there)


def place_of(catalog: Catalog, number: int) -> Place:
    place = catalog.find(block_hash(number))
    assert place is not None
    return place


def flip(path: Path, at: int, bit: int = 0) -> None:
    """One bit of a file, in place."""
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def start(
    code: str, *arguments: object, stdout: int = subprocess.PIPE, seed: str = "0"
) -> subprocess.Popen[str]:
    """A process that can import this module, and the package; `seed` is of its hashes."""
    path = os.pathsep.join((str(_SRC), str(_SUPPORT)))
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed},
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )


def said(process: subprocess.Popen[str]) -> str:
    """What it says until its end, which is a good one."""
    out, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    return (out or "").strip()


class WritingKit:
    """A writer over a directory of its own, with a clock that tests turn."""

    def __init__(
        self, root: Path, lane: Lane, *, limits: Limits | None = None, queue: int = 1 << 20
    ) -> None:
        self.now_s = 0.0
        self.directory = SlabDirectory(root / "kv", limits or Limits())
        self.directory.prepare()
        self.writer = WriteBehind(
            self.directory,
            SPACE,
            lane,
            slab_bytes=SLAB_BYTES,
            most_queued_bytes=queue,
            clock=lambda: self.now_s,
        )
        self.folder = self.directory.root / SPACE.folder_name

    def write(self, *numbers: int) -> Write:
        return self.writer.write([record(number) for number in numbers])

    def found(self, *numbers: int) -> list[int]:
        """Which of these a fresh look at the disk finds, whole and right."""
        with contextlib.closing(Catalog(self.folder, SPACE)) as catalog:
            catalog.look()
            return found(catalog, numbers)
