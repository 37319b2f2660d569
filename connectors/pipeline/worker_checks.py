"""Whether what a load has brought into the pages is what was stored. Queued on the load's lane.

What a GPU copies out of a mapped file nobody has seen before, and what was read from files is
sooner checked there than by who reads it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from interlace.layers.page_copies import Run
from interlace.layers.page_runs import expand_runs
from interlace.layers.page_sums import BlockSums, PageSums

Blocks: TypeAlias = NDArray[np.int64]
"""Block ids."""


class _Queued(NamedTuple):
    """Sums that are under way."""

    work: int
    blocks: Blocks
    expected: NDArray[np.uint64]
    sums: BlockSums


class LoadCheck:
    """Of one load, or of a part of it. `queue` runs on the lane, all else on the device thread."""

    def __init__(self, sums: PageSums, runs: Sequence[Run], checksums: Mapping[int, int]) -> None:
        """`runs` are what is loaded, `checksums` what records of it have to come to; others are not
        looked at."""
        self._sums = sums
        self._runs = runs
        self._checksums = checksums
        self._queued: deque[_Queued] = deque()
        self.bad: set[int] = set()
        """Blocks that came to something else."""

    def queue(self, work: int, runs: Sequence[Run] | None = None) -> None:
        """Behind the copies of these, over all layers, or of all: see what they come to. `work`:
        the number, from 0 on, of the one that does this."""
        loaded = self._runs if runs is None else runs
        if not loaded:
            return
        records, blocks = expand_runs(loaded).T
        expected = [self._checksums.get(record) for record in records.tolist()]
        wanted = [place for place, one in enumerate(expected) if one is not None]
        if not wanted:
            return
        chosen = blocks[wanted]
        sums = np.array([expected[place] for place in wanted], np.uint64)
        self._queued.append(_Queued(work, chosen, sums, self._sums.of(chosen)))

    def judge(self, num_ended: int) -> set[int]:
        """So many works have ended: blocks of theirs that are bad, once."""
        bad: set[int] = set()
        while self._queued and self._queued[0].work < num_ended:
            one = self._queued.popleft()
            bad.update(one.blocks[one.sums.values() != one.expected].tolist())
        self.bad |= bad
        return bad
