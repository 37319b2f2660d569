"""Where records lie: in host memory, and beside it in files that are mapped.

Records have numbers. Those in host memory come first; what is mapped gets numbers of its own, with
a gap before them, so that records of two mappings are never neighbours. A number is never used
again, so who still has an old one finds nothing.

Device thread; `unmap` on any, if nobody uses what it unmaps, and not at once with `map`.
"""

from __future__ import annotations

import bisect
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from interlace.engine.errors import ConnectorError
from interlace.layers.cuda_copies import Addresses

RecordBytes: TypeAlias = NDArray[np.uint8]


class _Mapping(NamedTuple):
    """Records that are neighbours in memory."""

    first: int
    rows: RecordBytes
    """[records, num_layers, page_bytes]."""

    @property
    def end(self) -> int:
        """The number behind the last one."""
        return self.first + len(self.rows)

    @property
    def address(self) -> int:
        """Of the first one."""
        return int(self.rows.ctypes.data)


class RecordSpace:
    """See the module's docstring."""

    def __init__(self, host: torch.Tensor) -> None:
        """`host`: uint8 [num_records, num_layers, page_bytes], contiguous; records 0 and following,
        which are written to as well."""
        self.host = host
        self.num_host_records = len(host)
        self._mappings: list[_Mapping] = []  # in order of their numbers
        self._next = len(host) + 1
        self._host_at, self._pitch = host.data_ptr(), host.stride(0)

    @classmethod
    def over(cls, records: torch.Tensor | RecordSpace) -> RecordSpace:
        """The same, or one of these alone."""
        return records if isinstance(records, RecordSpace) else cls(records)

    def map(self, rows: RecordBytes) -> int:
        """Records that lie elsewhere, to be loaded from, until `unmap`: uint8 [records, num_layers,
        page_bytes], contiguous, and on a GPU registered. The number of the first one.

        Raises: `ConnectorError` if they are other records than those in host memory.
        """
        if rows.shape[1:] != self.host.shape[1:] or not rows.flags.c_contiguous or not len(rows):
            raise ConnectorError(
                f"records of shape {rows.shape[1:]} cannot lie beside those of shape"
                f" {tuple(self.host.shape[1:])}: map files of this model alone."
            )
        first, self._next = self._next, self._next + len(rows) + 1
        self._mappings.append(_Mapping(first, rows))
        return first

    def unmap(self, first: int) -> None:
        """Nothing finds these records any more. What was queued before may still read them."""
        self._mappings = [one for one in self._mappings if one.first != first]

    def holds(self, record: int, count: int) -> bool:
        """Whether these, neighbours from `record` on, can be loaded in one piece."""
        if record < self.num_host_records:
            return record >= 0 and record + count <= self.num_host_records
        found = self._find(record)
        return found is not None and record + count <= found.end

    def _find(self, record: int) -> _Mapping | None:
        mappings = self._mappings  # as they are now
        place = bisect.bisect_right(mappings, record, key=lambda one: one.first) - 1
        found = mappings[place] if place >= 0 else None
        return found if found is not None and record < found.end else None

    def address(self, record: int) -> int:
        """Of one that is held."""
        if record < self.num_host_records:
            return self._host_at + record * self._pitch
        found = self._find(record)
        assert found is not None, "it is held"
        return found.address + (record - found.first) * self._pitch

    def addresses(self, records: Addresses) -> Addresses:
        """Of many that are held: uint64, of the same shape."""
        pitch = np.uint64(self._pitch)
        mappings = self._mappings  # as they are now: another thread may unmap some meanwhile
        if not mappings or not records.size or int(records.max()) < self.num_host_records:
            return np.uint64(self._host_at) + records * pitch
        firsts = np.array([0, *(one.first for one in mappings)], np.uint64)
        places = np.array([self._host_at, *(one.address for one in mappings)], np.uint64)
        which = np.searchsorted(firsts, records, side="right") - 1
        found: Addresses = places[which] + (records - firsts[which]) * pitch
        return found

    def rows(self, record: int, count: int) -> RecordBytes:
        """[count, num_layers, page_bytes] of held ones, for the CPU."""
        if record < self.num_host_records:
            host: RecordBytes = self.host[record : record + count].numpy()
            return host
        found = self._find(record)
        assert found is not None, "they are held"
        return found.rows[record - found.first :][:count]

    def __repr__(self) -> str:
        return f"<RecordSpace host={self.num_host_records} mapped={self._mappings!r}>"
