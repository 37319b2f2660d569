"""How long loads and steps take on this machine, and which way of loading promises to be soonest.

**Loads**: bytes by a rate, which begins with what the worker side measured at the start and then
follows what loads took: sums of bytes and of seconds in which older loads count ever less. So a
long load says more about the rate than a short one.

**Steps**: t = a + b * tokens + c * pairs, none of them negative. `a` is what a step costs however
little it computes (launches, reading the weights), `b` what a token costs, `c` what a pair of a
token and one that it attends to costs: tokens * (context + tokens / 2), summed over requests. Least
squares of the relative error, so that decodes of milliseconds count as much as long prompts. Kept
are the newest samples of each power of two of tokens: a thousand decodes do not push out the one
prompt from which a token's price is known. With three numbers to find, all seven sets of them that
may be above zero are tried, and the best that has no negative one is taken: exact, and cheaper than
a general solver's iterations. Where all steps had about the same size, noise decides between the
prices, and all of a long prompt may look as cheap as a part of it: then nothing would be loaded,
for ever. So what is to be computed in place of a load is held to a bound: `at_least_seconds`.

Pure Python, event loop; reads no clock.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
import operator
from collections.abc import Iterable, Sequence

from interlace.connectors.pipeline.messages import LoadSample, StepSample, num_pairs
from interlace.connectors.pipeline.options import LoadMode

SAMPLES_OF_A_SIZE = 8
"""Steps that are kept of each power of two of tokens."""
_KEPT_SHARE = 0.9
"""Of what is known of the load rate, when a load is added."""
_FIRST_RATE_S = 0.010
"""The rate at the start counts like a load that took so long."""
_SUBSETS = tuple(subset for size in (3, 2, 1) for subset in itertools.combinations((1, 2, 0), size))
"""Of a step's prices, by their index. The first of equally good ones is taken: if the steps seen
do not tell a step's price from a token's, long prompts had better not look free."""
_BESIDE_S = 0.004
"""What a load beside the steps costs its request besides: the host plans, launches and waits for
more steps, of which the device's times know nothing. 4 to 5 ms on the machine of the README's
tables, whose host is slow."""
_BOTH_ENDS_S = 0.006
"""The same of a load from the back: its front is launched piece by piece first."""
_READING_S = 0.03
"""What that costs more where the back is read from files: readers and who launches the front wait
for each other. A prompt of 8,192 tokens whose files were cached took 109 ms so, and 92 in bulk,
where rates promised some 65 and 75 (an NVIDIA H200)."""
_TINY = 1e-9
_MARGIN = 1e-6


class LoadRate:
    """Bytes a second from the records to the pages."""

    def __init__(self, bytes_per_s: float) -> None:
        """`bytes_per_s` was measured at the start; 0 if it was not."""
        self._bytes = bytes_per_s * _FIRST_RATE_S
        self._seconds = _FIRST_RATE_S if bytes_per_s > 0 else 0.0

    def add(self, samples: Iterable[LoadSample]) -> None:
        """Learn from loads. Those without a duration are ignored."""
        for sample in samples:
            if sample.seconds > 0 and sample.num_bytes > 0:
                self._bytes = _KEPT_SHARE * self._bytes + sample.num_bytes
                self._seconds = _KEPT_SHARE * self._seconds + sample.seconds

    def seconds(self, num_bytes: int) -> float | None:
        """How long a load of so much takes; None if no rate is known."""
        if self._bytes <= 0:
            return None
        return num_bytes * self._seconds / self._bytes


class StepTimes:
    """How long the device computes for a step of given size."""

    def __init__(self) -> None:
        """Nothing is known."""
        self._samples: dict[int, collections.deque[StepSample]] = {}
        self._prices: tuple[float, float, float] | None = None
        self._largest = StepSample(1, 0.0, 0.0)  # of those that the prices are of

    def add(self, samples: Iterable[StepSample]) -> None:
        """Learn from steps. Those without tokens or a duration are ignored."""
        for sample in samples:
            if sample.num_tokens > 0 and sample.seconds > 0:
                size = sample.num_tokens.bit_length()
                kept = self._samples.setdefault(size, collections.deque(maxlen=SAMPLES_OF_A_SIZE))
                kept.append(sample)
                self._prices = None

    def seconds(self, num_tokens: int, num_context_tokens: int) -> float | None:
        """For `num_tokens` of one request behind `num_context_tokens`; None before any sample."""
        if not self._samples:
            return None
        if num_tokens <= 0:
            return 0.0
        if self._prices is None:
            samples = [sample for kept in self._samples.values() for sample in kept]
            self._prices = fit_prices(samples)
            self._largest = max(samples, key=lambda one: (one.num_tokens, -one.seconds))
        a, b, c = self._prices
        return a + b * num_tokens + c * num_pairs(num_tokens, num_context_tokens)

    def at_least_seconds(self, num_tokens: int, num_context_tokens: int) -> float | None:
        """The same, but more tokens than any step had that was seen take longer by as much as they
        are more. For what might be loaded instead: a load that was tried in vain is known for it,
        and one that was not tried never is."""
        seconds, largest = self.seconds(num_tokens, num_context_tokens), self._largest
        if seconds is None or num_tokens <= largest.num_tokens:
            return seconds
        return max(seconds, largest.seconds * num_tokens / largest.num_tokens)


def fit_prices(samples: Sequence[StepSample]) -> tuple[float, float, float]:
    """(seconds a step, a token, a pair) that are not negative and have the least sum of squared
    relative errors. `samples`, at least one, have tokens and durations above 0."""
    rows = [
        (
            1 / sample.seconds,
            sample.num_tokens / sample.seconds,
            sample.num_pairs / sample.seconds,
        )
        for sample in samples
    ]
    scales = [max(row[i] for row in rows) or 1.0 for i in range(3)]
    scaled = [[x / scale for x, scale in zip(row, scales, strict=True)] for row in rows]
    best: tuple[float, list[float]] | None = None
    for subset in _SUBSETS:
        found = _solve(scaled, subset)
        if found is None or min(found) < 0:
            continue
        error = sum((sum(map(operator.mul, row, found)) - 1) ** 2 for row in scaled)
        if best is None or error < best[0] - _MARGIN * (1 + best[0]):
            best = error, found
    assert best is not None, "one price alone always fits"
    a, b, c = (x / scale for x, scale in zip(best[1], scales, strict=True))
    return a, b, c


def _solve(rows: Sequence[Sequence[float]], subset: Sequence[int]) -> list[float] | None:
    """Least squares of rows @ x = 1 where x is 0 outside of `subset`; None if that leaves it open.

    By the normal equations and Gaussian elimination.
    """
    matrix = [
        [sum(row[i] * row[j] for row in rows) for j in subset] + [sum(row[i] for row in rows)]
        for i in subset
    ]
    size = len(subset)
    largest = max(matrix[k][k] for k in range(size))
    for k in range(size):
        pivot = max(range(k, size), key=lambda i: abs(matrix[i][k]))
        if abs(matrix[pivot][k]) <= _TINY * largest:
            return None
        matrix[k], matrix[pivot] = matrix[pivot], matrix[k]
        for i in range(size):
            if i != k:
                factor = matrix[i][k] / matrix[k][k]
                matrix[i] = [x - factor * y for x, y in zip(matrix[i], matrix[k], strict=True)]
    found = [0.0, 0.0, 0.0]
    for k, index in enumerate(subset):
        found[index] = matrix[k][size] / matrix[k][k]
    return found


class Way(enum.Enum):
    """How a request gets the KV of what is stored of it."""

    RECOMPUTE = enum.auto()
    HYBRID = enum.auto()
    BULK = enum.auto()
    LAYERWISE = enum.auto()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """What each way is expected to take, in seconds; None if it is not known."""

    load_s: float | None
    """This request's load within the step, behind other loads of the step."""
    bulk_load_s: float | None
    """This request's load beside the steps, behind other such loads."""
    hybrid_s: float | None
    """The longer one of computing the front of what is stored, and loading its back beside the
    steps. None also if there is nothing to split."""
    recompute_s: float | None
    """To compute what is stored, too."""
    rest_s: float | None
    """To compute what is not stored."""
    first_step_s: float | None
    """What of that the first step computes, with the batch that it joins."""
    num_running: int
    """Requests of that batch."""
    may_load_within: bool = True
    """Whether all of it lies where a step can load it from: else some has to be read first."""


def choose_way(mode: LoadMode, forecast: Forecast, max_stall_s: float) -> Way:
    """The way that `mode` forces, or the soonest one, on the terms of others.

    A load within a step may make the batch wait, all requests together, `max_stall_s`. What is not
    known is taken for the better: a load is tried, within the step if nobody else is in it.
    """
    if mode != "auto":
        way = Way[mode.upper()]
        return Way.BULK if way is Way.LAYERWISE and not forecast.may_load_within else way
    if forecast.rest_s is None or forecast.first_step_s is None or forecast.load_s is None:
        may_wait = forecast.may_load_within and not forecast.num_running
        return Way.LAYERWISE if may_wait else Way.BULK
    times = {Way.BULK: _BESIDE_S + (forecast.bulk_load_s or 0.0) + forecast.rest_s}
    if forecast.hybrid_s is not None:
        reading_s = 0.0 if forecast.may_load_within else _READING_S
        times[Way.HYBRID] = _BOTH_ENDS_S + reading_s + forecast.hybrid_s + forecast.rest_s
    stall_s = max(0.0, forecast.load_s - forecast.first_step_s)
    if forecast.may_load_within and stall_s * forecast.num_running <= max_stall_s:
        times[Way.LAYERWISE] = stall_s + max(forecast.rest_s, forecast.first_step_s)
    way = min(sorted(times, key=lambda way: -way.value), key=times.__getitem__)
    if forecast.recompute_s is not None and forecast.recompute_s <= times[way]:
        return Way.RECOMPUTE
    return way
