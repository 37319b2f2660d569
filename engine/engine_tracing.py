"""Records an engine's newest steps, and writes them to a file at the end. Loop thread."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from interlace.engine.config import EngineConfig
from interlace.engine.device_thread import finish_despite_cancel
from interlace.engine.engine_trace import EngineTrace, EngineTraceFacts
from interlace.engine.errors import ConfigError
from interlace.engine.events import Event, EventBus
from interlace.engine.ports import Clock
from interlace.engine.step_timings import RecordingFacts
from interlace.engine.trace_collector import TraceCollector
from interlace.engine.trace_file import check_target, write_trace

logger = logging.getLogger(__name__)

LAST_STEPS = 512
"""Of a trace, if nothing else is said: some megabytes of a file."""
MOST_LAST_STEPS = 2048


class EngineTracing:
    """What `AsyncEngine.trace` gives, while it is entered. An `EventSink`."""

    def __init__(self, path: Path, collector: TraceCollector) -> None:
        """For `AsyncEngine.trace`."""
        self.path = path
        """The file; it is there when the context has ended."""
        self._collector = collector
        self._num_lost = 0

    def push(self, event: Event) -> None:
        """Note one event. What goes wrong is counted, and never the engine's."""
        try:
            self._collector.take(event)
        except Exception:
            if not self._num_lost:
                logger.exception("the trace %s lacks an event", self.path)
            self._num_lost += 1

    def close(self) -> None:
        """The engine has ended: there will be no more events."""

    def trace(self, facts: EngineTraceFacts) -> EngineTrace:
        """What is known by now."""
        return self._collector.trace(facts, self._num_lost)


@asynccontextmanager
async def traced(
    path: Path,
    last_steps: int,
    config: EngineConfig,
    model: str,
    look: Callable[[], AbstractAsyncContextManager[RecordingFacts]],
    clock: Clock,
    events: EventBus,
) -> AsyncIterator[EngineTracing]:
    """See `AsyncEngine.trace`. `model` is what it is called. Steps are timed while `look()` is
    entered."""
    if not 1 <= last_steps <= MOST_LAST_STEPS:
        raise ConfigError(f"last_steps must be from 1 to {MOST_LAST_STEPS}, not {last_steps}.")
    await asyncio.to_thread(check_target, path)
    facts = RecordingFacts()
    recorded: EngineTracing | None = None
    try:
        async with look() as facts:
            recorded = EngineTracing(path, TraceCollector(last_steps, clock.monotonic()))
            events.add(recorded)
            yield recorded
    finally:
        if recorded is not None:
            events.discard(recorded)
            trace = recorded.trace(_facts(config, model, facts))
            loop = asyncio.get_running_loop()
            await finish_despite_cancel(loop.run_in_executor(None, write_trace, path, trace))


def _facts(config: EngineConfig, model: str, recording: RecordingFacts) -> EngineTraceFacts:
    transfer = config.kv_transfer_config
    return EngineTraceFacts(
        model=model,
        dtype=config.dtype,
        device=config.device,
        machine=recording.machine,
        clock=recording.clock,
        num_layers=recording.num_layers,
        kv_connector=None if transfer is None else transfer.kv_connector,
        interlace=_version("interlace"),
        torch=_version("torch"),
    )


def _version(package: str) -> str:
    """Of a package that was imported by somebody; else empty."""
    return str(getattr(sys.modules.get(package), "__version__", ""))
