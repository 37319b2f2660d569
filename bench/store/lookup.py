"""How long the scheduler side is kept by a question, and a starting engine by the first look.

The store has as many files as the model's records would take, and in each as many entries; records
themselves are tiny, since a look reads none. Hashes are given: what hashing takes is part of
submitting a request, with any connector.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from interlace.bench.overlap.rig import Outcome
from interlace.bench.report import Check, Row
from interlace.bench.spread import Spread
from interlace.bench.store.page_cache import drop_pages, slab_files
from interlace.bench.store.rig import FIRST_LOOK_S, LOOKUP_MS, StoreRig
from interlace.bench.store.shelf import fill, made_up_hashes, made_up_space, records_in_slab
from interlace.connectors.slab_store.catalog import Catalog
from interlace.connectors.slab_store.lookup import StoredBlocks
from interlace.connectors.slab_store.space import Space
from interlace.engine.device_thread import finish_despite_cancel
from interlace.engine.errors import InterlaceError
from interlace.layers.kv_memory import PageShape
from interlace.layers.lanes import ThreadLanes

_TINY = 16
"""Bytes of a record."""
_PATIENCE_S = 120.0


async def lookup(store: StoreRig) -> Outcome:
    """First looks, with pages in memory and without, and questions after each.

    Raises: `InterlaceError` if something is not found, `OSError`. Cancelling stops after the look
    in progress.
    """
    device, sizes = store.rig.prepared.device, store.sizes
    progress, repeats = store.rig.setting.progress, store.rig.setting.sizes.repeats
    with progress.task(f"writing {sizes.num_records:,} records", None):
        shelf = await finish_despite_cancel(device.submit(_Shelf, store))
    looks: list[float] = []
    cold_looks: list[float] = []
    questions: list[float] = []
    with progress.task("lookup", 2 * (repeats + 1)) as advance:
        for number in range(repeats + 1):
            for is_dropped, seconds in ((False, looks), (True, cold_looks)):
                look_s, asked = await finish_despite_cancel(
                    device.submit(shelf.sample, is_dropped=is_dropped)
                )
                if number:  # the first round warms up
                    seconds.append(look_s)
                    questions += asked
                advance(1)
    what = f"{sizes.num_records:,} records in {shelf.num_files:,} files"
    asked_ms = Spread.of(one * 1e3 for one in questions)
    name = f"look-up of {sizes.lookup_blocks:,} blocks"
    rows = (
        Row(f"{name} among {what}", {"ms": asked_ms}),
        Row(f"first look at {what}", {"ms": Spread.of(one * 1e3 for one in looks)}),
        Row(
            "the same, page cache dropped",
            {"ms": Spread.of(one * 1e3 for one in cold_looks)},
        ),
    )
    looked_s = Spread.of(looks).median
    return rows, (
        Check(f"{name}, ms", asked_ms.median, at_most=LOOKUP_MS),
        Check(f"first look at {sizes.num_records:,} records, s", looked_s, at_most=FIRST_LOOK_S),
    )


class _Shelf:
    """The files. One thread."""

    def __init__(self, store: StoreRig) -> None:
        """Writes them."""
        self._space = _tiny_space(store.shape)
        self._folder = store.folder / "lookup" / self._space.folder_name
        self._folder.mkdir(parents=True)
        self._clock = store.rig.clock
        hashes = made_up_hashes(store.sizes.num_records)
        slab_records = min(len(hashes), records_in_slab(store.shape.block_bytes))
        fill(self._folder, self._space, hashes, slab_records=slab_records)
        length = store.sizes.lookup_blocks
        step = max(1, (len(hashes) - length) // store.sizes.lookups)
        firsts = [number * step for number in range(store.sizes.lookups)]
        self._prefixes = [hashes[first : first + length] for first in firsts]
        self._files = slab_files(self._folder)

    @property
    def num_files(self) -> int:
        """Slabs."""
        return len(self._files)

    def sample(self, *, is_dropped: bool) -> tuple[float, list[float]]:
        """Seconds of a first look, and of each question that follows.

        Raises: `InterlaceError`, `OSError`.
        """
        if is_dropped:
            drop_pages(self._files)
        began = self._clock.monotonic()
        stored = StoredBlocks(Catalog(self._folder, self._space), ThreadLanes().lane("look"))
        try:
            if not stored.wait_for_look(_PATIENCE_S):
                raise InterlaceError(f"the first look took longer than {_PATIENCE_S:g} s.")
            look_s = self._clock.monotonic() - began
            return look_s, [self._question_s(stored, prefix) for prefix in self._prefixes]
        finally:
            stored.close(_PATIENCE_S)

    def _question_s(self, stored: StoredBlocks, prefix: Sequence[bytes]) -> float:
        began = self._clock.monotonic()
        found = stored.num_stored(prefix)
        seconds = self._clock.monotonic() - began
        if found != len(prefix):
            raise InterlaceError(f"only {found} of {len(prefix)} blocks were found.")
        return seconds


def _tiny_space(shape: PageShape) -> Space:
    return dataclasses.replace(made_up_space(shape), num_layers=1, page_bytes=_TINY)
