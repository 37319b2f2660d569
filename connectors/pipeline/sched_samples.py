"""Which steps are timed, for `StepTimes` to learn from. Event loop only.

Marks cost a step that loads nothing as much as all else that is done for it.
"""

from __future__ import annotations

import collections

_ALL_OF_THE_FIRST = 8
_ONE_OF = 16
"""Of each power of two of tokens the first steps are timed, and then one of so many."""


class TimedSteps:
    """Chooses steps, and says while a report on one may be expected."""

    def __init__(self, max_inflight_steps: int) -> None:
        self._num_seen = collections.Counter[int]()
        self._patience = max_inflight_steps + 1
        self._num_to_ask = 0

    @property
    def expects_report(self) -> bool:
        """Whether one of the steps just before was timed. Later the report comes with the next step
        that has one to give."""
        return self._num_to_ask > 0

    def choose(self, num_tokens: int) -> bool:
        """Whether the next step, which computes so many, is to be timed."""
        self._num_to_ask = max(0, self._num_to_ask - 1)
        if num_tokens == 0:
            return False
        size = num_tokens.bit_length()
        number = self._num_seen[size]
        self._num_seen[size] = number + 1
        is_chosen = number < _ALL_OF_THE_FIRST or number % _ONE_OF == 0
        if is_chosen:
            self._num_to_ask = self._patience
        return is_chosen
