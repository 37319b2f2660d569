"""What a connector's scheduler side asks of where blocks are stored: here, of host memory alone.

`sched_files.py` has files behind it. Event loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from interlace.connectors.pipeline.host_index import HostIndex
from interlace.connectors.pipeline.messages import Fetch, PipelineReport, StoreOrder
from interlace.connectors.pipeline.sched_stats import Counter
from interlace.connectors.slab_store.catalog import Place
from interlace.engine.transfer_picture import TierPicture

Mapped: TypeAlias = Mapping[int, Place]
"""Records in registered slabs, by their numbers, and where they lie: they are loaded from there."""


class AtHand(NamedTuple):
    """Blocks that lie in registered slabs. Plain dictionaries, since there are hundreds."""

    records: Mapping[bytes, int]
    """Block hash -> record."""
    mapped: Mapped
    """Of the same blocks."""


NOTHING_AT_HAND = AtHand({}, {})
_DROPS = {
    "blocks_dropped": "no room",
    "blocks_not_saved": "copy failed",
    "blocks_failed_to_load": "load failed",
}
"""`PipelineStats`' names -> reasons, for people."""


class Stored(NamedTuple):
    """How much of a request is stored."""

    num_blocks: int
    """From the first one on."""
    num_fetched: int = 0
    """Of these, what has to be read first."""
    at_hand: AtHand = NOTHING_AT_HAND
    """Of these, what lies in registered slabs."""

    @property
    def fetched_share(self) -> float:
        """Of all of them."""
        return self.num_fetched / self.num_blocks if self.num_blocks else 0.0


class Taken(NamedTuple):
    """Records for a load of some blocks."""

    records: dict[bytes, int]
    """Block hash -> where it is loaded from. Of those that are stored in memory pinned ones."""
    fetches: tuple[Fetch, ...] = ()
    """Into the others."""
    fetched: tuple[bytes, ...] = ()
    """The blocks of these, in the same order."""
    missing: tuple[bytes, ...] = ()
    """What has no record: its file has gone since it was promised, or memory is full."""
    mapped: Mapped = NOTHING_AT_HAND.mapped
    """What is loaded from where it lies."""


class MemoryTier:
    """See the module's docstring. What is about files does nothing."""

    def __init__(self, index: HostIndex) -> None:
        """Over these records."""
        self._index = index

    # ---------------------------------------------------------------- loads

    def refresh(self) -> None:
        """Somebody asks: see what others have stored, if it is time for that."""

    def look_up(self, block_hashes: Sequence[bytes]) -> Stored:
        """How many of these, from the first on, are stored."""
        known = itertools.takewhile(self._index.records.__contains__, block_hashes)
        return Stored(sum(1 for _ in known))

    def take(self, block_hashes: Sequence[bytes], at_hand: AtHand = NOTHING_AT_HAND) -> Taken:
        """For a load of these; `at_hand`: what was found in registered slabs when it was promised.
        `settle` is owed for what is fetched, `settle_mapped` for what is mapped, and
        `HostIndex.unpin` for the rest."""
        records = self._index.pin(block_hashes)
        return Taken(dict(zip(block_hashes, records, strict=True)))

    def avoid(self, records: Iterable[int], mapped: Mapped) -> None:
        """What was to be fetched into these, or is one of those that lie in registered slabs, has
        not come, and others may ask for it before its load is settled."""

    def settle(
        self,
        records: Iterable[int],
        unfetched: frozenset[int],
        damaged: frozenset[int],
        parents: Mapping[bytes, bytes],
        unneeded: Container[int] = (),
    ) -> None:
        """A load has ended, and nothing writes into its records any more: those that it fetched, in
        order. `unfetched` could not be read; of these `damaged` never will be, and `unneeded` were
        not needed any more. `parents`: the block before each, if it is not the first."""

    def settle_mapped(self, mapped: Mapped, damaged: Container[int]) -> None:
        """A load from these has ended."""

    def note_load(self, first_hash: bytes) -> None:
        """A prompt that begins with this block was loaded, from files or partly so."""

    # ---------------------------------------------------------------- stores

    def note_prompt(self, first_hash: bytes, first_tokens: tuple[int, ...]) -> None:
        """What the prompts that begin with this block begin with."""

    def offer(self, block_hashes: Sequence[bytes], parent_hash: bytes | None) -> None:
        """These blocks, neighbours behind `parent_hash`, were put into memory, or used there: write
        those that are worth it."""

    def needs_no_save(self, block_hash: bytes) -> bool:
        """Whether the block lies in a file that is as good as memory, or would not stay there."""
        return False

    # ---------------------------------------------------------------- messages

    @property
    def has_orders(self) -> bool:
        """Whether there is something to tell the worker side, or to hear from it."""
        return False

    def take_orders(self) -> tuple[StoreOrder, ...]:
        """What the worker side is to be told, once."""
        return ()

    def take_closed(self) -> frozenset[str]:
        """What the worker side is to be told of closing slabs, once."""
        return frozenset()

    def follow(self, report: PipelineReport) -> None:
        """What the worker side reports of files, once the loads that it names have ended."""

    def forget(self) -> None:
        """Nothing that is stored, being stored or being fetched by now is found again by this
        engine."""

    # ---------------------------------------------------------------- for people

    def tiers_seen(self, counter: Counter, block_bytes: int) -> tuple[TierPicture, ...]:
        """What is kept where, the nearest first. Constant time."""
        from_files = counter.total("blocks_fetched") + counter.total("blocks_loaded_from_files")
        memory = TierPicture(
            name="memory",
            num_blocks=self._index.num_stored,
            num_room=self._index.num_records,
            block_bytes=block_bytes,
            num_hits=max(0, counter.total("blocks_loaded") - from_files),
            num_stored=counter.total("blocks_saved"),
            num_evicted=counter.total("records_evicted"),
            drops=drops_of(counter, _DROPS),
        )
        return (memory,)

    def close(self, timeout_s: float) -> bool:
        """Look no more; False if that takes longer."""
        return True


def drops_of(counter: Counter, names: Mapping[str, str]) -> dict[str, int]:
    """Reason -> blocks, of the reasons that there were; `names`: a counted name -> the reason."""
    totals = ((reason, counter.total(name)) for name, reason in names.items())
    return {reason: number for reason, number in totals if number}
