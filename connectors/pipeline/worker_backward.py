"""A load from the back, whose share may change while it goes on. Device thread."""

from __future__ import annotations

from typing import NamedTuple

from interlace.connectors.pipeline.worker_checks import LoadCheck
from interlace.connectors.pipeline.worker_feeder import (
    SLICES_PER_WINDOW,
    Copies,
    FedTransfer,
    Slice,
)
from interlace.connectors.pipeline.worker_times import Stopwatch
from interlace.engine.errors import ConnectorError
from interlace.engine.ports import Gate
from interlace.layers.page_copies import Run

MOST_SLICE_CALLS = 128
"""Of the driver, for one slice: who feeds it may wait for a step's tokens meanwhile."""


class _Next(NamedTuple):
    """What would be fed next."""

    one: Slice
    num_blocks: int
    rest: list[Run]
    """What is left then."""


class BackwardTransfer(FedTransfer):
    """Loads records from the last one on, as many as its share; those before are none of its."""

    is_hurried = True

    def __init__(
        self,
        copies: Copies,
        runs: tuple[Run, ...],
        share: int,
        *,
        after: Gate | None,
        window_bytes: int,
        watch: Stopwatch,
        available: int | None = None,
    ) -> None:
        """For `LayerPipeline`. `runs` are all that might be loaded, in order; the last `share`
        blocks of them are, as far as they are `available`: so many from the back, None: all.
        `window_bytes`: see `FedTransfer`.

        Raises: `ConnectorError` if `runs` do not fit.
        """
        copies.prepare(runs)  # refuses them as a whole
        super().__init__((), copies.load_layers, after, watch)
        self._copies = copies
        self.window_bytes = window_bytes
        self._runs = list(runs)
        self._left = self._runs  # not taken yet
        self._num_blocks = sum(count for _, _, count in runs)
        self._block_bytes = copies.num_layers * copies.page_bytes
        self._num_taken = 0
        self._share = 0
        self._next: _Next | None = None
        self._is_dropped = False
        self._sizes: list[int] = []  # blocks of each slice that was taken
        self._num_loaded = 0
        self._available = self._num_blocks if available is None else available
        self.set_share(share)

    @property
    def share(self) -> int:
        """Blocks, from the back on, that it loads in all."""
        return self._share

    @property
    def num_loaded(self) -> int:
        """Blocks, from the back on, that are in their pages."""
        return self._num_loaded

    def set_share(self, num_blocks: int) -> None:
        """Load so many in all; more if they are under way already. Feed it on afterwards."""
        self._share = min(max(num_blocks, self._num_taken), self._num_blocks)
        self._next = None

    def set_available(self, num_blocks: int) -> None:
        """So many, from the back, may be loaded now; never fewer. Feed it on afterwards."""
        self._available = num_blocks

    @property
    def _is_open(self) -> bool:
        return not self._is_dropped and self.error is None and self._num_taken < self._share

    @property
    def is_done(self) -> bool:
        """See `FedTransfer`. Not while something of its share is not available yet."""
        return not self._is_open and super().is_done

    @property
    def has_more(self) -> bool:
        """See `FedTransfer`."""
        return self._is_open or super().has_more

    def loaded(self) -> list[Run]:
        """What is known to be in the pages."""
        return split_back(self._runs, self._num_loaded)[1]

    def missing(self) -> list[Run]:
        """Of its share, what is not known to be in the pages: all of that, and what is before it,
        has to be computed if it failed."""
        _, back = split_back(self._runs, self._share)
        missing, _ = split_back(back, self._num_loaded)
        return missing

    @property
    def next_slice(self) -> Slice | None:
        """See `FedTransfer`."""
        if self._next is None and self._is_open and self._num_taken < self._available:
            self._next = self._cut()
        return None if self._next is None else self._next.one

    def _cut(self) -> _Next:
        most = max(1, self.window_bytes // SLICES_PER_WINDOW // self._block_bytes)
        end = min(self._share, self._available)
        found = self._cut_off(min(most, end - self._num_taken))
        while found.one.num_calls > MOST_SLICE_CALLS and found.num_blocks > 1:
            found = self._cut_off(found.num_blocks // 2)
        return found

    def _cut_off(self, num_blocks: int) -> _Next:
        rest, part = split_back(self._left, num_blocks)
        one = Slice(
            0,
            self._copies.num_layers,
            self._copies.prepare(part),
            num_blocks * self._block_bytes,
            may_be_last=True,
        )
        return _Next(one, num_blocks, rest)

    def take(self, gate: Gate) -> None:
        """See `FedTransfer`."""
        assert self._next is not None
        self._left = self._next.rest
        self._num_taken += self._next.num_blocks
        self._sizes.append(self._next.num_blocks)
        self._next = None
        self.num_fed += 1
        self.last_gate = gate

    def drop(self) -> None:
        """See `FedTransfer`. What its share was remains to be known."""
        self._is_dropped = True
        self._next = None

    def queue_check(self, check: LoadCheck, one: Slice) -> None:
        """See `FedTransfer`: each slice is of whole blocks."""
        check.queue(self._num_run, one.runs.runs)

    def note_bad(self) -> None:
        """See `FedTransfer`. What is computed meets what was loaded in one place, so all fails."""
        self.fail(
            ConnectorError(
                "what was loaded is not what was stored: it is computed instead. Let `interlace"
                " store verify` look at the store."
            )
        )

    def note_ended(self, gate: Gate) -> None:
        """See `FedTransfer`."""
        number = self._num_ended
        super().note_ended(gate)
        if self.error is None:
            self._num_loaded += self._sizes[number]


def split_back(runs: list[Run], num_blocks: int) -> tuple[list[Run], list[Run]]:
    """(what is before, the last `num_blocks` blocks) of runs that have as many, each in order."""
    before, back = list(runs), list[Run]()
    while num_blocks:
        record, block, count = before.pop()
        taken = min(count, num_blocks)
        if taken < count:
            before.append((record, block, count - taken))
        back.append((record + count - taken, block + count - taken, taken))
        num_blocks -= taken
    return before, back[::-1]
