"""How fast the engine is, made of its events: for live views. Reads no clock, knows no socket."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from typing import TypeVar

from interlace.engine.events import (
    Event,
    RequestFinished,
    RequestFirstToken,
    RequestQueued,
    StepDone,
    StepLaunched,
    StepScheduled,
)
from interlace.engine.live_frame import Rates

K = TypeVar("K")
V = TypeVar("V")

WINDOW_S = 2.0
_NEWEST = 32
"""First tokens of which the median is taken."""
_MOST = 4096
"""Steps, requests and lags that are remembered at a time."""


class RateMeter:
    """Follows the events of one engine from some moment on. Times are the engine's clock's."""

    def __init__(self, now_s: float, num_under_way: int = 0) -> None:
        """Nothing has happened by then, but that so many steps are under way. They end first."""
        self._began_s = now_s
        self._num_unseen = num_under_way
        """Steps under way whose begin nobody saw."""
        self._unseen_until_s = now_s
        self._queued_s: dict[str, float] = {}
        self._first_tokens: deque[float] = deque(maxlen=_NEWEST)
        self._launched_s: dict[int, float] = {}  # of steps that compute
        self._num_tokens: dict[int, int] = {}
        self._last_done_s = now_s
        self._steps: deque[tuple[float, float, int, int]] = deque(maxlen=_MOST)
        """(end, seconds, tokens computed, tokens sampled)"""
        self._lags: deque[tuple[float, float]] = deque(maxlen=_MOST)

    def follow(self, events: Iterable[Event]) -> None:
        """What has happened, in its order."""
        for event in events:
            match event:
                case StepScheduled():
                    count = sum(number for _, number in event.num_scheduled_tokens)
                    if count:
                        _put(self._num_tokens, event.step_id, count)
                case StepLaunched():
                    if event.step_id in self._num_tokens:
                        _put(self._launched_s, event.step_id, event.time_s)
                case StepDone():
                    self._end_step(event)
                case RequestQueued():
                    _put(self._queued_s, event.request_id, event.time_s)
                case RequestFirstToken():
                    queued_s = self._queued_s.pop(event.request_id, None)
                    if queued_s is not None:
                        self._first_tokens.append(event.time_s - queued_s)
                case RequestFinished():
                    self._queued_s.pop(event.request_id, None)

    def _end_step(self, event: StepDone) -> None:
        launched_s = self._launched_s.pop(event.step_id, None)
        num_tokens = self._num_tokens.pop(event.step_id, 0)
        if self._num_unseen:
            self._num_unseen -= 1
            self._last_done_s = self._unseen_until_s = event.time_s
            return
        if launched_s is None:
            return
        # One that was launched behind another has begun when that one had ended.
        begin_s = max(launched_s, self._last_done_s)
        self._last_done_s = event.time_s
        self._steps.append(
            (event.time_s, event.time_s - begin_s, num_tokens, event.num_sampled_tokens)
        )

    def note_lag(self, now_s: float, lag_s: float) -> None:
        """The event loop came back by `lag_s` later than it was asked to."""
        self._lags.append((now_s, max(0.0, lag_s)))

    def rates(self, now_s: float, num_lost_events: int = 0) -> Rates:
        """Of the window that ends now."""
        window_s = min(WINDOW_S, now_s - self._began_s)
        begin_s = now_s - window_s
        while self._steps and self._steps[0][0] < begin_s:
            self._steps.popleft()
        while self._lags and self._lags[0][0] < begin_s:
            self._lags.popleft()
        steps = list(self._steps)
        times = [seconds for _, seconds, _, _ in steps]
        busy_s = sum(min(seconds, end_s - begin_s) for end_s, seconds, _, _ in steps)
        busy_s += max(0.0, self._unseen_until_s - max(begin_s, self._began_s))
        if self._num_unseen:
            busy_s += now_s - max(begin_s, self._last_done_s)
        elif self._launched_s:  # one is under way
            busy_s += now_s - max(begin_s, self._last_done_s, min(self._launched_s.values()))
        per_s = 1 / window_s if window_s > 0 else 0.0
        firsts = self._first_tokens
        return Rates(
            window_s=window_s,
            generated_per_s=per_s * sum(sampled for _, _, _, sampled in steps),
            computed_per_s=per_s * sum(computed for _, _, computed, _ in steps),
            steps_per_s=per_s * len(steps),
            step_s=statistics.median(times) if times else None,
            longest_step_s=max(times, default=None),
            busy_share=min(1.0, per_s * busy_s),
            first_token_s=statistics.median(firsts) if firsts else None,
            newest_first_token_s=firsts[-1] if firsts else None,
            loop_lag_s=max((lag for _, lag in self._lags), default=0.0),
            num_lost_events=num_lost_events,
        )


def _put(known: dict[K, V], key: K, value: V) -> None:
    """Remember it; the oldest goes if there are too many: events that never came."""
    known[key] = value
    if len(known) > _MOST:
        del known[next(iter(known))]
