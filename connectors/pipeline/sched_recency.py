"""Which records were used least recently: a linked list over record numbers, O(1) a change.

Knows nothing of what records hold. Any one thread.
"""

from __future__ import annotations

import array
from collections.abc import Iterator, Sequence

_OUT = -1


class Recency:
    """An order of numbers below `size`, each of which is in it or not."""

    def __init__(self, size: int) -> None:
        """Nothing is in it."""
        self._end = size  # the ring's own place, between the newest and the oldest
        # Not lists: records are many, and whoever looks through all objects would enter those.
        self._older = array.array("q", [_OUT]) * size + array.array("q", [size])
        self._newer = self._older[:]
        self._length = 0

    def __len__(self) -> int:
        """How many are in it."""
        return self._length

    def __contains__(self, number: int) -> bool:
        """Whether `number` is in it."""
        return self._older[number] != _OUT

    def __iter__(self) -> Iterator[int]:
        """From the oldest on. Not to be changed meanwhile."""
        number = self._newer[self._end]
        while number != self._end:
            yield number
            number = self._newer[number]

    def add_run(self, numbers: Sequence[int], than: int | None = None) -> None:
        """Add these, none of which is in it: the first goes right before `than`, which is in it, or
        last of all, and each of the others right before the one that comes ahead of it."""
        assert than is None or than in self
        older, newer = self._older, self._newer
        place = self._end if than is None else than
        before = older[place]
        for number in numbers:
            assert older[number] == _OUT
            newer[number], older[place] = place, number
            place = number
        older[place], newer[before] = before, place
        self._length += len(numbers)

    def refresh(self, numbers: Sequence[int]) -> None:
        """Make these, all of which are in it, the last to go, in this order.

        What was made so together before is moved as one: its neighbours are compared, not changed.
        """
        newer = self._newer
        begin = 0
        while begin < len(numbers):
            end = begin + 1
            while end < len(numbers) and newer[numbers[end - 1]] == numbers[end]:
                end += 1
            self._move_to_end(numbers[begin], numbers[end - 1])
            begin = end

    def _move_to_end(self, first: int, last: int) -> None:
        """Move neighbours, from the oldest of them to the newest."""
        before, behind = self._older[first], self._newer[last]
        if behind == self._end:
            return
        self._newer[before], self._older[behind] = behind, before
        newest = self._older[self._end]
        self._newer[newest], self._older[first] = first, newest
        self._newer[last], self._older[self._end] = self._end, last

    def remove(self, number: int) -> None:
        """Take `number` out, which is in it."""
        assert number in self
        older, newer = self._older[number], self._newer[number]
        self._newer[older], self._older[newer] = newer, older
        self._older[number] = self._newer[number] = _OUT
        self._length -= 1

    def __repr__(self) -> str:
        return f"<Recency {self._length} of {self._end}>"
