"""What the two sides of PipelineConnector tell each other. Plain frozen values.

The scheduler side alone decides which record holds which block, and which one goes to make room.
The worker side copies between records and blocks as it is told, and says when it has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from interlace.connectors.slab_store.writing import StoredPlace
from interlace.engine.kv_connector import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


class Fetch(NamedTuple):
    """A record that is read from a file before it is loaded."""

    record: int
    place: StoredPlace


class MappedRecords(NamedTuple):
    """Records of a slab that is registered: loaded from where they lie, as those in memory are."""

    slab: str
    """Name of the file in the space's folder."""
    first: int
    """The number of its record 0; the others follow."""
    num_records: int


class StorePart(NamedTuple):
    """A record that is to be written to a file."""

    record: int
    block_hash: bytes
    parent_hash: bytes | None
    first_tokens: tuple[int, ...] = ()
    """What the prompt begins with, of a block without a parent: for people who look at a store."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoreOrder:
    """Write these records to files, behind everybody's back. They stay what they are until it is
    reported."""

    store_id: int
    parts: tuple[StorePart, ...]
    made_ns: int
    """When, since the epoch: what is reset later is not to find them."""


class RecordRun(NamedTuple):
    """Neighbours on both sides."""

    record: int
    """The first."""
    block_id: int
    """The first."""
    num_blocks: int


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """All that one request loads, or may load."""

    load_id: int
    request_id: str
    runs: tuple[RecordRun, ...]
    """In order of position."""
    is_async: bool
    """Beside the steps, and reported when it has ended; else within this step, layer by layer."""
    share: int | None = None
    """Load from the back, beside the steps, only so many blocks, until a `Share` says otherwise;
    the request computes those before. None: load all, from the front."""
    fetches: tuple[Fetch, ...] = ()
    """Of these records of `runs`, which are nobody's until then."""
    missing: tuple[int, ...] = ()
    """Block ids that were promised, and are in no run: what was to be loaded into them has gone."""
    checksums: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Record -> what it is to come to, of those of `runs` that lie in registered slabs: what has
    come is checked."""


class Share(NamedTuple):
    """How much of a request is loaded from the back: the rest of it is computed."""

    load_id: int
    revision: int
    """Counts what was said about this load, from 0, the load itself."""
    num_blocks: int


class ShareReport(NamedTuple):
    """How far a load from the back has come."""

    load_id: int
    revision: int
    """Of what the worker side was told last."""
    num_blocks: int
    """That it loads in all: more than it was told if those were under way already."""
    num_loaded: int
    """Of these, from the back on, that are in their pages."""
    has_ended: bool = False
    """Whether that is final: it is reported as received with this, though something may still be
    read into records of it that were not in its share."""


@dataclasses.dataclass(frozen=True, slots=True)
class Save:
    """Copy these blocks, all of which are full when this step has computed, into these records.

    The copy goes on beside later steps: the scheduler side sees to it that the blocks stay what
    they are until it was reported, or the save is in a later step's `fences`.
    """

    save_id: int
    runs: tuple[RecordRun, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineMetadata(KVConnectorMetadata):
    """One step's orders to the worker side."""

    step_id: int
    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    fences: frozenset[int] = frozenset()
    """Saves of earlier steps whose blocks this step hands on: when `handle_preemptions` returns,
    none of them reads any more, or what the step computes waits for it. What of it was not queued
    yet may be given up, and the save reported as failed."""
    release: frozenset[str] = frozenset()
    """Requests that were held and whose last save has ended: report them as sent."""
    shares: tuple[Share, ...] = ()
    """News for loads of earlier steps; those that have ended are past it."""
    stores: tuple[StoreOrder, ...] = ()
    closed: frozenset[str] = frozenset()
    """Slabs that the worker side said were closing: no load of this step or a later one is from
    there."""
    lost_loads: frozenset[int] = frozenset()
    """Loads of earlier steps whose blocks this step hands on: as with `fences`, and nothing is
    reported of them but their end in `loaded`."""
    num_tokens: int = 0
    """That the step computes."""
    timed_pairs: float | None = None
    """`num_pairs` of the `StepSample` that the step is to become; None if it is not."""
    expected_s: float = 0.0
    """How long the device will compute for who computes towards a load from the back; 0 if nobody
    does in this step, or if that is not known."""
    is_idle: bool = False
    """See `KVConnectorMetadata`."""

    @property
    def loads_within_step(self) -> bool:
        """Whether layers of the step wait for what it loads."""
        return any(not load.is_async for load in self.loads)


IDLE = PipelineMetadata(step_id=0, is_idle=True)
"""Of every step in which the worker side has nothing to do: it is not asked for that step at all,
and most steps are such."""


def num_pairs(num_tokens: int, num_context_tokens: int) -> float:
    """Pairs of a token and one that it attends to, of one request that computes `num_tokens` behind
    `num_context_tokens`."""
    return num_tokens * (num_context_tokens + num_tokens / 2)


class StepSample(NamedTuple):
    """How long the device computed for one step, to learn its speed from."""

    num_tokens: int
    """Computed in the step."""
    num_pairs: float
    """Of a token and one that it attends to, over all requests of the step: see `num_pairs`."""
    seconds: float
    """Without waiting for loads: of steps that loaded nothing within themselves."""


class LoadSample(NamedTuple):
    """How long a load took on its lane."""

    num_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineReport(KVConnectorWorkerMetadata):
    """What the worker side reports with a step."""

    copied: frozenset[int] = frozenset()
    """Saves that have ended well: their records hold what their blocks held."""
    failed: frozenset[int] = frozenset()
    """Saves that have not, and never will."""
    loaded: frozenset[int] = frozenset()
    """Loads of any kind that read no record any more, whether they went well or not."""
    shares: tuple[ShareReport, ...] = ()
    """Of loads from the back: of each that has come on, and of each in `loaded` that was not lost.
    What an ended one said with its end holds, whatever it was told since."""
    steps: tuple[StepSample, ...] = ()
    loads: tuple[LoadSample, ...] = ()
    stored: frozenset[int] = frozenset()
    """Store orders that read their records no more, whether they were written or not."""
    unfetched: frozenset[int] = frozenset()
    """Records of the fetches of loads in `loaded` that could not be read, or are damaged."""
    unneeded: frozenset[int] = frozenset()
    """Those of `unfetched` whose blocks were computed: nothing has failed."""
    damaged: frozenset[int] = frozenset()
    """Records of loads in `loaded`, fetched ones or of registered slabs, that are of no use: what
    lies there is not what was written, or has gone."""
    fetches: tuple[LoadSample, ...] = ()
    unstored: frozenset[int] = frozenset()
    """Records of the orders in `stored` that were not written."""
    counts: tuple[tuple[str, int], ...] = ()
    """Names of `PipelineStats` that this side counts, and how many more since the last report."""
    mapped: tuple[MappedRecords, ...] = ()
    """Slabs that were registered."""
    closing: frozenset[str] = frozenset()
    """Registered slabs that are to go: see `PipelineMetadata.closed`."""
    levels: tuple[tuple[str, int], ...] = ()
    """Names of `LEVELS` that this side knows, and how they stand, of those that have changed."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> PipelineReport:
        """Both. There is one worker: only `MultiConnector` and empty steps bring two together."""
        assert isinstance(other, PipelineReport)
        return PipelineReport(
            self.copied | other.copied,
            self.failed | other.failed,
            self.loaded | other.loaded,
            self.shares + other.shares,
            self.steps + other.steps,
            self.loads + other.loads,
            self.stored | other.stored,
            self.unfetched | other.unfetched,
            self.unneeded | other.unneeded,
            self.damaged | other.damaged,
            self.fetches + other.fetches,
            self.unstored | other.unstored,
            self.counts + other.counts,
            self.mapped + other.mapped,
            self.closing | other.closing,
            self.levels + other.levels,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineHandshake(KVConnectorHandshakeMetadata):
    """What the worker side found out when it was made."""

    num_records: int
    """That fit into the memory it was given."""
    record_bytes: int
    """Of one block over all layers."""
    load_bytes_per_s: float
    """Of a long copy from the records to the pages, measured; 0 if it was not."""
    mapped: tuple[MappedRecords, ...] = ()
    """Slabs that were registered by then."""
