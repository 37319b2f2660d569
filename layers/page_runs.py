"""Runs of neighbours, block by block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def expand_runs(runs: Sequence[tuple[int, int, int]]) -> NDArray[np.int64]:
    """int64 [blocks, (record, block)] of runs (first record, first block, number of blocks), one at
    least."""
    firsts = np.array(runs, np.int64)
    counts = firsts[:, 2]
    ends = np.cumsum(counts)
    behind = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    places: NDArray[np.int64] = np.repeat(firsts[:, :2], counts, axis=0)
    places += behind[:, None]
    return places
