"""Runs of neighbours among records and blocks. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from interlace.connectors.pipeline.messages import RecordRun


def record_runs(records: Sequence[int], block_ids: Sequence[int]) -> tuple[RecordRun, ...]:
    """Pairs of record and block, in order, as few runs of neighbours on both sides."""
    if not records:
        return ()
    steps = np.diff(np.array((records, block_ids), np.int64))
    begins: list[int] = (1 + np.flatnonzero((steps != 1).any(axis=0))).tolist()
    return tuple(
        RecordRun(records[begin], block_ids[begin], end - begin)
        for begin, end in itertools.pairwise([0, *begins, len(records)])
    )
