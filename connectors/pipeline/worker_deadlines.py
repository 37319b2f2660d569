"""What goes on beside the steps, on a lane that may hang: a deadline. Device thread."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from interlace.connectors.pipeline.worker_feeder import (
    Copies,
    CopyLayers,
    FedTransfer,
    Feeder,
    Visit,
)
from interlace.connectors.pipeline.worker_times import Stopwatch
from interlace.engine.errors import ConnectorError
from interlace.engine.ports import Gate, Lane

logger = logging.getLogger(__name__)


class PatientFeeder(Feeder):
    """A feeder that gives up on its lane if nothing ends there for some time.

    All transfers have failed then, and nothing of them is begun any more. Each is done at once,
    but for the one whose copy is under way: that still has its blocks, and is done when the copy
    returns. What comes later goes on a fresh lane. What is on a stream cannot be taken back: there
    all are done when the stream has passed them.
    """

    def __init__(
        self,
        make_lane: Callable[[], Lane],
        copies: Copies,
        copy_layers: CopyLayers,
        *,
        window_bytes: int,
        watch: Stopwatch,
        deadline_s: float,
        clock: Callable[[], float],
        is_stream: bool,
    ) -> None:
        """`deadline_s` is for the oldest work on the lane, a small part of a window; `clock` gives
        seconds."""
        super().__init__(
            make_lane(),
            copies,
            copy_layers,
            window_bytes=window_bytes,
            watch=watch,
            is_stream=is_stream,
            clock=clock,
        )
        self._make_lane = make_lane
        self._deadline_s = deadline_s
        self._oldest: Gate | None = None
        self._since = 0.0  # it is the oldest one
        self._is_overdue = False
        self._stuck: list[tuple[FedTransfer, Gate]] = []
        self.num_given_up = 0
        """Transfers that have failed since the lane hung, since the start."""

    @property
    def is_idle(self) -> bool:
        """See `Feeder`."""
        return super().is_idle and not self._stuck

    @property
    def num_hanging(self) -> int:
        """Transfers that were given up, and still have their blocks."""
        fed = [one for one, *_ in self._fed] if self._is_overdue else []
        return len({id(one) for one in (*fed, *(one for one, _ in self._stuck))})

    def poll(self, *, may_feed: bool, visit: Visit = Visit.BEHIND_FORWARD) -> None:
        """See `Feeder`; and see whether the lane hangs."""
        if self._stuck:
            self._stuck = [one for one in self._stuck if not _note_if_ended(*one)]
        super().poll(may_feed=may_feed, visit=visit)
        if self._stands_still():
            self._give_up_on_lane()

    def close(self, timeout_s: float) -> bool:
        """See `Feeder`; False too if a copy has not returned from a lane that was given up."""
        return super().close(timeout_s) and not self._stuck

    def _stands_still(self) -> bool:
        """Whether the oldest work has been that for too long; said once of each."""
        oldest = self._fed[0][1] if self._fed else None
        if oldest is not self._oldest:
            self._oldest, self._since, self._is_overdue = oldest, self._clock(), False
        elif oldest is not None and not self._is_overdue:
            self._is_overdue = self._clock() - self._since >= self._deadline_s
            return self._is_overdue
        return False

    def _give_up_on_lane(self) -> None:
        error = ConnectorError(
            f"nothing was copied on lane {self.lane.name!r} for {self._deadline_s:g} s: what was to"
            " be loaded is computed instead, what was to be saved is not kept. Is the store, or the"
            " machine, busy with other things?"
        )
        failed = {id(one): one for one in (*self._waiting, *(fed[0] for fed in self._fed))}
        for transfer in failed.values():
            transfer.fail(error)
        self.num_given_up += len(failed)
        name = self.lane.name
        if not self._is_stream:
            self._change_lane()
        logger.error(
            "lane %r has hung for %g s: %d transfers failed, and %d of them keep their blocks until"
            " what is under way of them has ended: those of %s",
            name,
            self._deadline_s,
            len(failed),
            sum(not one.is_done for one in failed.values()),
            ", ".join(one.name for one in failed.values() if not one.is_done) or "nobody",
        )

    def _change_lane(self) -> None:
        """Drop what has not begun, and go on with another lane."""
        self.lane.close(0.0)
        fed, self._fed = self._fed, deque()
        self._fed_bytes, self._fed_calls = 0, 0.0
        self._stuck += [
            (transfer, gate) for transfer, gate, _ in fed if not _note_if_ended(transfer, gate)
        ]
        self.lane = self._make_lane()


def _note_if_ended(transfer: FedTransfer, gate: Gate) -> bool:
    has_ended = gate.query()
    if has_ended:
        transfer.note_ended(gate)
    return has_ended
