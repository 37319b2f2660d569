"""Slabs that are made directly, without an engine: records of any size, filled by numbers.

Blocks on files: not on the event loop.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from interlace.bench.session import SEED
from interlace.bench.store.page_cache import slab_files
from interlace.connectors.kv_folders.identity import KVIdentity
from interlace.connectors.pipeline.options import PipelineOptions
from interlace.connectors.slab_store.layout import HASH_BYTES, Entry, SlabHeader, SlabShape
from interlace.connectors.slab_store.slab import Slab
from interlace.connectors.slab_store.slab_writer import NewRecord, SlabWriter
from interlace.connectors.slab_store.space import Space
from interlace.connectors.slab_store.writing import StoredPlace
from interlace.layers.kv_memory import PageShape

_AT_ONCE = 64
"""Records that are written in a row."""


def made_up_space(shape: PageShape) -> Space:
    """Of blocks of that shape that no model has computed."""
    return Space(
        identity=KVIdentity(model="00" * 32, dtype="none", block_size=shape.block_size),
        model_name="made up by interlace bench store",
        num_layers=shape.num_layers,
        page_bytes=shape.page_bytes,
    )


def records_in_slab(record_bytes: int) -> int:
    """As many as the connector puts into one file."""
    return SlabShape.within(PipelineOptions().slab_bytes, record_bytes).num_records


def made_up_hashes(count: int) -> list[bytes]:
    """Of blocks; the same ones each time."""
    draw = random.Random(SEED)
    return [draw.randbytes(HASH_BYTES) for _ in range(count)]


def fill(
    folder: Path, space: Space, block_hashes: Sequence[bytes], *, slab_records: int
) -> list[StoredPlace]:
    """Write a record for each of these, one prefix, into slabs of so many records; where they lie.

    `folder` is the space's, and exists. Raises: `OSError`.
    """
    header = SlabHeader(space.facts, SlabShape(space.record_bytes, slab_records))
    places: list[StoredPlace] = []
    parent: bytes | None = None
    for of_slab in _batched(block_hashes, slab_records):
        writer = SlabWriter.create(folder, header)
        try:
            for some in _batched(of_slab, _AT_ONCE):
                records = []
                for block_hash in some:
                    records.append(NewRecord(block_hash, parent, _content(block_hash, space)))
                    parent = block_hash
                places += _places(writer.path.name, writer.add(records))
        finally:
            writer.close()
    return places


def count_records(folder: Path) -> int:
    """Published ones, of all slabs below `folder`. Raises: `OSError`, `DamagedSlabError`."""
    count = 0
    for path in slab_files(folder):
        with Slab.open(path) as slab:
            count += len(slab.look())
    return count


def _content(block_hash: bytes, space: Space) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Repeats the hash, so no two records are alike."""
    count = -(-space.record_bytes // len(block_hash))
    return np.frombuffer(block_hash * count, np.uint8)[: space.record_bytes].copy()


def _places(slab: str, entries: Sequence[Entry]) -> list[StoredPlace]:
    return [StoredPlace(slab, entry.record, entry.checksum) for entry in entries]


def _batched(items: Sequence[bytes], count: int) -> Iterator[Sequence[bytes]]:
    for first in itertools.count(0, count):
        if first >= len(items):
            return
        yield items[first : first + count]
