"""The step loop: plan, launch, apply. Up to `max_inflight_steps` steps are under way at once.

The only task that touches the scheduler's steps. It sleeps until a request comes or goes, or a
step ends; it never polls and never computes on the device.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from interlace.engine.device_thread import DeviceThread, finish_despite_cancel
from interlace.engine.events import EventBus, StepLaunched
from interlace.engine.output_processor import OutputProcessor
from interlace.engine.outputs import ModelRunnerOutput
from interlace.engine.ports import Clock, StepRunner
from interlace.engine.scheduler import Scheduler
from interlace.engine.scheduler_output import SchedulerOutput

logger = logging.getLogger(__name__)


class StepLoop:
    """Runs steps until it is told to stop, or until something fatal happens."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        device: DeviceThread,
        outputs: OutputProcessor,
        clock: Clock,
        events: EventBus,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._device = device
        self._outputs = outputs
        self._clock = clock
        self._events = events
        self._wake = asyncio.Event()
        self._stopping = False
        self._inflight: deque[tuple[SchedulerOutput, asyncio.Future[ModelRunnerOutput]]] = deque()

    def wake(self) -> None:
        """Look for work: a request came or went. Loop thread."""
        self._wake.set()

    def stop(self) -> None:
        """Launch nothing more; `run` returns when the steps in flight are applied."""
        self._stopping = True
        self._wake.set()

    async def run(self, on_fatal: Callable[[Exception], None]) -> None:
        """Step until `stop()`, or until the scheduler or the runner raises: that is fatal.

        `on_fatal` is called at once with the cause; `run` returns when the steps in flight have
        ended. Cancellation: fatal too, unless stopped before; steps in flight are waited for.
        """
        try:
            while True:
                self._wake.clear()
                self._apply_ended_steps()
                self._launch_steps()
                if self._stopping and not self._inflight:
                    return
                # A step that ended meanwhile has set the flag again.
                await self._wake.wait()
        except Exception as error:
            logger.exception("the step loop failed")
            on_fatal(error)
        except asyncio.CancelledError:
            if not self._stopping:  # or else whoever waits would wait for ever
                on_fatal(RuntimeError("its task was cancelled"))
            raise
        finally:
            await self._drain()

    def _launch_steps(self) -> None:
        depth = self._scheduler.config.max_inflight_steps
        while not self._stopping and len(self._inflight) < depth:
            plan = self._scheduler.schedule()
            if plan is None:
                return
            future = self._device.submit(self._runner.execute, plan)
            future.add_done_callback(lambda _: self._wake.set())
            self._inflight.append((plan, future))
            if self._events.active:
                self._events.emit(StepLaunched(self._clock.monotonic(), plan.step_id))

    def _apply_ended_steps(self) -> None:
        while self._inflight and self._inflight[0][1].done():
            plan, future = self._inflight.popleft()
            updates = self._scheduler.update_from_output(plan, future.result())
            self._outputs.process(updates)

    async def _drain(self) -> None:
        """Wait for device work that is under way when the loop ends early; its results are lost."""
        for _, future in self._inflight:
            try:
                await finish_despite_cancel(future)
            except Exception:
                logger.exception("a step in flight failed while the engine was ending")
        self._inflight.clear()
