"""The worker side of a MultiConnector: when what its children report is the whole truth.

The engine lets a request's blocks go at the first report that it waits for, so it must hear of one
only, and only when all children are done. Device thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from interlace.connectors.multi_messages import Hold


@dataclasses.dataclass(slots=True)
class _Owed:
    """An ended request that some children have not reported."""

    children: set[int]
    ends_by_load: bool
    """The engine waits for the end of a load: it is told of that, and not of sending. Every rank
    must tell the same, and one may have told of the load before it heard of the end."""


class ReportLedger:
    """Takes the children's reports, gives out those of their parent.

    A load belongs to the child that began it: nobody else can end it. An ended request is reported
    when each child that held it has reported it as sent, and its load, if one was under way, has
    ended. Whatever else children report is counted and goes no further.
    """

    def __init__(self) -> None:
        self._loading: dict[str, int] = {}  # request id -> child
        self._owed: dict[str, _Owed] = {}
        self._late: dict[str, set[int]] = {}  # children that will report what is settled already
        self._received: set[str] = set()
        self._sent: set[str] = set()
        self.num_strays = 0
        """Reports that nobody waited for."""

    def begin_step(self, loads: Mapping[str, int], holds: Mapping[str, Hold]) -> None:
        """What the scheduler side told with this step, before the children are asked."""
        for request_id, hold in holds.items():
            if hold.loader is not None and request_id not in self._loading:
                # The end of its load was reported before its own end was heard of: that lets the
                # blocks go, which were the loader's alone.
                if others := hold.children - {hold.loader}:
                    self._late.setdefault(request_id, set()).update(others)
            else:
                self._owed[request_id] = _Owed(set(hold.children), hold.loader is not None)
        self._loading.update(loads)

    def receive(self, child: int, request_ids: Iterable[str]) -> None:
        """`child` reports that these loads have ended."""
        for request_id in request_ids:
            if self._loading.get(request_id) != child:
                self.num_strays += 1
                continue
            del self._loading[request_id]
            owed = self._owed.get(request_id)
            if owed is None:
                self._received.add(request_id)
            else:
                owed.children.discard(child)  # the loader owes one report, of either kind
                self._settle(request_id, owed)

    def send(self, child: int, request_ids: Iterable[str]) -> None:
        """`child` reports that it reads these requests' blocks no longer."""
        for request_id in request_ids:
            owed = self._owed.get(request_id)
            if child in self._late.get(request_id, ()):
                # First what is owed from before: it may not stand for the next request of that id.
                self._late[request_id].discard(child)
                if not self._late[request_id]:
                    del self._late[request_id]
            elif owed is not None and child in owed.children:
                owed.children.discard(child)
                if self._loading.get(request_id) == child:
                    del self._loading[request_id]
                self._settle(request_id, owed)
            else:
                self.num_strays += 1

    def _settle(self, request_id: str, owed: _Owed) -> None:
        if owed.children or request_id in self._loading:
            return
        del self._owed[request_id]
        (self._received if owed.ends_by_load else self._sent).add(request_id)

    def take(self) -> tuple[set[str], set[str]]:
        """Ids of (sends, loads) to report with this step."""
        sent, self._sent = self._sent, set()
        received, self._received = self._received, set()
        return sent, received

    @property
    def is_idle(self) -> bool:
        """Whether no report is awaited or waits to be taken."""
        left = (self._loading, self._owed, self._late, self._received, self._sent)
        return not any(left)
