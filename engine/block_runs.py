"""Picks block ids that lie in few runs of neighbours. Pure functions, any thread.

A copy of KV between the device and the host is one command for each run, so a prefix whose blocks
lie in a few long runs moves at the speed of the link, and one in hundreds of pieces does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise


def runs_of(ids: Iterable[int]) -> list[range]:
    """The maximal runs of neighbours among `ids`, which differ from each other; ascending."""
    ordered = sorted(ids)
    if not ordered:
        return []
    if ordered[-1] - ordered[0] == len(ordered) - 1:  # as in a pool that is new, or was reset
        return [range(ordered[0], ordered[-1] + 1)]
    gaps = [pair for pair in pairwise(ordered) if pair[1] != pair[0] + 1]
    begins = [ordered[0], *(after for _, after in gaps)]
    ends = [*(before for before, _ in gaps), ordered[-1]]
    return [range(begin, end + 1) for begin, end in zip(begins, ends, strict=True)]


def in_few_runs(ids: Sequence[int], num_ids: int) -> list[int]:
    """`num_ids` of `ids`, of which there are as many, in few runs; ascending. `ids`: oldest first.

    The longest runs are taken whole. What is missing then comes from the shortest run that has all
    of it, so that long runs are left to those who come later; and from the end of it that is older.
    """
    assert 0 < num_ids <= len(ids)
    runs = sorted(runs_of(ids), key=len, reverse=True)
    found: list[int] = []
    for i, run in enumerate(runs):
        missing = num_ids - len(found)
        if len(run) >= missing:
            found += _older_part([r for r in runs[i:] if len(r) >= missing][-1], missing, ids)
            break
        found += run
    found.sort()
    return found


def _older_part(run: range, length: int, ids: Sequence[int]) -> range:
    """`length` neighbours, at least one, at the end of `run` that comes first in `ids`."""
    if ids.index(run[-1]) < ids.index(run[0]):
        return run[-length:]
    return run[:length]
