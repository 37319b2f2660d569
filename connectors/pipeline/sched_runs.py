"""Runs of neighbours among records and blocks. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from interlace.connectors.pipeline.messages import RecordRun


def record_runs(records: Sequence[int], block_ids: Sequence[int]) -> tuple[RecordRun, ...]:
    """Pairs of record and block, in order, as few runs of neighbours on both sides."""
    pairs = list(zip(records, block_ids, strict=True))
    begins = [
        i
        for i, (record, block_id) in enumerate(pairs)
        if i == 0 or pairs[i - 1] != (record - 1, block_id - 1)
    ]
    return tuple(
        RecordRun(*pairs[begin], end - begin)
        for begin, end in itertools.pairwise([*begins, len(pairs)])
    )
