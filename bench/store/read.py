"""How near the store's reads come to the best that plain ones reach here: the same records, into
the same memory, in turns.

The store's way is the connector's: its lanes take a few records each from one queue, and compare
each with its checksum, unless a GPU does that. The plain way is threads that read records by
`preadv`, one after the other, and nothing else; their number is the queue depth. "checked" are
plain reads at the depth of the lanes that compute the checksum too: what lies between those and the
store is what lanes cost. Files lie in the page cache, and then they do not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from interlace.bench.overlap.rig import Outcome, judged
from interlace.bench.report import Check, Row
from interlace.bench.spread import Spread
from interlace.bench.store.page_cache import drop_pages, resident_bytes, slab_files
from interlace.bench.store.rig import READ_SHARE, StoreRig
from interlace.bench.store.shelf import fill, made_up_hashes, made_up_space, records_in_slab
from interlace.connectors.pipeline.options import PipelineOptions
from interlace.connectors.pipeline.records import HostRecords
from interlace.connectors.pipeline.worker_files import num_read_lanes
from interlace.connectors.slab_store.checksum import checksum
from interlace.connectors.slab_store.files import read_at
from interlace.connectors.slab_store.reading import KnownSlabs, Reads
from interlace.connectors.slab_store.slab import Slab
from interlace.connectors.slab_store.writing import StoredPlace
from interlace.engine.device_thread import finish_despite_cancel
from interlace.engine.errors import InterlaceError
from interlace.engine.ports import Clock
from interlace.layers.lanes import ThreadLanes

DEPTHS = (1, 2, 4, 8, 16, 32)
"""Of plain reads: records that are read at a time."""
STORE = "store"
CHECKED = "checked, as deep as the store's lanes"
_POLL_S = 0.0003
"""Who asks more often takes the interpreter from those who read. The wait is part of what is
measured."""
_CLOSE_S = 10.0
_KEPT = 0.1
"""Such a share of what is read may stay in memory where pages are dropped."""


class Taken(NamedTuple):
    """One sample."""

    bytes_per_s: float
    resident_bytes: int
    """Of all files, before it."""


async def read(store: StoreRig) -> Outcome:
    """Read all records in each way, in turns, with cached files and then without.

    Raises: `InterlaceError` if a record cannot be read, `OSError`. Cancelling stops after the
    sample in progress.
    """
    device = store.rig.prepared.device
    repeats = store.rig.setting.sizes.repeats
    shelf = await finish_despite_cancel(device.submit(_Shelf, store))
    try:
        rows: list[Row] = []
        checks: list[Check] = []
        for is_dropped in (False, True):
            title = "read, page cache dropped" if is_dropped else "read"
            taken: dict[str, list[Taken]] = {name: [] for name in shelf.ways}
            with store.rig.setting.progress.task(title, len(taken) * (repeats + 1)) as advance:
                for number in range(repeats + 1):
                    for name, samples in taken.items():
                        sample = await finish_despite_cancel(
                            device.submit(shelf.sample, name, is_dropped=is_dropped)
                        )
                        if number:  # the first round warms up
                            samples.append(sample)
                        advance(1)
            found = _outcome(
                taken, shelf.num_bytes, is_dropped=is_dropped, is_judged=not shelf.checks
            )
            rows += found[0]
            checks += found[1]
        return tuple(rows), tuple(checks)
    finally:
        await finish_despite_cancel(device.submit(shelf.close))


class _Shelf:
    """Records in files, memory for all of them, and the ways to read. One thread."""

    def __init__(self, store: StoreRig) -> None:
        """Writes the files."""
        space = made_up_space(store.shape)
        folder = store.folder / "read" / space.folder_name
        folder.mkdir(parents=True)
        hashes = made_up_hashes(store.read_records)
        slab_records = min(len(hashes), records_in_slab(space.record_bytes))
        places = fill(folder, space, hashes, slab_records=slab_records)
        memory = HostRecords.allocate(
            len(places) * space.record_bytes,
            (space.num_layers, space.page_bytes),
            torch.device("cpu"),
        )
        buffers = list(memory.tensor.numpy().reshape(len(places), -1))
        self.num_bytes = len(places) * space.record_bytes
        self._files = slab_files(folder)
        self._clock = store.rig.clock
        self.checks = store.rig.prepared.settings.device != "cuda"
        """Whether the store compares checksums, which plain reads do not: they are no bar then."""
        self._store = StoreReads(folder, places, buffers, self._clock, checks=self.checks)
        self._plain = PlainReads(folder, places, buffers)
        self.ways: Mapping[str, Callable[[], None]] = {
            STORE: self._store.run,
            CHECKED: self._plain.of_depth(num_read_lanes(), is_checked=True),
            **{f"plain, depth {depth}": self._plain.of_depth(depth) for depth in DEPTHS},
        }

    def sample(self, name: str, *, is_dropped: bool) -> Taken:
        """Read all in that way. Raises: `InterlaceError`, `OSError`."""
        if is_dropped:
            drop_pages(self._files)
        resident = resident_bytes(self._files)
        began = self._clock.monotonic()
        self.ways[name]()
        return Taken(self.num_bytes / (self._clock.monotonic() - began), resident)

    def close(self) -> None:
        """End the threads."""
        self._plain.close()
        self._store.close()


class StoreReads:
    """As the connector reads, on one thread."""

    def __init__(
        self,
        folder: Path,
        places: list[StoredPlace],
        buffers: list[npt.NDArray[np.uint8]],
        clock: Clock,
        *,
        checks: bool = True,
    ) -> None:
        """`folder` is the space's; `buffers` are for one record each. `checks`: see `Reads`."""
        self._jobs = list(zip(places, buffers, strict=True))
        self._reads = Reads(
            KnownSlabs(folder),
            ThreadLanes(),
            num_lanes=num_read_lanes(),
            deadline_s=PipelineOptions().read_deadline_s,
            checks=checks,
            clock=clock.monotonic,
        )

    def run(self) -> None:
        """Read all. Raises: `InterlaceError` if one cannot be read."""
        reads = self._reads.read_all(self._jobs)
        while not self._reads.is_idle:
            time.sleep(_POLL_S)
        for one in reads:
            if one.error is not None:
                raise InterlaceError(f"a record could not be read: {one.error}")

    def close(self) -> None:
        """End the lanes."""
        self._reads.close(_CLOSE_S)


class PlainReads:
    """Nothing but reads, on so many threads as are asked for."""

    def __init__(
        self, folder: Path, places: list[StoredPlace], buffers: list[npt.NDArray[np.uint8]]
    ) -> None:
        """Opens the files. Raises: `OSError`."""
        self._pool = ThreadPoolExecutor(max(DEPTHS), "interlace-plain-read")
        self._fds: dict[str, int] = {}
        self._jobs: list[_Job] = []
        for place, buffer in zip(places, buffers, strict=True):
            path = folder / place.slab
            if place.slab not in self._fds:
                self._fds[place.slab] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                with Slab.open(path) as slab:
                    shape = slab.header.shape
            at = shape.record_at(place.record)
            self._jobs.append(_Job(self._fds[place.slab], at, buffer, place.checksum))

    def of_depth(self, depth: int, *, is_checked: bool = False) -> Callable[[], None]:
        """What reads all on `depth` threads. Raises then: `InterlaceError` if a file is cut off,
        or a checksum is another one; `OSError`."""
        return lambda: self._run(depth, is_checked)

    def _run(self, depth: int, is_checked: bool) -> None:
        jobs = iter(self._jobs)  # shared: whoever is free takes the next one
        for ended in [self._pool.submit(_read_all, jobs, is_checked) for _ in range(depth)]:
            ended.result()

    def close(self) -> None:
        """End the threads, and close the files."""
        self._pool.shutdown()
        for fd in self._fds.values():
            os.close(fd)


class _Job(NamedTuple):
    """A plain read."""

    fd: int
    offset: int
    buffer: npt.NDArray[np.uint8]
    checksum: int


def _read_all(jobs: Iterator[_Job], is_checked: bool) -> None:
    for fd, offset, buffer, expected in jobs:
        if read_at(fd, buffer.data, offset) != buffer.nbytes:
            raise InterlaceError("a file is shorter than what was written to it.")
        if is_checked and checksum(buffer) != expected:
            raise InterlaceError("a record is not what was written.")


def _outcome(
    taken: Mapping[str, list[Taken]], num_bytes: int, *, is_dropped: bool, is_judged: bool
) -> Outcome:
    rates = {name: Spread.of(one.bytes_per_s for one in some) for name, some in taken.items()}
    plain = [name for name in rates if name not in (STORE, CHECKED)]
    best = max(plain, key=lambda name: rates[name].median)
    share = rates[STORE].median / rates[best].median
    most_resident = max(one.resident_bytes for some in taken.values() for one in some)
    case = "cached"
    bar: float | None = READ_SHARE
    if is_dropped and most_resident > _KEPT * num_bytes:
        case, bar = "not dropped: this file system keeps its pages", None
    elif is_dropped:
        case = "page cache dropped"
    rows = tuple(
        Row(
            f"{num_bytes / 1e6:,.0f} MB, {case}: {name}",
            {
                "GB/s": Spread.of(rate * 1e-9 for rate in rates[name].samples),
                "of the best plain": Spread.of([rates[name].median / rates[best].median]),
                "MB in memory": Spread.of(one.resident_bytes * 1e-6 for one in some),
            },
        )
        for name, some in taken.items()
    )
    bar = bar if is_judged else None
    return rows, judged(f"store / best plain read, {case}", share, at_least=bar)
