"""The engine's metrics for Prometheus, made from one snapshot when somebody scrapes.

Nothing is counted here: the numbers are those that the scheduler keeps anyway. What needs
recording, histograms first of all, is in `metrics_recording.py`. Loop thread.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from interlace.engine.errors import InterlaceError
from interlace.engine.snapshot import EngineSnapshot

_STATES = {  # of `RequestSnapshot.status`
    "RUNNING": "running",
    "WAITING": "waiting",
    "WAITING_FOR_REMOTE_KVS": "loading",
    "PREEMPTED": "preempted",
}


class EngineCollector(Collector):
    """Asks for a snapshot at each scrape, in time linear in the number of requests."""

    def __init__(
        self, snapshot: Callable[[], EngineSnapshot], is_up: Callable[[], bool], most_waiting: int
    ) -> None:
        """`is_up`: whether the step loop lives. `most_waiting`: `max_waiting_requests`."""
        self._snapshot = snapshot
        self._is_up = is_up
        self._most_waiting = most_waiting

    def collect(self) -> Iterator[Metric]:
        """Raises: `InterlaceError` off the event loop, where the engine's state may change
        meanwhile; what `snapshot` raises."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise InterlaceError(
                "an engine's metrics are read on its event loop: call generate_latest there, or"
                " let engine.serve_metrics() answer scrapes, in place of a server in a thread."
            ) from None
        yield _gauge(
            "engine_up", "1 while the step loop runs, 0 when it has failed.", self._is_up()
        )
        yield _gauge(
            "queue_limit_requests",
            "Requests that may wait (max_waiting_requests); beyond, they are refused.",
            self._most_waiting,
        )
        yield from families_of(self._snapshot())


class WithoutCreated(Collector):
    """Metrics of prometheus_client's own kinds, without a series for each that says when it was
    made: those are as many again, and told as gauges. The library's switch is for the process."""

    def __init__(self, metrics: Collector) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Copies: the library's own are left as they are."""
        for metric in self._metrics.collect():
            kept = Metric(metric.name, metric.documentation, metric.type, metric.unit)
            kept.samples = [one for one in metric.samples if not one.name.endswith("_created")]
            yield kept


def families_of(snapshot: EngineSnapshot) -> Iterator[Metric]:
    """All that a snapshot tells, as metrics. Counts are since the engine started."""
    stats = snapshot.stats
    yield from _requests(snapshot)
    yield from _blocks(snapshot)
    yield from _tokens(snapshot)
    yield _counter(
        "requests_ended_total",
        "Requests that have ended, in whatever way, those included that were never queued;"
        " interlace_requests_finished_total has reasons.",
        stats.num_finished_requests,
    )
    yield _counter(
        "preemptions_total",
        "Times that a running request lost its blocks. vLLM: num_preemptions_total.",
        stats.num_preemptions,
    )
    yield _counter(
        "steps_total",
        "Steps planned, those included that only ask a KV connector for news.",
        stats.num_steps,
    )
    yield _gauge(
        "inflight_steps", "Steps planned and not applied yet.", snapshot.num_inflight_steps
    )
    yield _counter(
        "kv_invalid_blocks_total",
        "Blocks that a KV connector promised and did not fill.",
        stats.num_invalid_blocks,
    )
    yield _counter(
        "kv_stray_reports_total",
        "Ids reported by a KV connector that nobody waited for.",
        stats.num_stray_reports,
    )


def _requests(snapshot: EngineSnapshot) -> Iterator[Metric]:
    unfinished = (*snapshot.running, *snapshot.waiting)
    counts = collections.Counter(_STATES[request.status] for request in unfinished)
    counts["preparing"] = snapshot.num_preparing_requests
    counts["held"] = snapshot.num_held_requests
    yield _labelled(
        GaugeMetricFamily(
            "interlace_requests",
            "Requests by state: preparing (being tokenised), waiting, loading (KV comes from a"
            " connector), preempted, running, held (ended; a connector still uses their blocks)."
            " vLLM: num_requests_running, num_requests_waiting.",
            labels=["state"],
        ),
        {state: counts[state] for state in ("preparing", *_STATES.values(), "held")},
    )
    yield _gauge(
        "queue_depth_requests",
        "Requests that wait to run: preparing, waiting, loading and preempted ones.",
        len(snapshot.waiting) + snapshot.num_preparing_requests,
    )


def _blocks(snapshot: EngineSnapshot) -> Iterator[Metric]:
    usable, free = snapshot.num_usable_blocks, snapshot.num_free_blocks
    yield _gauge("kv_block_size_tokens", "Tokens of a KV block.", snapshot.block_size)
    yield _gauge("kv_usable_blocks", "KV blocks of the pool.", usable)
    yield _gauge(
        "kv_free_blocks", "KV blocks that nobody holds; they may still hold cached content.", free
    )
    yield _gauge(
        "kv_cached_blocks",
        "KV blocks with content that can be hit, held or free.",
        snapshot.num_cached_blocks,
    )
    yield _gauge(
        "kv_fenced_blocks",
        "KV blocks of ended requests that a step in flight still touches.",
        snapshot.num_fenced_blocks,
    )
    yield _gauge(
        "kv_usage_ratio",
        "Share of the pool's KV blocks that is held, 0 to 1. vLLM: kv_cache_usage_perc.",
        (usable - free) / usable if usable else 0.0,
    )


def _tokens(snapshot: EngineSnapshot) -> Iterator[Metric]:
    stats = snapshot.stats
    local, external = stats.num_local_cached_tokens, stats.num_external_cached_tokens
    yield _counter(
        "prompt_tokens_total",
        "Tokens of prompts, counted with the first token of the answer. vLLM: prompt_tokens_total.",
        stats.num_prompt_tokens,
    )
    yield _labelled(
        CounterMetricFamily(
            "interlace_prompt_tokens_by_source_total",
            "The same by where their KV came from. vLLM: prompt_tokens_by_source_total.",
            labels=["source"],
        ),
        {  # vLLM's values
            "local_cache_hit": local,
            "external_kv_transfer": external,
            "local_compute": stats.num_prompt_tokens - local - external,
        },
    )
    yield _counter(
        "generated_tokens_total",
        "Tokens sampled. vLLM: generation_tokens_total.",
        stats.num_generated_tokens,
    )
    yield _counter(
        "kv_queried_tokens_total",
        "Tokens that a KV connector was asked for. vLLM: external_prefix_cache_queries_total.",
        stats.num_connector_queried_tokens,
    )
    yield _counter(
        "kv_hit_tokens_total",
        "Tokens that it promised. vLLM: external_prefix_cache_hits_total.",
        stats.num_connector_hit_tokens,
    )


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"interlace_{name}", text, value=float(value))


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"interlace_{name}", text, value=float(value))


def _labelled(
    family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]
) -> Metric:
    for label, value in values.items():
        family.add_metric([label], float(value))
    return family
