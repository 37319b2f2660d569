"""How long the device computes for a step, learnt without waiting for it. Device thread."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from interlace.connectors.pipeline.messages import StepSample
from interlace.connectors.pipeline.worker_times import Stopwatch

_MOST_PENDING = 16
"""Steps whose end was not seen yet: older ones are forgotten."""


class _Open(NamedTuple):
    num_tokens: int
    num_pairs: float
    begin: Any
    end: Any


class StepSampler:
    """Marks the begin and the end of forwards, and reads the marks when they have passed."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._begun: _Open | None = None
        self._pending: deque[_Open] = deque(maxlen=_MOST_PENDING)

    def begin(self, num_tokens: int, num_pairs: float) -> None:
        """The forward of such a step is queued from now on."""
        self._begun = _Open(num_tokens, num_pairs, self._watch.mark(), None)

    def forget(self) -> None:
        """The step tells nothing: it loads within itself, or has no forward."""
        self._begun = None

    def end(self) -> None:
        """The forward was queued. Without `begin` nothing happens."""
        begun, self._begun = self._begun, None
        if begun is not None:
            self._pending.append(begun._replace(end=self._watch.mark()))

    def take(self) -> tuple[StepSample, ...]:
        """Of the steps that have been computed since the last call."""
        samples: list[StepSample] = []
        while self._pending:
            tokens, pairs, begin, end = self._pending[0]
            seconds = self._watch.seconds(begin, end)
            if seconds is None:
                break
            self._pending.popleft()
            samples.append(StepSample(tokens, pairs, seconds))
        return tuple(samples)
