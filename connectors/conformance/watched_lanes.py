"""Virtual lanes whose work is watched, and that know who waits for them."""

from __future__ import annotations

from interlace.connectors.conformance.watch import Watch
from interlace.layers.virtual_lanes import Policy, VirtualGate, VirtualLane, VirtualLanes


class WatchedLanes(VirtualLanes):
    """Each piece of work is told to a `Watch` before and after it runs."""

    def __init__(self, watch: Watch, seed: int, policy: Policy) -> None:
        super().__init__(
            seed, policy, on_before_work=watch.begin_work, on_after_work=self._end_work
        )
        self._watch = watch
        self.names: set[str] = set()
        """Of all lanes that were ever asked for."""
        self.waits: list[str] = []
        """Labels of what is waited for, the innermost last."""
        self.holds_back = False
        """While it is set, questions let nothing run: only waits do."""
        self.newest_first = False
        """Of lanes that the policy does not tell apart, the newest one advances first."""
        self.num_done = 0
        """Pieces of work that have ended."""

    def _end_work(self, label: str, error: BaseException | None) -> None:
        self.num_done += 1
        self._watch.end_work(label, error)

    def lane(self, name: str, *, max_pending: int = 1024) -> VirtualLane:
        """See the base class."""
        self.names.add(name)
        return super().lane(name, max_pending=max_pending)

    def poll(self, asked: VirtualGate | VirtualLane) -> None:
        """See the base class."""
        if not self.holds_back:
            super().poll(asked)

    def _choose(self) -> VirtualLane | None:
        able = [lane for lane in self._lanes if lane.can_advance]
        if self.newest_first and able:
            return min(reversed(able), key=self._rank)
        return super()._choose()

    def run_until_ended(self, asked: VirtualGate | VirtualLane, *, may_give_up: bool) -> bool:
        """See the base class."""
        self.waits.append(asked.label)
        try:
            return super().run_until_ended(asked, may_give_up=may_give_up)
        finally:
            self.waits.pop()
