"""Which host record holds which block, and which goes to make room. Scheduler side, pure Python.

A record is *free*; *pending*, while a save copies into it; or *stored*, and found by the hash of
its block. Loads pin stored records: until they are let go, nothing else is copied into them.

**What goes first.** Stored records are in order of their last use; pinned ones are passed over.
Using a prefix makes all of its records the newest, its head last of all, and a block that is
stored later goes right before the block that it follows. So of a prefix the tail is lost before
the head, without which it could not be hit.

**Neighbours.** Copies of neighbouring records are faster. A run is allocated behind the record of
the block before it, if that is free, then in whole extents, then in what is left of others. When
room has to be made for n records, the oldest n and two extents more are looked at: extents all of
whose records are free or among those go first, as wholes; what else is needed goes one by one, the
oldest first. So a record may outlive at most n records and two extents that were used after it,
and up to an extent more than was needed may be free afterwards.

Every operation takes time in proportion to the records that it names, or allocates.
"""

from __future__ import annotations

import array
import collections
from collections.abc import Container, Mapping, Sequence

from interlace.connectors.pipeline.sched_extents import FreeExtents
from interlace.connectors.pipeline.sched_recency import Recency


class HostIndex:
    """See the module's docstring. Event loop only."""

    def __init__(self, num_records: int) -> None:
        """All records are free. `num_records` is at least 1."""
        assert num_records >= 1
        self._free = FreeExtents(num_records)
        self._order = Recency(num_records)  # of stored records
        self._hash_in: dict[int, bytes] = {}  # of stored ones
        self._num_pins = array.array("q", [0]) * num_records
        self._record_of: dict[bytes, int] = {}
        self.num_evicted = 0
        """Records that made room for others, since the start."""

    @property
    def num_records(self) -> int:
        """Of all states."""
        return self._free.num_records

    @property
    def num_free(self) -> int:
        """Records without content."""
        return len(self._free)

    @property
    def num_stored(self) -> int:
        """Records that can be hit."""
        return len(self._record_of)

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether the block is stored."""
        return block_hash in self._record_of

    @property
    def records(self) -> Mapping[bytes, int]:
        """Block hash -> the record that holds the block, of all that are stored. A view."""
        return self._record_of

    def find(self, block_hash: bytes) -> int | None:
        """The record that holds the block, if it is stored."""
        return self._record_of.get(block_hash)

    # ---------------------------------------------------------------- saves

    def allocate(
        self,
        num_records: int,
        *,
        after: int | None = None,
        keep: Container[bytes] = (),
    ) -> list[int] | None:
        """Records for a run of blocks, in order; they are pending then.

        `after` is the record of the block before the run. Blocks in `keep` stay. None, and nothing
        has changed, if there are not as many that are free or may go.
        """
        missing = num_records - len(self._free)
        if missing > 0 and not self._make_room(missing, keep):
            return None
        return self._free.take(num_records, after)

    def store(
        self, records: Sequence[int], block_hashes: Sequence[bytes], parent_hash: bytes | None
    ) -> None:
        """Pending records hold these blocks now; they follow the block `parent_hash`, or none. What
        is stored already stays where it is, and the new record of it is free."""
        stored, hash_in = self._record_of, self._hash_in
        place = None if parent_hash is None else stored.get(parent_hash)
        fresh: list[int] = []
        for record, block_hash in zip(records, block_hashes, strict=True):
            known = stored.setdefault(block_hash, record)
            if known == record:
                hash_in[record] = block_hash
                fresh.append(record)
                continue
            self._free.give_back(record)
            self._order.add_run(fresh, place)
            fresh, place = [], known
        self._order.add_run(fresh, place)

    def give_up(self, records: Sequence[int]) -> None:
        """Pending records are free again: their save has ended, and nothing came of it."""
        for record in records:
            self._free.give_back(record)

    # ---------------------------------------------------------------- loads

    def touch(self, block_hashes: Sequence[bytes]) -> None:
        """A prefix was used: what of it is stored goes last, its head last of all."""
        found = map(self._record_of.get, reversed(block_hashes))
        self._order.refresh([record for record in found if record is not None])

    def pin(self, block_hashes: Sequence[bytes]) -> list[int]:
        """The records of stored blocks, which a load reads until `unpin`."""
        records = list(map(self._record_of.__getitem__, block_hashes))
        num_pins = self._num_pins
        for record in records:
            num_pins[record] += 1
        return records

    def unpin(self, records: Sequence[int]) -> None:
        """A load that has pinned these reads them no more."""
        num_pins, stored = self._num_pins, self._hash_in
        for record in records:
            num_pins[record] -= 1
            if record not in stored and not num_pins[record]:
                self._free.give_back(record)

    # ---------------------------------------------------------------- forgetting

    def forget(self, record: int) -> None:
        """What the record holds cannot be hit any more; it is free when it has no pins. Nothing
        happens to one that is not stored."""
        block_hash = self._hash_in.pop(record, None)
        if block_hash is None:
            return
        del self._record_of[block_hash]
        self._order.remove(record)
        if not self._num_pins[record]:
            self._free.give_back(record)

    def clear(self) -> None:
        """Forget all that is stored."""
        for record in list(self._record_of.values()):
            self.forget(record)

    def _make_room(self, missing: int, keep: Container[bytes]) -> bool:
        """Let `missing` records go, or a few more; False, and nothing has changed, if it cannot."""
        oldest = self._oldest(missing + 2 * self._free.extent_size, keep)
        if len(oldest) < missing:
            return False
        victims = dict.fromkeys(self._of_whole_extents(oldest, missing))
        for record in oldest:
            if len(victims) >= missing:
                break
            victims[record] = None
        for record in victims:
            self.forget(record)
        self.num_evicted += len(victims)
        return True

    def _oldest(self, most: int, keep: Container[bytes]) -> list[int]:
        found: list[int] = []
        for record in self._order:
            if len(found) == most:
                break
            if not self._num_pins[record] and self._hash_in[record] not in keep:
                found.append(record)
        return found

    def _of_whole_extents(self, oldest: Sequence[int], missing: int) -> list[int]:
        """Those of `oldest` with whom their extent is free, until there are `missing`."""
        in_extent = collections.defaultdict[int, list[int]](list)
        for record in oldest:
            in_extent[self._free.extent_of(record)].append(record)
        found: list[int] = []
        for extent, records in in_extent.items():
            if len(found) >= missing:
                break
            if len(records) + self._free.num_free_in(extent) == self._free.length_of(extent):
                found += records
        return found

    def __repr__(self) -> str:
        return (
            f"<HostIndex stored={self.num_stored} free={self.num_free} of {self.num_records},"
            f" pinned={sum(map(bool, self._num_pins))}>"
        )
