"""What several workers of a connector report of one step, as one report.

An id takes effect when enough workers have reported it, which may take many steps; everything
else is merged step by step. Used by the runner, on the device thread; plain Python.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from interlace.engine.kv_connector import KVConnectorOutput
from interlace.engine.scheduler_output import SchedulerOutput

MAX_OPEN_SENDS = 4096
"""Ids that some workers have reported as sent and others have not. Beyond it the oldest is dropped:
a connector that reports ids which nobody waits for must not fill the memory."""


@dataclasses.dataclass(slots=True)
class _Count:
    """The reports of one id."""

    expected: int
    ranks: set[int] = dataclasses.field(default_factory=set)


class KVOutputAggregator:
    """vLLM's of that name, over the steps of one engine, with two rules of its own.

    A worker counts once for an id, however often it reports it. And reports from before an id
    could be awaited, left over from an earlier load or an earlier request of that name, do not
    count: `begin_step` says from when on they do.
    """

    def __init__(self, expected_finished_count: int) -> None:
        """`expected_finished_count`: workers that report each id."""
        self._expected = expected_finished_count
        self._loading: dict[str, _Count] = {}  # begun, and not reported by enough workers
        self._sending: dict[str, _Count] = {}  # in order of the first report
        self._num_strays = 0

    def begin_step(self, output: SchedulerOutput) -> None:
        """Note the loads that begin and the requests that ended; before the step's hooks."""
        for request_id in output.async_loading_req_ids:
            self._loading[request_id] = _Count(self._expected)
        for request_id in output.finished_req_ids:
            self._sending.pop(request_id, None)

    def aggregate(self, outputs: Sequence[KVConnectorOutput | None]) -> KVConnectorOutput | None:
        """One step's reports, by rank; None if there is nothing to say.

        Raises: `ConnectorError` if they do not fit together.
        """
        said = [output for output in outputs if output is not None]
        if not said:
            return None
        merged = KVConnectorOutput.merge(*said)
        self._expected = merged.expected_finished_count or self._expected
        recving, sending = set[str](), set[str]()
        for rank, output in enumerate(outputs):
            if output is not None:
                recving |= self._count_loads(rank, output.finished_recving or ())
                sending |= self._count_sends(rank, output.finished_sending or ())
        merged.finished_recving = recving or None
        merged.finished_sending = sending or None
        return None if merged.is_empty() else merged

    def take_num_strays(self) -> int:
        """Reports since the last call that counted for nothing."""
        taken, self._num_strays = self._num_strays, 0
        return taken

    def _count_loads(self, rank: int, request_ids: Iterable[str]) -> set[str]:
        complete = set()
        for request_id in request_ids:
            count = self._loading.get(request_id)
            if count is None:
                self._num_strays += 1
            elif self._is_complete(count, rank):
                del self._loading[request_id]
                complete.add(request_id)
        return complete

    def _count_sends(self, rank: int, request_ids: Iterable[str]) -> set[str]:
        complete = set()
        for request_id in request_ids:
            count = self._sending.setdefault(request_id, _Count(self._expected))
            if self._is_complete(count, rank):
                del self._sending[request_id]
                complete.add(request_id)
        while len(self._sending) > MAX_OPEN_SENDS:
            self._num_strays += len(self._sending.pop(next(iter(self._sending))).ranks)
        return complete

    def _is_complete(self, count: _Count, rank: int) -> bool:
        self._num_strays += rank in count.ranks
        count.ranks.add(rank)
        return len(count.ranks) >= count.expected
