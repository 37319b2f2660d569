"""Stretches of time in whole nanoseconds. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Interval(NamedTuple):
    """From `begin_ns` to `end_ns`, which is not earlier."""

    begin_ns: int
    end_ns: int

    @property
    def length_ns(self) -> int:
        """Nanoseconds."""
        return self.end_ns - self.begin_ns


def merged(intervals: Iterable[Interval], tolerance_ns: int = 0) -> tuple[Interval, ...]:
    """The same times as intervals that neither overlap nor touch, ascending, empty ones left out;
    gaps of up to `tolerance_ns` are closed."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if begin >= end:
            continue
        if found and begin <= found[-1].end_ns + tolerance_ns:
            found[-1] = Interval(found[-1].begin_ns, max(found[-1].end_ns, end))
        else:
            found.append(Interval(begin, end))
    return tuple(found)


def common(first: Sequence[Interval], second: Sequence[Interval]) -> tuple[Interval, ...]:
    """When both lists of `merged` intervals hold."""
    found: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        begin = max(first[i].begin_ns, second[j].begin_ns)
        end = min(first[i].end_ns, second[j].end_ns)
        if begin < end:
            found.append(Interval(begin, end))
        if first[i].end_ns <= second[j].end_ns:
            i += 1
        else:
            j += 1
    return tuple(found)


def total_ns(intervals: Iterable[Interval]) -> int:
    """Sum of the lengths."""
    return sum(interval.length_ns for interval in intervals)
