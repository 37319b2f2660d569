"""Lets the lanes of one device get on, and the host wait for them. See `cuda_lanes.py`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from interlace.engine.ports import Gate
from interlace.layers.cuda_gates import CudaGate, Patience

if TYPE_CHECKING:
    from interlace.layers.cuda_lanes import CudaLane


class LaneHost:
    """What all lanes of one `CudaLanes` share: who is looked after, and time."""

    def __init__(self, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._clock = clock
        self._sleep = sleep
        self._thread = threading.get_ident()
        self._busy: list[CudaLane] = []

    def note_busy(self, lane: CudaLane) -> None:
        """Keep the lane, and look after it, until nothing of it is left to do."""
        if not any(lane is other for other in self._busy):
            self._busy.append(lane)

    def poll(self) -> None:
        """Let all lanes get on. Nothing on other threads than the device's."""
        if threading.get_ident() != self._thread:
            return
        # A lane that gets on may be what another one waits for.
        while any(lane.advance() for lane in self._busy):
            pass
        self._busy = [lane for lane in self._busy if not lane.is_idle]

    @property
    def holds_back(self) -> bool:
        """Whether any lane does."""
        return any(lane.is_holding_back for lane in self._busy)

    def obstacle_of(self, lane: CudaLane | None) -> Gate | None:
        """What the host has to wait for so that the lane gets on: a gate that is not ours.

        None if that is not known: on other threads, or while the lane's own work runs.
        """
        if threading.get_ident() != self._thread or lane is None:
            return None
        obstacle = lane.obstacle()
        while isinstance(obstacle, CudaGate) and obstacle.host is self:
            # Gates are made before they are waited for, so this comes to an end.
            obstacle = None if obstacle.lane is None else obstacle.lane.obstacle()
        return obstacle

    def patience(self, timeout_s: float | None) -> Patience:
        """For one wait."""
        return Patience(timeout_s, self._clock, self._sleep)
