"""What tables show of samples: names with their units, and spreads over the repeats."""

from __future__ import annotations

from collections.abc import Sequence

from interlace.bench.report import Check
from interlace.bench.spread import Spread
from interlace.bench.timeline import Sample

LAG_BAR_MS = 20.0

Figures = dict[str, Spread]


def first_token(samples: Sequence[Sample]) -> Figures:
    """Time from the call to the first token of every request."""
    return {"first token ms": Spread.of(s.first_token_s * 1e3 for s in samples)}


def step(samples: Sequence[Sample]) -> Figures:
    """Time of a decode step of the whole batch, on average over a run."""
    return {"ms/step": Spread.of(s.step_s * 1e3 for s in samples)}


def decode_rate(samples: Sequence[Sample]) -> Figures:
    """Tokens of all requests together."""
    return {"tokens/s": Spread.of(s.decode_tokens_per_s for s in samples)}


def prefill_rate(samples: Sequence[Sample]) -> Figures:
    """Prompt tokens of all requests together."""
    return {"prompt tokens/s": Spread.of(s.prefill_tokens_per_s for s in samples)}


def cached(samples: Sequence[Sample]) -> Figures:
    """Prompt tokens that the prefix cache held."""
    return {"cached tokens": Spread.of(s.cached_tokens for s in samples)}


def share(name: str, least_s: float, times: Spread) -> Figures:
    """The least time as a share of the times taken, in seconds; 0 where no time was told."""
    return {name: Spread.of(least_s / s if s else 0.0 for s in times.samples)}


def lag(samples: Sequence[Sample]) -> Figures:
    """Worst lag of the event loop, where one is involved."""
    lags = [s.worst_lag_s * 1e3 for s in samples if s.worst_lag_s is not None]
    return {"worst lag ms": Spread.of(lags)} if lags else {}


def lag_check(samples: Sequence[Sequence[Sample]]) -> Check:
    """The worst lag of all runs against the bar that holds everywhere."""
    lags = [s.worst_lag_s for taken in samples for s in taken if s.worst_lag_s is not None]
    return Check("worst event-loop lag, ms", max(lags, default=0.0) * 1e3, at_most=LAG_BAR_MS)
