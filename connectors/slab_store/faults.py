"""Damages what slabs hold, as `interlace check` asks for it: see
`KVConnectorBase_V1.inject_store_fault`. File I/O, on whatever thread asks.

No kind is one that the index shows, so that blocks are promised and their load fails.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from interlace.connectors.slab_store.layout import DamagedSlabError, Entry, SlabShape
from interlace.connectors.slab_store.slab import SUFFIX, Slab


def _flip(path: Path, shape: SlabShape, record: int) -> None:
    """One bit of the record's last byte."""
    with path.open("r+b") as file:
        file.seek(shape.record_at(record) + shape.record_bytes - 1)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([last ^ 1]))


def _erase(path: Path, shape: SlabShape, record: int) -> None:
    """As a file system may leave it that has lost power."""
    with path.open("r+b") as file:
        file.seek(shape.record_at(record))
        file.write(bytes(shape.record_bytes))


_FAULTS: Mapping[str, Callable[[Path, SlabShape, int], None]] = {
    "flipped": _flip,
    "erased": _erase,
}
FAULT_KINDS = tuple(_FAULTS)


def damage(folder: Path, kind: str, block_hash: bytes) -> set[bytes]:
    """Damage the block wherever it lies in the slabs of this folder. The hashes of what is lost: it
    alone, or nothing if it is not stored.

    Raises: `KeyError` for an unknown kind, `OSError`.
    """
    fault, is_hit = _FAULTS[kind], False
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            shape, entries = _look(path)
        except (DamagedSlabError, FileNotFoundError):
            continue
        for record in [one.record for one in entries if one.block_hash == block_hash]:
            fault(path, shape, record)
            is_hit = True
    return {block_hash} if is_hit else set()


def _look(path: Path) -> tuple[SlabShape, list[Entry]]:
    with Slab.open(path) as slab:
        return slab.header.shape, slab.look()
