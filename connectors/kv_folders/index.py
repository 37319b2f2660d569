"""What is stored, kept up to date by a lane that looks at the disk whenever that is due.

The event loop asks and adds; it never waits for the lane, and nothing looks while nobody asks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from interlace.connectors.kv_folders.counters import Tally
from interlace.connectors.kv_folders.folders import KVFolders
from interlace.connectors.kv_folders.known import KnownFolders
from interlace.connectors.kv_folders.listing import FolderListing
from interlace.engine.ports import Gate, Lanes

_STALE = 2.0
"""Times `refresh_s`: what is older is not answered from while a look is under way."""
_AWAITED_S = 60.0
"""A look that an answer waited for serves it at any age up to this one: between the two questions
lies a step, which may take longer than a look is good for otherwise."""


class FolderIndex:
    """For one thread, but for `known`, which any thread may ask."""

    def __init__(
        self,
        folders: Sequence[KVFolders],
        tally: Tally,
        lanes: Lanes,
        *,
        refresh_s: float,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`folders` are those of each rank, below one directory. Begins the first look.

        `refresh_s` is the time between two looks, `deadline_s` how long an answer waits for one.
        """
        self.known = KnownFolders(len(folders), clock)
        self._listing = FolderListing(folders, self.known, tally)
        self._lane = lanes.lane("index", max_pending=1)
        self._refresh_s = refresh_s
        self._deadline_s = deadline_s
        self._clock = clock
        self._looked_at: float | None = None  # when the last look ended
        self._is_closed = False
        self._is_awaited = False  # an answer waits for the latest look
        self._has_served = False  # and has had it
        self._begin_look()

    def _begin_look(self) -> None:
        self._asked_at = self._clock()
        self._look: Gate = self._lane.submit(self._run)

    def _run(self) -> None:
        """On the lane."""
        self._listing.look()
        self._looked_at = self._clock()

    def keep_fresh(self) -> None:
        """A `schedule()` is over: begin a look if it is due."""
        if self._is_closed or not self._look.query():
            return
        if self._has_served:
            self._is_awaited = self._has_served = False
        if not self._serves_who_waited:
            self._begin_if_due()

    def _begin_if_due(self) -> None:
        if not self._is_closed and self._age_s >= self._refresh_s:
            self._begin_look()

    @property
    def is_ready(self) -> bool:
        """Whether `known` may be answered from: not while it is being built, or brought up to date
        after a long time without questions, unless that takes longer than the deadline."""
        if self._look.query():
            if self._serves_who_waited:
                self._has_served = True
                return True
            self._begin_if_due()
        is_ready = self._age_s <= _STALE * self._refresh_s or self._look.query()
        self._is_awaited |= not is_ready
        return is_ready or self._clock() - self._asked_at >= self._deadline_s

    @property
    def _serves_who_waited(self) -> bool:
        return self._is_awaited and self._age_s <= _AWAITED_S

    @property
    def _age_s(self) -> float:
        """Seconds since a look has ended."""
        looked_at = self._looked_at
        return math.inf if looked_at is None else self._clock() - looked_at

    def close(self) -> None:
        """Look no more. Does not wait: a hung mount must not hold up anyone."""
        self._is_closed = True
        self._listing.stop()
        self._lane.close(timeout_s=0.0)
