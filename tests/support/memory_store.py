"""A store of KV blocks in host memory, which can be damaged in the ways in which stores fail.

Shared by all sides of all engines that are to see each other's KV: hand the same object to each of
them. Every method is one operation on a dict, so any thread may call it.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]


class LostBlockError(Exception):
    """What is listed as stored is not there, or not what was stored."""


@dataclasses.dataclass(frozen=True)
class Record:
    """One block as one rank saw it."""

    layers: tuple[Bytes, ...]
    """Per layer, in the order of registration, the bytes of the block's pages."""
    checksums: tuple[int, ...]
    is_damaged: bool = False

    @classmethod
    def of(cls, layers: tuple[Bytes, ...]) -> Record:
        """A record that vouches for these bytes."""
        return cls(layers, tuple(zlib.crc32(layer.data) for layer in layers))

    def read(self, layer: int) -> Bytes:
        """The bytes of layer number `layer`. Raises: `LostBlockError`, `OSError`."""
        if layer >= len(self.layers):
            raise LostBlockError
        if zlib.crc32(self.layers[layer].data) != self.checksums[layer]:
            raise LostBlockError
        return self.layers[layer]


class _Unreadable(Record):
    def read(self, layer: int) -> Bytes:
        raise OSError("the disk says no")


def _missing(record: Record) -> Record:
    return dataclasses.replace(record, layers=())


def _raises(record: Record) -> Record:
    return _Unreadable(record.layers, record.checksums, is_damaged=True)


def _short(record: Record) -> Record:
    """The last layer ends too soon, so all others can be loaded."""
    *whole, last = record.layers
    return dataclasses.replace(record, layers=(*whole, last.ravel()[:-1].copy()))


def _flipped(record: Record) -> Record:
    """One bit of the first layer is wrong."""
    first = record.layers[0].copy()
    first.reshape(-1)[first.size // 2] ^= 1
    return dataclasses.replace(record, layers=(first, *record.layers[1:]))


FAULTS: Mapping[str, Callable[[Record], Record]] = {
    "missing": _missing,
    "raises": _raises,
    "short": _short,
    "flipped": _flipped,
}
"""Kind of damage -> what it makes of a record."""


class MemoryStore:
    """Key -> the record of each rank. A key is listed as soon as all ranks' records are there, and
    for as long as nobody has found one of them damaged."""

    def __init__(self) -> None:
        self._records: dict[bytes, dict[int, Record]] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._records

    def __len__(self) -> int:
        return len(self._records)

    def put(self, key: bytes, records: Mapping[int, Record]) -> None:
        """List a block, by rank."""
        self._records[key] = dict(records)

    def get(self, key: bytes, rank: int) -> Record:
        """One rank's record. Raises: `LostBlockError`."""
        record = self._records.get(key, {}).get(rank)
        if record is None:
            raise LostBlockError
        return record

    def forget(self, key: bytes) -> bool:
        """List the block no more; whether it was listed."""
        return self._records.pop(key, None) is not None

    def clear(self) -> None:
        """Forget all."""
        self._records.clear()

    def damage(self, kind: str, key: bytes, rank: int) -> bool:
        """Let one rank's loads of the block fail, which stays listed. False: it is not stored."""
        records = self._records.get(key, {})
        if rank not in records:
            return False
        if not records[rank].is_damaged:
            records[rank] = FAULTS[kind](dataclasses.replace(records[rank], is_damaged=True))
        return True

    def __repr__(self) -> str:
        return f"<MemoryStore {len(self)} blocks>"
