"""What others see of a benchmark's engines: live views, metrics at one port, traces.

One port serves all engines that a benchmark opens, at once or one after the other; a label says
whose each sample is. Event loop.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Protocol

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from interlace.bench.traces import Traceable, Traces
from interlace.engine.live_feed import Watchable, watchable
from interlace.engine.metrics_recording import MetricsRecording
from interlace.engine.metrics_server import MetricsServer

LABEL = "arm"


class ShownEngine(Watchable, Traceable, Protocol):
    """The part of `AsyncEngine` that is needed."""

    def record_metrics(self) -> MetricsRecording:
        """See `AsyncEngine`."""
        ...


class SharedMetrics(Collector):
    """Metrics of the engines that are open. While there is none, clients wait for the next one."""

    def __init__(self, sock: socket.socket) -> None:
        """`sock` is `metrics_server.listen`'s, and stays who gave it's to close."""
        self._sock = sock
        self._recordings: dict[str, MetricsRecording] = {}
        self._server: MetricsServer | None = None

    @contextlib.asynccontextmanager
    async def serving(self, engine: ShownEngine, name: str) -> AsyncIterator[None]:
        """Serve the metrics of `engine` too, with a label `arm` that is its name, or `NAME (2)` if
        another one has that. Enter one engine at a time.

        Raises: `EngineDeadError`. Cancellation: nothing of it is served.
        """
        name = self._free_name(name)
        recording = engine.record_metrics()
        self._recordings[name] = recording
        try:
            if self._server is None:
                self._server = await MetricsServer.open(self, self._sock.dup())
            yield
        finally:
            del self._recordings[name]
            recording.close()
            if not self._recordings and self._server is not None:
                self._server.close()
                self._server = None

    def collect(self) -> Iterator[Metric]:
        """As they stand, each name once."""
        families: dict[str, Metric] = {}
        for name, recording in self._recordings.items():
            for one in recording.registry.collect():
                family = families.setdefault(
                    one.name, Metric(one.name, one.documentation, one.type, one.unit)
                )
                family.samples += (
                    sample._replace(labels={LABEL: name, **sample.labels}) for sample in one.samples
                )
        yield from families.values()

    def _free_name(self, name: str) -> str:
        number, free = 1, name
        while free in self._recordings:
            number += 1
            free = f"{name} ({number})"
        return free


@contextlib.asynccontextmanager
async def shown(
    engine: ShownEngine, name: str, metrics: SharedMetrics | None, traces: Traces
) -> AsyncIterator[None]:
    """Let live views watch `engine`, `metrics` serve what it counts, and `traces` record it, if
    they are to. Cancellation: all end, and what was recorded is written."""
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(watchable(engine))
        if metrics is not None:
            await stack.enter_async_context(metrics.serving(engine, name))
        await stack.enter_async_context(traces.of(engine))
        yield
