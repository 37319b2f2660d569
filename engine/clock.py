"""The one place in `engine/` that reads real time; everything else is given a `ports.Clock`."""

from __future__ import annotations

import time


class MonotonicClock:
    """`ports.Clock` over the machine's monotonic clock."""

    def monotonic(self) -> float:
        """Seconds since some fixed point; never goes back."""
        return time.monotonic()
