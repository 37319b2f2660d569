"""What metrics need beyond a snapshot: histograms, and how requests ended. Loop thread.

Reads the engine's events while it lasts, as any viewer does, so that an engine without it records
nothing. Works once for each event, and for a step's tokens once for each different gap: with all
requests in step that is once.
"""

from __future__ import annotations

import asyncio
import bisect
import collections
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from interlace.engine.events import (
    Event,
    EventStream,
    RequestFinished,
    RequestFirstToken,
    RequestQueued,
    RequestScheduled,
    StepDone,
    StepLaunched,
    StepScheduled,
)
from interlace.engine.outputs import FinishReason
from interlace.engine.ports import Clock

logger = logging.getLogger(__name__)

LAG_PERIOD_S = 0.1
"""Between two looks at how late the event loop is."""
_STEP_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08),
    *(0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
_WAIT_S = (  # vLLM's, of time_to_first_token_seconds
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_LAG_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
_TOKENS = (1.0, 2.0, 4.0, *(float(1 << n) for n in range(3, 15)))  # to 16,384


class Timer(Protocol):
    """What `CallLater` returns: asyncio's `TimerHandle`."""

    def cancel(self) -> None:
        """Never call back."""
        ...


CallLater = Callable[[float, Callable[[], None]], Timer]


class _Histogram:
    """Counts by upper bound. prometheus_client's takes one value at a time, under a lock: of the
    gaps between tokens there are hundreds a step."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = f"interlace_{name}"
        self._text = text
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, number: int = 1) -> None:
        """`number` times `value`; what a clock makes negative counts as 0."""
        value = max(0.0, value)
        self._counts[bisect.bisect_left(self._bounds, value)] += number
        self._sum += value * number

    def family(self) -> Metric:
        """As it stands."""
        bounds = [*map(str, self._bounds), "+Inf"]
        totals = itertools.accumulate(self._counts)
        return HistogramMetricFamily(
            self._name,
            self._text,
            buckets=list(zip(bounds, totals, strict=True)),
            sum_value=self._sum,
        )


class MetricsRecording(Collector):
    """Records from its making until `close()`, or until the engine ends; then it keeps what it has.

    `registry` has the engine's metrics and what is recorded, `run` is to run meanwhile. Counts
    begin with it, so two of them do not disturb each other.
    """

    def __init__(
        self,
        engine_metrics: Collector,
        events: EventStream,
        clock: Clock,
        call_later: CallLater | None = None,
    ) -> None:
        """`engine_metrics`: `AsyncEngine.metrics`. `call_later` is the running loop's own unless a
        test brings another."""
        self.registry = CollectorRegistry()
        """For `prometheus_client.generate_latest`, on the event loop."""
        self.registry.register(engine_metrics)
        self.registry.register(self)
        self._events = events
        self._clock = clock
        self._call_later = call_later or asyncio.get_running_loop().call_later
        self._timer: Timer | None = None
        self._due_s = 0.0
        # Of requests that have not ended, by id.
        self._queued_s: dict[str, float] = {}
        self._unscheduled_s: dict[str, float] = {}
        self._newest_token_s: dict[str, float] = {}
        self._ended: list[str] = []  # whose last step may not have been told of
        self._step_begun_s: dict[int, float] = {}  # of steps that compute
        self._step_done_s = float("-inf")
        self._finished: dict[FinishReason, int] = dict.fromkeys(get_args(FinishReason), 0)
        self._step = _Histogram(
            "step_seconds",
            "Time of a step that computes: from its launch, or from the end of the step before it"
            " if that is later, until its tokens are known.",
            _STEP_S,
        )
        self._step_tokens = _Histogram(
            "step_tokens",
            "Tokens that a step computes, of all its requests, empty steps left out. vLLM:"
            " iteration_tokens_total.",
            _TOKENS,
        )
        self._first_token = _Histogram(
            "time_to_first_token_seconds",
            "From when a request was queued, tokenised, to its first token. vLLM:"
            " time_to_first_token_seconds.",
            _WAIT_S,
        )
        self._inter_token = _Histogram(
            "inter_token_latency_seconds",
            "Between two tokens of a request. vLLM: inter_token_latency_seconds.",
            _STEP_S,
        )
        self._queue = _Histogram(
            "request_queue_time_seconds",
            "From when a request was queued until it first ran, a load beside the steps included."
            " vLLM: request_queue_time_seconds.",
            _WAIT_S,
        )
        self._whole = _Histogram(
            "e2e_request_latency_seconds",
            "From when a request was queued until it ended, in whatever way. vLLM:"
            " e2e_request_latency_seconds.",
            _WAIT_S,
        )
        self._lag = _Histogram(
            "event_loop_lag_seconds",
            f"How late a timer of the event loop is called, looked at every {LAG_PERIOD_S:g} s.",
            _LAG_S,
        )
        self.is_closed = False
        self._arm()

    async def run(self) -> None:
        """Take events until there will be none. What goes wrong here is logged and ends the
        recording, never the engine. Cancellation: ends it too."""
        try:
            async for event in self._events:
                self.take(event)
        except Exception:
            logger.exception("metrics are not recorded any more")
        finally:
            self.close()

    def close(self) -> None:
        """Record nothing more; what is recorded can still be read. Idempotent."""
        self.is_closed = True
        self._events.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ---------------------------------------------------------------- the event loop's lateness

    def _arm(self) -> None:
        self._due_s = self._clock.monotonic() + LAG_PERIOD_S
        self._timer = self._call_later(LAG_PERIOD_S, self._look)

    def _look(self) -> None:
        self._lag.add(self._clock.monotonic() - self._due_s)
        self._arm()

    # ---------------------------------------------------------------- events

    def take(self, event: Event) -> None:
        """Note one event. What began before this recording, and whose begin is not known
        therefore, is left out."""
        match event:
            case StepScheduled():
                if event.num_scheduled_tokens:
                    self._step_tokens.add(sum(number for _, number in event.num_scheduled_tokens))
                    self._step_begun_s[event.step_id] = event.time_s
            case StepLaunched():
                if event.step_id in self._step_begun_s:
                    self._step_begun_s[event.step_id] = event.time_s
            case StepDone():
                self._take_step(event)
            case RequestQueued():
                self._queued_s[event.request_id] = event.time_s
                self._unscheduled_s[event.request_id] = event.time_s
            case RequestScheduled():
                queued_s = self._unscheduled_s.pop(event.request_id, None)
                if queued_s is not None:
                    self._queue.add(event.time_s - queued_s)
            case RequestFirstToken():
                queued_s = self._queued_s.get(event.request_id)
                if queued_s is not None:
                    self._first_token.add(event.time_s - queued_s)
            case RequestFinished():
                self._take_end(event)
            case _:  # blocks: the snapshot counts them
                pass

    def _take_step(self, event: StepDone) -> None:
        done_s = event.time_s if event.tokens_s is None else event.tokens_s
        begun_s = self._step_begun_s.pop(event.step_id, None)
        if begun_s is not None:
            self._step.add(done_s - max(begun_s, self._step_done_s))
            self._step_done_s = done_s
        tokens_s, req_ids = self._newest_token_s, event.sampled_req_ids
        for before_s, number in collections.Counter(map(tokens_s.get, req_ids)).items():
            if before_s is not None:
                self._inter_token.add(done_s - before_s, number)
        tokens_s.update(dict.fromkeys(req_ids, done_s))
        # A request ends before the step is told of that brought its last token.
        for request_id in self._ended:
            tokens_s.pop(request_id, None)
        self._ended.clear()

    def _take_end(self, event: RequestFinished) -> None:
        self._finished[event.finish_reason] += 1
        self._unscheduled_s.pop(event.request_id, None)
        queued_s = self._queued_s.pop(event.request_id, None)
        if queued_s is not None:
            self._whole.add(event.time_s - queued_s)
        if event.num_generated_tokens:  # else no step has a token of it
            self._ended.append(event.request_id)

    # ---------------------------------------------------------------- scrapes

    def collect(self) -> Iterator[Metric]:
        """What was recorded so far."""
        finished = CounterMetricFamily(
            "interlace_requests_finished_total",
            "Requests that ended since metrics are recorded, by how; those too that were aborted or"
            " refused (error) while they were tokenised, and none that ended with the step loop."
            " vLLM: request_success_total.",
            labels=["finish_reason"],
        )
        for reason, number in self._finished.items():
            finished.add_metric([reason], number)
        yield finished
        yield CounterMetricFamily(
            "interlace_metrics_lost_events_total",
            "Events that came faster than they were recorded: histograms lack them.",
            value=self._events.num_dropped,
        )
        histograms = (
            *(self._step, self._step_tokens, self._first_token, self._inter_token),
            *(self._queue, self._whole, self._lag),
        )
        for histogram in histograms:
            yield histogram.family()
