"""Requests in scheduling order: by priority if the policy says so, then by arrival.

One order serves both queues, waiting and running: the head is served first, the tail is
preempted first.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from interlace.engine.config import SchedulingPolicy
from interlace.engine.request import Request


class RequestQueue:
    """A sorted list of requests; keys are unique, since arrivals are."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._by_priority = policy == "priority"
        self._items: list[Request] = []

    def _key(self, request: Request) -> tuple[int, int]:
        return (request.priority if self._by_priority else 0, request.arrival)

    def add(self, request: Request) -> None:
        """Insert at the request's place."""
        bisect.insort(self._items, request, key=self._key)

    def remove(self, request: Request) -> None:
        """Take out a request that is in the queue."""
        index = bisect.bisect_left(self._items, self._key(request), key=self._key)
        assert self._items[index] is request, f"{request!r} is not in this queue"
        del self._items[index]

    def __contains__(self, request: Request) -> bool:
        index = bisect.bisect_left(self._items, self._key(request), key=self._key)
        return index < len(self._items) and self._items[index] is request

    def __getitem__(self, place: int) -> Request:
        """The request at this place; 0 is served first."""
        return self._items[place]

    @property
    def tail(self) -> Request:
        """The request to preempt first."""
        return self._items[-1]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Request]:
        """Over a copy, so that the loop body may change the queue."""
        return iter(self._items.copy())
