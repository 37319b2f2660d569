"""Which way a request's stored KV had better come, by the rates that were measured so far.

Event loop; reads no clock.
"""

from __future__ import annotations

from typing import NamedTuple

from interlace.connectors.pipeline.messages import PipelineReport
from interlace.connectors.pipeline.options import LoadMode
from interlace.connectors.pipeline.rates import Forecast, LoadRate, StepTimes, Way, choose_way
from interlace.connectors.pipeline.sched_split import balance
from interlace.connectors.pipeline.sched_tier import Stored


class Sizes(NamedTuple):
    """What bytes and tokens are reckoned with."""

    record_bytes: int
    block_size: int
    """Tokens."""
    max_step_tokens: int
    """That a step computes at most."""


class Loading(NamedTuple):
    """What a load beside the steps depends on, besides its size."""

    bytes_ahead: int
    """That are copied before."""
    fetched_share: float
    """Of its blocks, what has to be read first."""


class Hit(NamedTuple):
    """What is stored of a request, and what else is to be computed."""

    first: int
    """Blocks before it, cached on the device."""
    stored: Stored
    """At least one block."""
    num_rest: int
    """Tokens behind it."""


class Traffic(NamedTuple):
    """What the engine does already."""

    num_running: int
    """Requests."""
    step_bytes_ahead: int
    """That the next step loads within itself before anything more."""
    beside_bytes_ahead: int
    """That are loaded before anything more beside the steps."""


class Choice(NamedTuple):
    """How a request's stored KV is to come."""

    way: Way
    floor: int
    """With `Way.HYBRID`: the block up to which the request is computed."""


class WayChooser:
    """See the module's docstring."""

    def __init__(
        self, sizes: Sizes, load_bytes_per_s: float, load_mode: LoadMode, max_stall_s: float
    ) -> None:
        """`load_bytes_per_s`: from records to pages, as measured at the start; 0 if it was not.
        `max_stall_s`: see `choose_way`."""
        self.load_mode = load_mode
        """How loads are forced, if they are. May be set: requests that are matched from then on
        follow it."""
        self.load_rate = LoadRate(load_bytes_per_s)
        self.fetch_rate = LoadRate(0)
        self.step_times = StepTimes()
        self.last_forecast: Forecast | None = None
        """Of the request that was matched last and had something stored: for measurements."""
        self._sizes = sizes
        self._max_stall_s = max_stall_s

    def restart_load_rate(self, bytes_per_s: float) -> None:
        """Expect such a rate of loads, as if it had been measured at the start."""
        self.load_rate = LoadRate(bytes_per_s)

    def learn(self, report: PipelineReport) -> None:
        """How long loads, reads and steps took."""
        self.load_rate.add(report.loads)
        self.fetch_rate.add(report.fetches)
        self.step_times.add(report.steps)

    def choose(self, hit: Hit, traffic: Traffic) -> Choice:
        """How what is stored is to come."""
        block_size, num_blocks = self._sizes.block_size, hit.stored.num_blocks
        end = hit.first + num_blocks
        num_local, num_loaded = hit.first * block_size, num_blocks * block_size
        num_first = min(hit.num_rest + traffic.num_running, self._sizes.max_step_tokens)
        loading = Loading(traffic.beside_bytes_ahead, hit.stored.fetched_share)
        floor, hybrid_s = self._split(hit.first, end, loading)
        forecast = self.last_forecast = Forecast(
            load_s=self.load_rate.seconds(
                traffic.step_bytes_ahead + num_blocks * self._sizes.record_bytes
            ),
            bulk_load_s=self.loading_s(num_blocks, loading),
            hybrid_s=hybrid_s,
            recompute_s=self.step_times.at_least_seconds(num_loaded + hit.num_rest, num_local),
            rest_s=self.step_times.seconds(hit.num_rest, num_local + num_loaded),
            first_step_s=self.step_times.seconds(num_first, num_local + num_loaded),
            num_running=traffic.num_running,
            may_load_within=hit.stored.num_fetched == 0,
        )
        way = choose_way(self.load_mode, forecast, self._max_stall_s)
        if way is Way.HYBRID and num_blocks == 1:
            way = Way.BULK  # there is nothing to split
        return Choice(way, min(max(floor, hit.first + 1), end - 1))

    def _split(self, first: int, end: int, loading: Loading) -> tuple[int, float | None]:
        """(the block before which blocks [first, end) are best computed, and from which they are
        loaded; seconds until both are done). In the middle if rates are not known."""
        block_size = self._sizes.block_size

        def computing_s(block: int) -> float:
            return self.computing_s(first * block_size, block * block_size) or 0.0

        def loading_s(block: int) -> float:
            return self.loading_s(end - block, loading) or 0.0

        if not computing_s(end) or not loading_s(first):
            return (first + end) // 2, None
        floor = balance(first, end, computing_s, loading_s)
        hybrid_s = max(computing_s(floor), loading_s(floor))
        return floor, None if floor in (first, end) else hybrid_s

    def computing_s(self, first: int, end: int) -> float | None:
        """Seconds to compute tokens [first, end) of one request; None if that is not known."""
        return self.step_times.seconds(end - first, first)

    def loading_s(self, num_blocks: int, loading: Loading) -> float | None:
        """Seconds to load so many blocks beside the steps. Reading goes on while what was read is
        copied: the slower one counts. None if a rate is not known."""
        num_bytes = num_blocks * self._sizes.record_bytes
        copy_s = self.load_rate.seconds(loading.bytes_ahead + num_bytes)
        if not loading.fetched_share:
            return copy_s
        fetch_s = self.fetch_rate.seconds(round(num_bytes * loading.fetched_share))
        return None if copy_s is None or fetch_s is None else max(copy_s, fetch_s)
