"""Whether an engine's steps are timed: as long as somebody looks, and never else. Loop thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from interlace.engine.device_thread import DeviceThread, finish_despite_cancel
from interlace.engine.events import EventBus
from interlace.engine.ports import Clock, StepRunner
from interlace.engine.step_timings import RecordingFacts, Timings
from interlace.engine.timing_events import publish_timings


class StepRecording:
    """Switches the runner's recording on for the first who looks, and off for the last one."""

    def __init__(
        self, runner: StepRunner, device: DeviceThread, clock: Clock, events: EventBus
    ) -> None:
        """Nothing is recorded yet."""
        self._runner = runner
        self._device = device
        self._clock = clock
        self._events = events
        self._num_lookers = 0
        self._begun: asyncio.Future[RecordingFacts] | None = None
        self._is_closed = False

    def close(self) -> None:
        """The runner is about to end: ask nothing of it any more."""
        self._is_closed = True

    @asynccontextmanager
    async def look(self) -> AsyncIterator[RecordingFacts]:
        """Steps that are launched meanwhile are timed. Raises: `ConnectorError`.

        Cancellation: the recording ends all the same, and what it still had is told.
        """
        self._num_lookers += 1
        try:
            if self._begun is None:
                self._begun = self._device.submit(self._runner.begin_recording, self._clock)
            yield await finish_despite_cancel(self._begun)
        finally:
            self._num_lookers -= 1
            if not self._num_lookers:
                await self._end()

    async def _end(self) -> None:
        self._begun = None
        if self._is_closed:
            return
        ended = self._device.submit(self._runner.end_recording)
        ended.add_done_callback(self._tell)  # be it that the wait is cancelled
        await finish_despite_cancel(ended)

    def _tell(self, ended: asyncio.Future[Timings]) -> None:
        if not ended.cancelled() and ended.exception() is None:
            publish_timings(ended.result(), self._events, self._clock.monotonic())
