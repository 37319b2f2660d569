"""Free records, in extents of neighbours: who asks gets as few runs as it can.

An extent is an aligned run of `extent_size` records; the last one may be shorter. Knows nothing of
what records hold. Any one thread.
"""

from __future__ import annotations

LARGEST_EXTENT = 64
"""Records of an extent. A prefix of 8,192 tokens in a memory that was used for long lies in eight
or a few more, and comes at 0.91 of the link's speed or better; with extents of 32 it came at 0.83
to 0.88 (an NVIDIA H200)."""
FEWEST_EXTENTS = 8
"""A small memory has smaller extents rather than fewer."""


class FreeExtents:
    """Which records are free, in O(1) a record."""

    def __init__(self, num_records: int) -> None:
        """All are free."""
        self.num_records = num_records
        self.extent_size = LARGEST_EXTENT
        """In records; a power of two."""
        while self.extent_size > 1 and num_records // self.extent_size < FEWEST_EXTENTS:
            self.extent_size //= 2
        num_extents = -(-num_records // self.extent_size)
        self._is_free = bytearray(b"\1" * num_records)
        self._num_free_in = [self.length_of(extent) for extent in range(num_extents)]
        # In order of age: insertion order is what a dict has and a set has not.
        self._whole = dict.fromkeys(range(num_extents))
        self._partly: dict[int, None] = {}
        self._num_free = num_records

    def __len__(self) -> int:
        """Free records."""
        return self._num_free

    def __contains__(self, record: int) -> bool:
        """Whether `record`, any number, is a free one."""
        return 0 <= record < self.num_records and bool(self._is_free[record])

    def extent_of(self, record: int) -> int:
        """The number of its extent."""
        return record // self.extent_size

    def length_of(self, extent: int) -> int:
        """Records of the extent."""
        return min(self.extent_size, self.num_records - extent * self.extent_size)

    def num_free_in(self, extent: int) -> int:
        """Free records of the extent."""
        return self._num_free_in[extent]

    def take(self, num_records: int, after: int | None) -> list[int]:
        """Take free records, of which there are enough, in the order in which to use them.

        First the neighbours behind record `after`, then whole extents, then what is left of others.
        """
        taken: list[int] = []
        while len(taken) < num_records:
            begin = self._next_run(after, num_records - len(taken))
            end = self._end_of_run(begin, num_records - len(taken))
            self._mark_taken(begin, end)
            taken += range(begin, end)
            after = end - 1
        return taken

    def _next_run(self, after: int | None, num_records: int) -> int:
        """Where to begin.

        With whole extents as far before the oldest one as they are neighbours, and wanted: a prefix
        that has made room was let go from its tail on, so the oldest is the last of them.
        """
        if after is not None and after + 1 in self:
            return after + 1
        extent = next(iter(self._whole or self._partly))
        most = extent - -(-num_records // self.extent_size) + 1
        while extent in self._whole and extent > most and extent - 1 in self._whole:
            extent -= 1
        return self._is_free.index(1, extent * self.extent_size)

    def _end_of_run(self, begin: int, longest: int) -> int:
        """Up to the end of the extent, of the free neighbours, or of what is asked for."""
        extent = self.extent_of(begin)
        limit = min(begin + longest, extent * self.extent_size + self.length_of(extent))
        end = self._is_free.find(0, begin, limit)
        return limit if end == -1 else end

    def _mark_taken(self, begin: int, end: int) -> None:
        """[begin, end) are free, and of one extent."""
        extent = self.extent_of(begin)
        self._is_free[begin:end] = bytes(end - begin)
        self._num_free -= end - begin
        self._num_free_in[extent] -= end - begin
        self._whole.pop(extent, None)
        if self._num_free_in[extent]:
            self._partly[extent] = None
        else:
            self._partly.pop(extent, None)

    def give_back(self, record: int) -> None:
        """`record`, which is not free, is free now."""
        assert not self._is_free[record]
        extent = self.extent_of(record)
        self._is_free[record] = 1
        self._num_free += 1
        self._num_free_in[extent] += 1
        if self._num_free_in[extent] == self.length_of(extent):
            self._partly.pop(extent, None)
            self._whole[extent] = None
        else:
            self._partly[extent] = None

    def __repr__(self) -> str:
        return f"<FreeExtents {self._num_free} of {self.num_records}, whole={len(self._whole)}>"
