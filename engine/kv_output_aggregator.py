"""What several workers of a connector report of one step, as one report.

An id takes effect when enough workers have reported it, which may take many steps; everything
else is merged step by step. Used by the runner, on the device thread; plain Python.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from interlace.engine.errors import ConnectorError
from interlace.engine.kv_connector import KVConnectorOutput
from interlace.engine.scheduler_output import SchedulerOutput

MAX_OPEN_SENDS = 4096
"""Ids that some workers have reported as sent though no request of that name was heard to have
ended: beyond it the oldest is dropped, for nobody can wait for it. And loads of requests that all
reported as sent since: the protocol asks for one report of the two, so seldom for these."""
MAX_SILENT_ENDS = 1 << 16
"""Ended requests that no worker has reported. Most are never held, so they are forgotten in time:
the oldest beyond this number. If one is reported after all, it counts, among `MAX_OPEN_SENDS`."""
MAX_UNEVEN_SENDS = 1 << 17
"""Ended requests that some workers have reported as sent and others have not. None is dropped, for
each may be held. A held request has at least one block that was taken for it alone, so the pool
bounds how many wait, in practice far below this; beyond it the workers do not report alike."""


@dataclasses.dataclass(slots=True)
class _Count:
    """The reports of one id."""

    expected: int
    ranks: set[int] = dataclasses.field(default_factory=set)
    has_ended: bool = False
    """The request was heard to have ended: the report of a load and that of a send free alike."""


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
        self._let_go: dict[str, _Count] = {}  # loads of requests that were reported as sent since
        self._silent: dict[str, None] = {}  # ended, in this order, and not reported by any worker
        self._sending: dict[str, _Count] = {}  # ended, and not reported by enough workers
        self._unasked: dict[str, _Count] = {}  # not heard to have ended; by their first report
        self._num_strays = 0

    def begin_step(self, output: SchedulerOutput) -> None:
        """Note the loads that begin and the requests that ended; before the step's hooks."""
        for request_id in output.finished_req_ids:
            self._unasked.pop(request_id, None)
            self._sending.pop(request_id, None)
            self._silent.pop(request_id, None)
            self._silent[request_id] = None
            if request_id in self._loading:
                self._loading[request_id].has_ended = True
        while len(self._silent) > MAX_SILENT_ENDS:
            del self._silent[next(iter(self._silent))]
        for request_id in output.preempted_req_ids:  # their loads have ended with it
            self._loading.pop(request_id, None)
        for request_id in output.async_loading_req_ids:  # of the next one of a name that has ended
            self._let_go.pop(request_id, None)
            self._loading[request_id] = _Count(self._expected)

    def aggregate(self, outputs: Sequence[KVConnectorOutput | None]) -> KVConnectorOutput | None:
        """One step's reports, by rank; None if there is nothing to say.

        Raises: `ConnectorError` if they do not fit together, or too many were never completed.
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
            counts = self._loading if request_id in self._loading else self._let_go
            count = counts.get(request_id)
            if count is None:
                self._num_strays += 1
            elif self._is_complete(count, rank):
                del counts[request_id]
                complete.add(request_id)
                if count.has_ended:
                    self._silent.pop(request_id, None)
                    self._sending.pop(request_id, None)
        return complete

    def _count_sends(self, rank: int, request_ids: Iterable[str]) -> set[str]:
        complete = set()
        for request_id in request_ids:
            counts = self._sends_with(request_id)
            count = counts.setdefault(request_id, _Count(self._expected))
            if self._is_complete(count, rank):
                del counts[request_id]
                complete.add(request_id)
                load = self._loading.get(request_id)
                if load is not None and load.has_ended:
                    # Counted on for a while: the engine may wait for the load and not for this.
                    self._let_go[request_id] = self._loading.pop(request_id)
        self._bound_sends()
        return complete

    def _sends_with(self, request_id: str) -> dict[str, _Count]:
        """Where the id is counted: apart, unless a request of that name has ended."""
        if request_id in self._silent:
            del self._silent[request_id]
            return self._sending
        return self._sending if request_id in self._sending else self._unasked

    def _bound_sends(self) -> None:
        for counts in (self._unasked, self._let_go):
            while len(counts) > MAX_OPEN_SENDS:
                self._num_strays += len(counts.pop(next(iter(counts))).ranks)
        if len(self._sending) > MAX_UNEVEN_SENDS:
            raise ConnectorError(
                f"more than {MAX_UNEVEN_SENDS} ended requests were reported as sent by some workers"
                " and not by others: let get_finished report each of them on all workers, or let"
                " get_finished_count say how many report."
            )

    def _is_complete(self, count: _Count, rank: int) -> bool:
        self._num_strays += rank in count.ranks
        count.ranks.add(rank)
        return len(count.ranks) >= count.expected
