"""How a prompt is split between computing its front and loading its back. Pure, event loop.

At first so that both end at the same time, by the rates. Then each step looks again: where one of
the two turns out to be ahead, it takes over a part of what the other has left. The load may take
over at once, since steps are planned here. To take from the load needs its answer: what it has
under way, it keeps.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from interlace.connectors.pipeline.messages import Share, ShareReport

ComputeTime: TypeAlias = Callable[[int, int], float | None]
"""(first token, end) -> seconds to compute those; None if it is not known."""
LoadTime: TypeAlias = Callable[[int], float | None]
"""Number of blocks -> seconds to load them; None if it is not known."""

LONGEST_STEP_S = 0.150
"""Of the steps that compute a front, where nobody else runs. Between two of them the split may
move; shorter ones would cost the device more than that brings."""
SHORTEST_STEP_S = 0.010
"""None is cut into shorter ones, however short others want to wait."""
_ROUND_TOKENS = 256
"""Engines pad a step to sizes for which they have graphs, and these are such."""
_MOST_ADDED = 0.1
"""Of the time that a front takes in one step, by cutting it into several."""
_LEAST_MOVED = 4
"""Blocks: for fewer, nothing changes."""
_LEAST_GAIN_S = 0.001
_LEAST_GAIN = 0.1
"""Of the time that the load still takes: for less, computing does not take over."""


class PlannedStep(NamedTuple):
    """What a step that is being planned means for one request."""

    step_id: int
    num_computed: int
    """Tokens that steps before were planned for."""
    num_planned: int
    """With this step's."""
    max_inflight_steps: int
    """So many steps, this one with them, may not have ended."""


def balance(
    first: int,
    end: int,
    compute_s: Callable[[int], float],
    load_s: Callable[[int], float],
) -> int:
    """The block of [first, end] for which the longer one of `compute_s`, which does not fall with
    the block, and `load_s`, which does not rise, is shortest."""
    low, high = first, end
    while low < high:
        middle = (low + high) // 2
        if compute_s(middle) < load_s(middle):
            low = middle + 1
        else:
            high = middle
    candidates = range(max(first, low - 1), low + 1)
    return min(candidates, key=lambda block: max(compute_s(block), load_s(block)))


def stop_of_step(
    first: int,
    end: int,
    block_size: int,
    compute_s: ComputeTime,
    *,
    others_wait_s: float | None = None,
) -> int:
    """Up to where of tokens [first, end) one step should compute; of round numbers of tokens but
    for the last step. Whole blocks, as `end`. `end` if times are not known.

    Where nobody else runs, steps take about `LONGEST_STEP_S`, or longer where they cost much
    however short they are. `others_wait_s`: others run, and are to wait for so long at most; they
    need steps anyway, so further ones cost nothing.
    """
    whole_s = compute_s(first, end) if first < end else None
    if whole_s is None:
        return end
    least_s = compute_s(first, min(first + block_size, end)) or 0.0
    if others_wait_s is not None:
        longest_s = max(others_wait_s, SHORTEST_STEP_S)
        each_s = max(longest_s - least_s, longest_s / 2)  # besides what every step takes
        num_steps = max(1, math.ceil((whole_s - least_s) / each_s))
    else:
        num_steps = _num_steps(whole_s, least_s)
    if num_steps == 1:
        return end
    part_s = least_s + (whole_s - least_s) / num_steps
    step = max(1, _ROUND_TOKENS // block_size)
    blocks = range(first // block_size + step, end // block_size, step)

    def takes_s(block: int) -> float:
        return compute_s(first, block * block_size) or 0.0

    found = bisect.bisect_left(blocks, part_s, key=takes_s)
    nearest = min(
        blocks[max(0, found - 1) : found + 1], key=lambda b: abs(takes_s(b) - part_s), default=0
    )
    return nearest * block_size or end


def _num_steps(whole_s: float, least_s: float) -> int:
    """In how many a front is cut that takes `whole_s` in one, where each takes `least_s` however
    short it is. All further ones may cost a tenth of the whole."""
    if whole_s < 1.5 * LONGEST_STEP_S:
        return 1
    most = 1 + int(_MOST_ADDED * whole_s / least_s) if least_s > 0 else 1
    return min(round(whole_s / LONGEST_STEP_S), most)


class Split:
    """Of one request, from its admission on. Blocks are counted from the prompt's beginning."""

    def __init__(
        self, load_id: int, floor: int, end: int, block_size: int, *, fetched_share: float = 0.0
    ) -> None:
        """The load brings blocks [floor, end), of which a share is read from files first."""
        self.load_id = load_id
        self.fetched_share = fetched_share
        self._floor = floor
        self._end = end
        self._block_size = block_size
        self._revision = 0
        self._asks = False  # whether the floor is to rise, and the load has not answered
        self._has_ended = False
        self._num_loaded = 0
        self._last_step_id = 0  # the newest that computes a part of it

    @property
    def compute_end(self) -> int:
        """Tokens up to which the steps compute: what is behind is loaded, or being loaded."""
        return self._floor * self._block_size

    @property
    def num_open_blocks(self) -> int:
        """Blocks still to be loaded, by the latest report."""
        return 0 if self._has_ended else self._end - self._floor - self._num_loaded

    @property
    def num_blocks(self) -> int:
        """Blocks that are loaded in all, as it stands."""
        return self._end - self._floor

    def follow(self, report: ShareReport) -> None:
        """The worker side has said how far the load is."""
        self._num_loaded = report.num_loaded
        self._has_ended |= report.has_ended
        if report.has_ended or (self._asks and report.revision == self._revision):
            self._floor = self._end - report.num_blocks
            self._asks = False

    def cancel(self) -> Share | None:
        """Let the load end with what is under way; None if it has ended."""
        return None if self._has_ended else self._say(self._end)

    def lose(self) -> None:
        """The load ends with what has come: its blocks are handed on."""
        self._floor = self._end - self._num_loaded

    def adjust(self, step: PlannedStep, compute_s: ComputeTime, load_s: LoadTime) -> Share | None:
        """Give one of the two a part of what the other has left, if that is sooner."""
        num_computed, num_planned = step.num_computed, step.num_planned
        if num_planned > num_computed:
            self._last_step_id = step.step_id
        if self._has_ended or self._asks:
            return None
        planned = -(-num_planned // self._block_size)
        loaded = self._end - self._num_loaded
        if compute_s(num_computed, self._end * self._block_size) is None or load_s(1) is None:
            return None

        def computing_s(block: int) -> float:
            return compute_s(num_computed, block * self._block_size) or 0.0

        def loading_s(block: int) -> float:
            return load_s(loaded - block) or 0.0

        if planned < self._floor:
            floor = balance(planned, self._floor, computing_s, loading_s)
            if self._floor - floor < _LEAST_MOVED:
                return None
            self._floor = floor
            return self._say(floor)
        may_compute = self._last_step_id > step.step_id - step.max_inflight_steps
        if may_compute or num_computed < self.compute_end or loaded <= self._floor:
            return None
        floor = balance(self._floor, loaded, computing_s, loading_s)
        gain_s = loading_s(self._floor) - max(computing_s(floor), loading_s(floor))
        if gain_s < max(_LEAST_GAIN_S, _LEAST_GAIN * loading_s(self._floor)):
            return None
        self._asks = True
        return self._say(floor)

    def _say(self, floor: int) -> Share:
        self._revision += 1
        return Share(self.load_id, self._revision, self._end - floor)

    def __repr__(self) -> str:
        return f"<Split load={self.load_id} [{self._floor}, {self._end}) -{self._num_loaded}>"
