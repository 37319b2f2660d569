"""Which loads have ended, and which ended requests must keep their blocks: the connector's reports.

Reports may come late, again, or for nobody; those are told apart here and change nothing. Knows no
queue and no block pool. Loop thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from interlace.engine.request import Request


class _Held(NamedTuple):
    """An ended request whose blocks stay until the connector reports."""

    request: Request
    is_loading: bool
    """A load has not ended: a report of receiving releases it."""
    stays: bool
    """The connector asked for it: a report of sending releases it."""


class Reports(NamedTuple):
    """What became of a step's reports."""

    released: list[Request]
    """Ended requests whose blocks are free to go."""
    num_strays: int
    """Ids that nobody waits for."""


class TransferLedger:
    """The state between a load's begin and its promotion, and between a request's end and its
    blocks' return."""

    def __init__(self) -> None:
        self._ended_loads: set[str] = set()  # ids of requests that wait to be promoted
        self._held: dict[str, _Held] = {}  # request id -> ended request

    def __len__(self) -> int:
        """Ended requests that hold blocks."""
        return len(self._held)

    def __contains__(self, request_id: str) -> bool:
        """Whether an ended request of that id holds blocks."""
        return request_id in self._held

    @property
    def num_ended_loads(self) -> int:
        """Loads that have ended and whose requests were not promoted yet."""
        return len(self._ended_loads)

    def is_loading(self, request: Request) -> bool:
        """Whether blocks of the unfinished request are being written to."""
        return request.awaits_load and request.request_id not in self._ended_loads

    def forget_load(self, request: Request) -> None:
        """The request goes on with what was loaded, or has lost its blocks, or has ended."""
        self._ended_loads.discard(request.request_id)

    def hold(self, request: Request, *, is_loading: bool, stays: bool) -> None:
        """Keep the blocks of a request that has ended."""
        self._held[request.request_id] = _Held(request, is_loading, stays)

    def apply(
        self,
        finished_recving: Iterable[str],
        finished_sending: Iterable[str],
        requests: dict[str, Request],
        step_id: int,
    ) -> Reports:
        """Follow what step `step_id` reported. `requests`: the unfinished ones, by id."""
        released: list[Request] = []
        num_strays = 0
        for request_id in finished_recving:
            request = requests.get(request_id)
            if request is not None:
                num_strays += not self._end_load(request, step_id)
            elif not self._release_loaded(request_id, step_id, released):
                num_strays += 1
        for request_id in finished_sending:
            held = self._held.get(request_id)
            if held is None or not held.stays:
                num_strays += 1
                continue
            del self._held[request_id]
            released.append(held.request)
        return Reports(released, num_strays)

    def _end_load(self, request: Request, step_id: int) -> bool:
        """A report of a step before the one that began the load is about an earlier load."""
        if not self.is_loading(request) or step_id < request.load_step_id:
            return False
        self._ended_loads.add(request.request_id)
        return True

    def _release_loaded(self, request_id: str, step_id: int, released: list[Request]) -> bool:
        held = self._held.get(request_id)
        if held is None or not held.is_loading or step_id < held.request.load_step_id:
            return False
        del self._held[request_id]
        released.append(held.request)
        return True
