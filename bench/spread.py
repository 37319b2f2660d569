"""A median and how far the repeats lie around it, and percentiles. Knows nothing of what was
measured."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence

_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """Several measurements of one quantity, in its own unit."""

    median: float
    low: float
    high: float
    samples: tuple[float, ...]
    """All of them, in the order in which they were taken."""

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Summarise at least one value."""
        samples = tuple(values)
        assert samples, "nothing was measured"
        return cls(statistics.median(samples), min(samples), max(samples), samples)

    @property
    def median_error(self) -> float:
        """Standard error of the median, whatever the distribution, by ranks.

        The rank of the true median among n samples is n / 2, give or take sqrt(n) / 2.
        """
        ordered, middle = sorted(self.samples), len(self.samples) / 2
        reach = math.sqrt(len(ordered)) / 2
        low, high = math.floor(middle - reach), math.ceil(middle + reach) - 1
        return (ordered[high] - ordered[low]) / 2


def percentile(values: Sequence[float], share: float) -> float:
    """The least of `values`, at least one, that so large a share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered) - _ROUNDING) - 1)]
