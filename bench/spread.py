"""A median and how far the repeats lie around it. Knows nothing of what was measured."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable


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
