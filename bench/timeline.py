"""When each request's tokens arrived, and the figures that follow. Knows no engine.

Decoding is timed while every request has its first token, so that no prefill is in the rate:

    request 1   ..first.....o....o....o....o....o
    request 2   ...........first.o....o....o....o....o
                             [----- decode window ----]
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence

from interlace.bench.workload import Work


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """What one run of one piece of work took. Times in seconds."""

    batch_size: int
    prompt_tokens: int
    """Of each request."""
    first_token_s: float
    """From the call until every request had its first token."""
    decode_s: float
    """Length of the decode window."""
    decode_steps: int
    """Most tokens that one request got in the window."""
    decode_tokens: int
    """Tokens that all requests got in the window."""
    median_step_s: float = 0.0
    """Between two tokens of one request, at the median: what a busy machine stretches least."""
    cached_tokens: int = 0
    """Prompt tokens of all requests that the prefix cache held."""
    loaded_tokens: int = 0
    """Prompt tokens of all requests that a KV connector brought."""
    idle_s: float | None = None
    """From the call until the engine was idle again, saving included; None where it is not told."""
    worst_lag_s: float | None = None
    """Worst lag of the event loop during the run; None where no loop is involved."""

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens of all requests by the time to their first tokens."""
        return self.batch_size * self.prompt_tokens / self.first_token_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Of all requests together; 0 if only first tokens were asked for."""
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0

    @property
    def step_s(self) -> float:
        """One decode step of the whole batch; 0 if only first tokens were asked for."""
        return self.decode_s / self.decode_steps if self.decode_steps else 0.0


def sample_of(
    work: Work, started: float, arrivals: Sequence[Sequence[float]], *, cached_tokens: int = 0
) -> Sample:
    """The figures of one run.

    `arrivals` holds for each request the time of each token, at least one, ascending, on the
    same clock as `started`.
    """
    last_to_start = max(arrivals, key=lambda times: times[0])
    opened = last_to_start[0]
    closed = max(times[-1] for times in arrivals)
    # Tokens of the step that opens the window are read microseconds before or after it opens,
    # and were computed before it. Those of the next step come with this request's second token.
    next_step = last_to_start[1] if len(last_to_start) > 1 else opened
    boundary = (opened + next_step) / 2
    counts = [sum(t > boundary for t in times) for times in arrivals]
    return Sample(
        batch_size=work.batch_size,
        prompt_tokens=work.prompt_tokens,
        first_token_s=opened - started,
        decode_s=closed - opened,
        decode_steps=max(counts),
        decode_tokens=sum(counts),
        median_step_s=_median_gap(arrivals),
        cached_tokens=cached_tokens,
    )


def _median_gap(arrivals: Sequence[Sequence[float]]) -> float:
    gaps = [b - a for times in arrivals for a, b in itertools.pairwise(times)]
    return statistics.median(gaps) if gaps else 0.0
