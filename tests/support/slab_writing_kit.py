"""A WriteBehind over small slabs in a directory of its own, for tests of writing and reading."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from interlace.connectors.kv_folders.identity import KVIdentity
from interlace.connectors.slab_store.catalog import Catalog
from interlace.connectors.slab_store.directory import Limits, SlabDirectory
from interlace.connectors.slab_store.slab_writer import NewRecord
from interlace.connectors.slab_store.space import Space
from interlace.connectors.slab_store.writing import Write, WriteBehind
from interlace.engine.ports import Lane

PATIENCE_S = 20.0
SPACE = Space(
    identity=KVIdentity(model="ab" * 32, dtype="float32", block_size=4),
    model_name="toy",
    num_layers=2,
    page_bytes=700,
)
RECORD_BYTES = SPACE.record_bytes
SLAB_BYTES = 8192 + 4096 + 3 * (4096 + 128)
"""Three records."""


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
        catalog = Catalog(self.folder, SPACE)
        catalog.look()
        right = []
        for number in numbers:
            place = catalog.find(block_hash(number))
            if place is not None:
                buffer = np.empty(RECORD_BYTES, np.uint8)
                place.slab.read(place.entry, buffer)
                assert np.array_equal(buffer, record(number).data)
                right.append(number)
        catalog.close()
        return right


def block_hash(number: int) -> bytes:
    return number.to_bytes(32, "big")


def record(number: int) -> NewRecord:
    data = np.random.default_rng(number).integers(0, 256, RECORD_BYTES, np.uint8)
    return NewRecord(block_hash(number), block_hash(number - 1) if number else None, data)
