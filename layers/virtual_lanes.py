"""Lanes that run on the thread of whoever asks, in an order that a seed decides and can repeat.

A lane is a queue of closures, a gate is a dependency, and nothing runs by itself: work advances
when somebody waits for a gate, asks for one, closes a lane, or calls `advance` or `drain`. So one
run is one interleaving, and the same seed brings it back. Time does not pass: a wait with a timeout
gives up only if nothing can run any more. A wait that would never end raises, in place of hanging.
"""

from __future__ import annotations

import collections
import random
import threading
from collections.abc import Callable, Sequence
from typing import Literal

from interlace.engine.errors import ConfigError, VirtualLaneError
from interlace.layers.lane_queue import without_frames
from interlace.layers.virtual_lane import VirtualGate, VirtualLane

__all__ = ["Policy", "VirtualGate", "VirtualLane", "VirtualLanes"]

Policy = Literal["seed", "eager", "lazy"] | Sequence[str]
"""Which lane advances, and when.

- "seed": any lane that can; a question lets none, one or two works run before it is answered.
- "eager": each work runs as soon as it can, at best while it is submitted.
- "lazy": only what a wait needs runs; a question lets one such work run after it was asked
  `polls_per_work` times, so that whoever asks again and again gets on too.
- names of lanes: of the lanes that can advance, the first of the list does, then others in the
  order in which they were made; a question lets one work run.
"""


class VirtualLanes:
    """Makes lanes, and lets them advance. One thread at a time; others wait for it."""

    def __init__(
        self,
        seed: int,
        policy: Policy = "seed",
        *,
        polls_per_work: int = 4,
        trace_length: int = 10_000,
        on_before_work: Callable[[str], None] | None = None,
        on_after_work: Callable[[str, BaseException | None], None] | None = None,
    ) -> None:
        """`polls_per_work` is for the policy "lazy" alone.

        `on_before_work` and `on_after_work` get each work's label, and the latter what it raised;
        they may look at everything, and what they raise goes to whoever let the work run. Raises:
        `ConfigError` for an unknown policy or a number below 1.
        """
        if isinstance(policy, str) and policy not in ("seed", "eager", "lazy"):
            raise ConfigError(
                f"policy must be 'seed', 'eager', 'lazy' or a sequence of names, not {policy!r}."
            )
        if polls_per_work < 1 or trace_length < 1:
            raise ConfigError("polls_per_work and trace_length must be at least 1.")
        self.policy = policy if isinstance(policy, str) else tuple(policy)
        self.trace: collections.deque[str] = collections.deque(maxlen=trace_length)
        """Labels of works that have begun, as "store#12" or "store-2#1": the newest ones."""
        self.on_before_work = on_before_work
        self.on_after_work = on_after_work
        self.lock = threading.RLock()
        self._random = random.Random(seed)
        self._polls_per_work = polls_per_work
        self._lanes: list[VirtualLane] = []
        self._num_named: collections.Counter[str] = collections.Counter()
        self._is_running_all = False

    def lane(self, name: str, *, max_pending: int = 1024) -> VirtualLane:
        """A lane of its own. Raises: `ValueError` if `max_pending` is not positive."""
        with self.lock:
            self._num_named[name] += 1
            number = self._num_named[name]
            lane = VirtualLane(self, name, name if number == 1 else f"{name}-{number}", max_pending)
            self._lanes = [
                one for one in self._lanes if not (one.queue.is_closed and one.has_ended)
            ]
            self._lanes.append(lane)
        return lane

    @property
    def pending(self) -> list[str]:
        """Labels of works and records that have not ended. Nothing runs by that."""
        with self.lock:
            queues = [lane.queue for lane in self._lanes]
            running = [queue.running for queue in queues if queue.running is not None]
            queued = [entry for queue in queues for entry in queue.entries]
            return [entry.gate.label for entry in (*running, *queued)]

    # ---------------------------------------------------------------- what makes work run

    def advance(self) -> bool:
        """Run one work, of the lane that the policy chooses; False if none can run."""
        with self.lock:
            lane = self._choose()
            if lane is not None:
                self._run(lane)
        return lane is not None

    def drain(self) -> None:
        """Run until nothing can run. Raises: what the hooks raise."""
        while self.advance():
            pass

    def poll(self, asked: VirtualGate | VirtualLane) -> None:
        """For gates and lanes: somebody asks."""
        with self.lock:
            if asked.has_ended:
                return
            if self.policy == "lazy":
                asked.num_polls += 1
                if asked.num_polls % self._polls_per_work == 0:
                    self._run_any(self._needed(asked.lane))
                return
            for _ in range(self._random.randrange(3) if self.policy == "seed" else 1):
                self._run_any(self._choose())

    def run_until_ended(self, asked: VirtualGate | VirtualLane, *, may_give_up: bool) -> bool:
        """For gates and lanes: somebody waits."""
        with self.lock:
            while not asked.has_ended:
                lane = self._needed(asked.lane) if self.policy == "lazy" else self._choose()
                if lane is not None:
                    self._run(lane)
                elif may_give_up:
                    return False
                else:
                    raise self._stuck(asked)
        return True

    def changed(self) -> None:
        """For lanes: something was queued, or dropped."""
        self._end_records()
        if self.policy != "eager" or self._is_running_all:
            return
        self._is_running_all = True
        try:
            self.drain()
        finally:
            self._is_running_all = False

    # ---------------------------------------------------------------- which one

    def _choose(self) -> VirtualLane | None:
        """A lane that can advance."""
        able = [lane for lane in self._lanes if lane.can_advance]
        if not able:
            return None
        if self.policy == "seed":
            return self._random.choice(able)
        return min(able, key=self._rank)  # the first one of equals

    def _rank(self, lane: VirtualLane) -> int:
        """Its place in the policy's list; equal for all lanes without a list, or not on it."""
        names = () if isinstance(self.policy, str) else self.policy
        return names.index(lane.name) if lane.name in names else len(names)

    def _needed(self, lane: VirtualLane) -> VirtualLane | None:
        """A lane that has to advance for `lane` to get on: itself, or one that it waits for."""
        pending, seen = [lane], set()
        while pending:
            one = pending.pop()
            if one.can_advance:
                return one
            if one not in seen:
                seen.add(one)
                pending += one.waits_for
        return None

    # ---------------------------------------------------------------- running

    def _run_any(self, lane: VirtualLane | None) -> None:
        if lane is not None:
            self._run(lane)

    def _run(self, lane: VirtualLane) -> None:
        """Run the lane's next work. What it raises fails its gate, unless a test means it."""
        label = lane.queue.entries[0].gate.label
        if self.on_before_work is not None:
            self.on_before_work(label)
        self.trace.append(label)
        work = lane.queue.begin().work
        assert work is not None, "records end by themselves"
        error: BaseException | None = None
        try:
            work()
        except VirtualLaneError as stuck:
            error = stuck
            raise
        except Exception as raised:  # noqa: BLE001 - whatever it is, it belongs to the gate
            error = without_frames(raised, lane.label)
        except BaseException as raised:
            error = raised
            raise
        finally:
            lane.queue.end(error)
            self._end_records()
        if self.on_after_work is not None:
            self.on_after_work(label, error)

    def _end_records(self) -> None:
        """Records are no work: they end as soon as they can."""
        has_changed = True
        while has_changed:
            has_changed = False
            for lane in self._lanes:
                while lane.can_advance and lane.queue.entries[0].work is None:
                    lane.queue.begin()
                    lane.queue.end(None)
                    has_changed = True

    def _stuck(self, asked: VirtualGate | VirtualLane) -> VirtualLaneError:
        lanes = [lane.describe() for lane in self._lanes if not lane.has_ended]
        return VirtualLaneError(
            f"{asked.label} would be waited for for ever, since nothing can run:"
            f" {'; '.join(lanes)}. A work waits for what comes after it, or on its own lane."
        )
