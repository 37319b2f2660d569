"""The worker side of a store of files: what is read before it is loaded, what is written behind.

Host memory stands in between: a block is read into a record of it, and loaded from there; a block
that was saved to a record is written from there. Device thread; files are read and written on
lanes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from interlace.connectors.pipeline.messages import (
    Fetch,
    LoadSample,
    PipelineMetadata,
    RecordRun,
    StoreOrder,
)
from interlace.connectors.pipeline.options import PipelineOptions
from interlace.connectors.pipeline.store_directory import prepare_directory
from interlace.connectors.pipeline.worker_file_counts import FileCounts
from interlace.connectors.pipeline.worker_maps import (
    NOTHING_REGISTERED,
    NothingRegistered,
    RegisteredSlabs,
)
from interlace.connectors.slab_store.checksum import COLUMNS, factors
from interlace.connectors.slab_store.faults import damage
from interlace.connectors.slab_store.layout import DamagedSlabError
from interlace.connectors.slab_store.mapping import Scout
from interlace.connectors.slab_store.read_queue import Read
from interlace.connectors.slab_store.reading import WORK_BYTES, KnownSlabs, Reads
from interlace.connectors.slab_store.slab_writer import NewRecord
from interlace.connectors.slab_store.space import Space
from interlace.connectors.slab_store.writing import Write, WriteBehind
from interlace.engine.ports import Lanes
from interlace.layers.cuda_host_memory import HostMemory
from interlace.layers.hardware.host import usable_cores
from interlace.layers.page_sums import PageSums
from interlace.layers.record_space import RecordSpace

if TYPE_CHECKING:
    import torch

_MOST_READ_LANES, _LEAST_READ_LANES = 16, 4
"""On the host of an NVIDIA H200, of 16 cores, sixteen threads read 38 to 44 GB/s from the page
cache, 32 read 30, fourteen 35 to 42, twelve 32 to 40, eight 25 to 32, and one 4."""
_CORES_LEFT = 2
"""For the event loop and the device thread. With a lane on each core they got none for up to 5 ms
at a time, and with two left for 1.4 at most."""
_BACKWARD_WORK_BYTES = 4 << 20
"""Of one work, where files are too slow to wait for: all lanes share the disk, so what they have
begun ends at about the same time, and who computes towards it has to wait for the last ones first.
With 256 MiB begun, of a disk of 2 GB/s, the two met after 214 ms, and with 96 MiB after 190."""
ROW_BYTES = 4 * COLUMNS
"""Of a checksum's rows."""
_SHARE_OF_MEMORY = 4
"""No more than this part of host memory waits to be written: else saves find no record."""


def num_read_lanes() -> int:
    """Threads that read, on this machine."""
    return min(_MOST_READ_LANES, max(_LEAST_READ_LANES, usable_cores() - _CORES_LEFT))


def without_records(runs: Iterable[RecordRun], records: Container[int]) -> tuple[RecordRun, ...]:
    """The same runs, but for blocks that would be loaded from one of `records`."""
    left: list[RecordRun] = []
    for record, block_id, num_blocks in runs:
        kept = (i for i in range(num_blocks) if record + i not in records)
        for _, group in itertools.groupby(enumerate(kept), lambda pair: pair[1] - pair[0]):
            places = [place for _, place in group]
            left.append(RecordRun(record + places[0], block_id + places[0], len(places)))
    return tuple(left)


class Fetching:
    """Reads of one load."""

    def __init__(self, fetches: Iterable[Fetch], reads: Iterable[Read], begun_s: float) -> None:
        self._reads = dict(zip((one.record for one in fetches), reads, strict=True))
        self.begun_s = begun_s
        """By the clock of `FileWork`."""

    def has_ended(self, record: int) -> bool:
        """Whether the read into that one has, well or badly."""
        return self._reads[record].is_done

    def error_of(self, record: int) -> BaseException | None:
        """Why nothing came into that one, once it has ended."""
        return self._reads[record].error

    def cancel(self, records: Iterable[int]) -> None:
        """Nothing need be read into these any more."""
        for record in records:
            self._reads[record].cancel()

    @property
    def is_settled(self) -> bool:
        """Whether none writes into its record any more."""
        return all(read.is_settled for read in self._reads.values())

    @property
    def failed(self) -> set[int]:
        """Records that were not read, of those whose reads have ended."""
        return {record for record, read in self._reads.items() if read.error is not None}

    @property
    def damaged(self) -> set[int]:
        """Those of them for which another try is of no use."""
        final = (DamagedSlabError, FileNotFoundError)
        return {record for record, read in self._reads.items() if isinstance(read.error, final)}

    def sample(self, record_bytes: int, now_s: float) -> LoadSample | None:
        """How long it took, if it went well: of the reads that have ended."""
        ended = [read for read in self._reads.values() if read.is_done]
        if not ended or any(read.error is not None for read in ended):
            return None
        return LoadSample(len(ended) * record_bytes, now_s - self.begun_s)


class FileWork:
    """See the module's docstring."""

    def __init__(
        self,
        options: PipelineOptions,
        space: Space,
        records: npt.NDArray[np.uint8],
        lanes: Lanes,
        *,
        sums: PageSums | None = None,
        maps: RegisteredSlabs | NothingRegistered = NOTHING_REGISTERED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`records`: [num_records, num_layers, page_bytes]. `sums`: by which who loads checks what
        has come; None: who reads does. `maps`: slabs that are loaded from directly. Makes the
        store's directory.

        Raises: `ConfigError` if the directory is something else, or cannot be used.
        """
        self.sums = sums
        self.maps = maps
        directory = prepare_directory(options)
        self._folder = directory.root / space.folder_name
        self._rows = records.reshape(len(records), -1)
        self._clock = clock
        self._reads = Reads(
            KnownSlabs(self._folder),
            lanes,
            num_lanes=num_read_lanes(),
            deadline_s=options.read_deadline_s,
            checks=sums is None,
            clock=clock,
        )
        self._writes = WriteBehind(
            directory,
            space,
            lanes.lane("write"),
            slab_bytes=options.slab_bytes,
            most_queued_bytes=max(space.record_bytes, records.nbytes // _SHARE_OF_MEMORY),
            clock=clock,
        )
        self._counts = FileCounts(self._reads, self._writes, directory, space.record_bytes)
        self._open_writes: dict[int, tuple[StoreOrder, Write]] = {}

    @classmethod
    def open(
        cls,
        options: PipelineOptions,
        held: Space,
        space: RecordSpace,
        layers: Sequence[torch.Tensor],
        lanes: Lanes,
        memory: HostMemory | None,
    ) -> FileWork:
        """Of a store that holds `held`, between `space` and these pages. With `memory` slabs are
        registered, and what is loaded is checked in the pages.

        Raises: as the constructor.
        """
        sums = None
        maps: RegisteredSlabs | NothingRegistered = NOTHING_REGISTERED
        if memory is not None and PageSums.can_sum(layers):
            sums = PageSums(layers, *factors(held.record_bytes // ROW_BYTES + 1))
            if options.registered_bytes:
                assert options.path is not None, "options say so"
                scout = Scout(Path(options.path) / held.folder_name, held, options.registered_bytes)
                maps = RegisteredSlabs(space, scout, memory, most_bytes=options.registered_bytes)
        files = cls(options, held, space.host.numpy(), lanes, sums=sums, maps=maps)
        maps.open_recent()
        return files

    def begin_step(self, metadata: PipelineMetadata) -> None:
        """What the step says of this store."""
        self.maps.begin_step(metadata)
        for order in metadata.stores:
            self.store(order)

    def fetch(self, fetches: tuple[Fetch, ...], *, from_the_back: bool = False) -> Fetching:
        """Begin to read these, the first ones first, or the last ones."""
        work_bytes = WORK_BYTES
        if from_the_back:
            fetches, work_bytes = fetches[::-1], _BACKWARD_WORK_BYTES
        reads = self._reads.read_all(
            [(one.place, self._rows[one.record]) for one in fetches], work_bytes=work_bytes
        )
        return Fetching(fetches, reads, self._clock())

    def sample(self, fetching: Fetching) -> LoadSample | None:
        """How long one took that is done, if it went well."""
        return fetching.sample(self._rows[0].nbytes, self._clock())

    def store(self, order: StoreOrder) -> None:
        """Begin to write these, or drop them if too much waits already."""
        write = self._writes.write(
            [
                NewRecord(
                    part.block_hash,
                    part.parent_hash,
                    self._rows[part.record],
                    order.made_ns,
                    part.first_tokens,
                )
                for part in order.parts
            ]
        )
        self._open_writes[order.store_id] = order, write

    def poll(self) -> None:
        """Take note of what has ended, and give up on what hangs."""
        self._reads.poll()

    def take_stored(self) -> tuple[frozenset[int], frozenset[int]]:
        """(orders that have ended since the last call, those of their records that were not
        written). Looks after the limits, too."""
        self._writes.tend()
        ended = [number for number, (_, write) in self._open_writes.items() if write.is_done]
        unwritten = set[int]()
        for number in ended:
            order, write = self._open_writes.pop(number)
            unwritten.update(part.record for part in order.parts[len(write.places) :])
        return frozenset(ended), frozenset(unwritten)

    def take_counts(self) -> tuple[tuple[str, int], ...]:
        """What was counted since the last call, with all that had been reported as ended by then:
        see `PipelineReport.counts`."""
        return self._counts.take()

    @property
    def levels(self) -> dict[str, int]:
        """How queues stand, by `PipelineStats`' names."""
        return {
            "write_queue_bytes": self._writes.num_queued_bytes,
            "read_queue_blocks": self._reads.num_waiting,
            "transfers_hanging": self._reads.num_hanging,
        }

    @property
    def is_storing(self) -> bool:
        """Whether an order has not been taken as ended."""
        return bool(self._open_writes)

    def damage(self, kind: str, block_hash: bytes) -> set[bytes]:
        """See `faults.damage`."""
        return damage(self._folder, kind, block_hash)

    def close(self, timeout_s: float) -> bool:
        """Write what waits, read nothing more; False if that takes longer than `timeout_s`, each:
        then records are not to be touched."""
        ended = [one.close(timeout_s) for one in (self._writes, self._reads, self.maps)]
        return all(ended)
