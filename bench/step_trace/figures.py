"""The figures of a timeline: how long, how much, and what of the load was hidden. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from interlace.bench.step_trace.intervals import Interval, common, merged, total_ns
from interlace.bench.step_trace.trace import AnyTrace, HybridTrace, Span


@dataclasses.dataclass(frozen=True, slots=True)
class StepFigures:
    """Times in seconds."""

    total_s: float
    """From the first event to the last."""
    load_s: float
    """From the first copy to the end of the last one."""
    load_bytes: int
    compute_s: float
    """In which the compute lane worked: neither waited nor idled."""
    both_s: float
    """In which both lanes worked."""
    hidden_share: float
    """Beside computing, of the time in which the load lane worked; from both ends, of the shorter
    of that and computing: there each could hide the other."""
    wait_s: float
    """In which computing stood at gates."""
    num_waits: int
    """Layers that had to wait."""
    longest_wait: tuple[int, float] | None
    """(layer, seconds); None if no layer waited."""

    @property
    def load_gb_per_s(self) -> float:
        """10^9 bytes a second; 0 if it took no time."""
        return self.load_bytes / self.load_s / 1e9 if self.load_s else 0.0


def figures_of(trace: AnyTrace) -> StepFigures:
    """See `StepFigures`."""
    load, compute = _busy(trace.load), _busy(trace.compute)
    both = total_ns(common(load, compute))
    waits = [
        (span.layer, span.wait.length_ns / 1e9)
        for span in trace.compute
        if span.wait is not None and span.layer is not None
    ]
    hideable, computed = total_ns(load), total_ns(compute)
    if isinstance(trace, HybridTrace):
        hideable = min(hideable, computed)
    return StepFigures(
        total_s=trace.end_ns / 1e9,
        load_s=(trace.load[-1].end_ns - trace.load[0].begin_ns) / 1e9,
        load_bytes=sum(span.num_bytes for span in trace.load),
        compute_s=computed / 1e9,
        both_s=both / 1e9,
        hidden_share=both / hideable if hideable else 0.0,
        wait_s=sum(seconds for _, seconds in waits),
        num_waits=len(waits),
        longest_wait=max(waits, key=lambda wait: wait[1], default=None),
    )


def _busy(spans: Sequence[Span]) -> tuple[Interval, ...]:
    return merged(interval for span in spans for interval in span.busy)
