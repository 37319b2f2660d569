"""The step loop: plan, launch, apply. Up to `max_inflight_steps` steps are under way at once.

The only task that touches the scheduler's steps. It sleeps until a request comes or goes, or a
step ends; it never computes on the device. Where only a KV connector can bring news, it runs empty
steps, at first at once and then ever more seldom: news wait for a sixteenth of their time at most.
Where connectors have transfers to move on meanwhile, the device thread stays with an empty step and
does that, until they may have news.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable

from interlace.engine.device_thread import DeviceThread, finish_despite_cancel
from interlace.engine.events import EventBus, StepLaunched
from interlace.engine.output_processor import OutputProcessor
from interlace.engine.outputs import ModelRunnerOutput
from interlace.engine.ports import Clock, PendingStep, StepRunner
from interlace.engine.scheduler import Scheduler
from interlace.engine.scheduler_output import SchedulerOutput
from interlace.engine.timing_events import publish_timings

logger = logging.getLogger(__name__)

SHORTEST_POLL_S = 0.0005
LONGEST_POLL_S = 0.020
"""Between empty steps, while a connector has transfers under way and nothing else is to do."""
POLL_SHARE = 16
"""Between these it is this part of the time since there was news."""
STAY_S = 0.005
"""With an empty step, or as long as the pause behind it would be. Not for ever: of several
connectors one may have news, while another is not done."""
_LOOK_S = 0.0003
"""Between two looks at transfers: readers need the interpreter."""
CLOSING_S = 5.0
"""How long a loop that was told to stop waits for ended requests that a connector still holds."""


def poll_pause(waited_s: float) -> float:
    """Seconds until the next empty step, when there was no news for `waited_s`."""
    return min(max(SHORTEST_POLL_S, waited_s / POLL_SHARE), LONGEST_POLL_S)


class _Step:
    """A step under way: launched first, and then waited for, both on the device thread."""

    def __init__(
        self,
        plan: SchedulerOutput,
        runner: StepRunner,
        device: DeviceThread,
        clock: Clock,
        *,
        stay_s: float,
    ) -> None:
        """Launches it, behind all that the device thread has to do. That may stay with it for
        `stay_s` when it has ended, if it only asks."""
        self.plan = plan
        self.stayed_s = 0.0
        """How long the device thread has."""
        self.may_have_news = False
        """Whether it has left since there may be some: the next empty step brings them."""
        self.asks_only = not (plan.total_num_scheduled_tokens or plan.async_loading_req_ids)
        """Whether it is there for a connector's news alone."""
        self._runner = runner
        self._device = device
        self._clock = clock
        self._stay_s = stay_s if self.asks_only else 0.0
        self._is_wanted = threading.Event()
        self._pending: PendingStep | None = None
        self.launched = device.submit(self._launch)
        self._output: asyncio.Future[ModelRunnerOutput] | None = None

    def _launch(self) -> None:
        self._pending = self._runner.launch(self.plan)

    def _finish(self) -> ModelRunnerOutput:
        if self._pending is None:  # nothing to wait for if the launch raised: `result` tells
            return ModelRunnerOutput()
        output = self._pending()
        if self._stay_s and output.kv_connector_output is None:
            self._stay()
        return output

    def _stay(self) -> None:
        """On the device thread: move transfers on, until there may be news, or `hurry`."""
        begun_s = self._clock.monotonic()
        has_stayed = False
        while self._runner.advance_transfers():
            if self.stayed_s >= self._stay_s or self._device.is_wanted:
                return
            if self._is_wanted.wait(_LOOK_S):
                return
            has_stayed = True
            self.stayed_s = self._clock.monotonic() - begun_s
        # Not so if there was nothing to move on in the first place.
        self.may_have_news = has_stayed

    def hurry(self) -> None:
        """There are other news, or a step to launch: do not stay. Loop thread."""
        self._is_wanted.set()

    def wait(self) -> asyncio.Future[ModelRunnerOutput]:
        """Let the device thread wait for its end, from when this is first called."""
        if self._output is None:
            self._output = self._device.submit(self._finish)
        return self._output

    @property
    def is_awaited(self) -> bool:
        """Whether `wait` was called."""
        return self._output is not None

    @property
    def is_done(self) -> bool:
        """Whether the device thread has waited for it."""
        return self._output is not None and self._output.done()

    def result(self) -> ModelRunnerOutput:
        """Of a step that is done. Raises what it raised."""
        assert self._output is not None
        self.launched.result()
        return self._output.result()


class StepLoop:
    """Runs steps until it is told to stop, or until something fatal happens.

    Where the device works by itself, and nothing else can be planned, an empty step goes behind the
    only one that computes: it brings a connector's news in the moment when that one has ended. It
    counts for nothing where several steps may be under way, so who comes meanwhile is planned.
    """

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
        self._closing_until_s = 0.0
        self._poll_due = False
        self._had_news_s = clock.monotonic()
        self._stayed_s = 0.0
        self._inflight: deque[_Step] = deque()

    def wake(self) -> None:
        """Look for work: a request came or went. Loop thread."""
        self._note_news()
        self._hurry()
        self._wake.set()

    def _hurry(self) -> None:
        for step in self._inflight:
            step.hurry()

    def stop(self) -> None:
        """Let `run` return when the steps in flight are applied; all requests have ended.

        Requests that a KV connector holds, for example to publish what it saved of them, get
        `CLOSING_S` seconds of empty steps.
        """
        self._stopping = True
        self._closing_until_s = self._clock.monotonic() + CLOSING_S
        self._hurry()
        self._wake.set()

    async def run(self, on_fatal: Callable[[Exception], None]) -> None:
        """Step until `stop()`, or until the scheduler or the runner raises: that is fatal.

        `on_fatal` is called at once with the cause; `run` returns when the steps in flight have
        ended. Cancellation: fatal too, unless stopped before; steps in flight are waited for.
        """
        try:
            while True:
                self._wake.clear()
                if self._apply_ended_steps() and self._may_deliver_first:
                    await asyncio.sleep(0)  # whoever waits for these tokens goes first
                self._scheduler.settle()
                self._launch_steps()
                self._await_oldest_step()
                self._offer_blocks()
                if self._stopping and not self._inflight and not self._lingers:
                    return
                await self._sleep()
        except Exception as error:
            logger.exception("the step loop failed")
            on_fatal(error)
        except asyncio.CancelledError:
            if not self._stopping:  # or else whoever waits would wait for ever
                on_fatal(RuntimeError("its task was cancelled"))
            raise
        finally:
            await self._drain()

    @property
    def _has_room(self) -> bool:
        """Whether a further step may be under way."""
        depth = self._scheduler.config.max_inflight_steps
        if depth == 1:
            return not self._inflight
        return sum(not step.asks_only for step in self._inflight) < depth

    @property
    def _may_deliver_first(self) -> bool:
        """Whether the device does not wait for the next plan: it has another step to compute, or
        there is nothing to compute."""
        computes = any(step.plan.total_num_scheduled_tokens for step in self._inflight)
        return computes or not self._scheduler.has_requests

    @property
    def _lingers(self) -> bool:
        """Whether a loop that was told to stop has ended requests to see off."""
        is_time = self._clock.monotonic() < self._closing_until_s
        return is_time and self._scheduler.owes_connector

    async def _sleep(self) -> None:
        """Until there is news, or until it is time to ask a KV connector for some."""
        if self._inflight or not self._scheduler.awaits_connector:
            # A step that ended meanwhile has set the flag again.
            await self._wake.wait()
            return
        # What the device thread has stayed with the last empty step was a part of the pause.
        pause_s = poll_pause(self._clock.monotonic() - self._had_news_s) - self._stayed_s
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), pause_s)
            return
        self._poll_due = True

    @property
    def _stay_s(self) -> float:
        """For which the device thread may stay with a step that is launched now and only asks."""
        if self._inflight or self._stopping:
            return 0.0
        return max(STAY_S, poll_pause(self._clock.monotonic() - self._had_news_s))

    def _note_news(self) -> None:
        self._had_news_s = self._clock.monotonic()

    def _launch_steps(self) -> None:
        while self._has_room:
            if self._stopping and not self._lingers:
                return
            works_ahead = self._runner.works_ahead
            plan = self._scheduler.schedule(poll=self._poll_due, may_poll_behind=works_ahead)
            self._outputs.process(self._scheduler.take_failed())
            if plan is None:
                return
            # Behind a step that computes, if nothing else can be planned there.
            self._poll_due = works_ahead and plan.total_num_scheduled_tokens > 0
            if not plan.total_num_scheduled_tokens and not plan.async_loading_req_ids:
                self._await_oldest_step()  # for what there is when that has ended
            self._hurry()
            step = _Step(plan, self._runner, self._device, self._clock, stay_s=self._stay_s)
            self._inflight.append(step)
            if step.asks_only or not works_ahead:
                self._await(step)
            if plan.loading_block_ids:
                step.launched.add_done_callback(lambda _: self._wake.set())
            if self._events.active:
                self._events.emit(StepLaunched(self._clock.monotonic(), plan.step_id))

    def _offer_blocks(self) -> None:
        """Not before a step is launched that loads within itself: its blocks are many, and nobody
        asks for them meanwhile, but the launch needs the interpreter."""
        newest = self._inflight[-1] if self._inflight else None
        if newest is None or not newest.plan.loading_block_ids or newest.launched.done():
            self._scheduler.offer_blocks()

    def _await_oldest_step(self) -> None:
        """Let the device thread wait for it, now that no further step can be launched behind it."""
        if self._inflight and not self._inflight[0].is_awaited:
            self._await(self._inflight[0])

    def _await(self, step: _Step) -> None:
        step.wait().add_done_callback(lambda _: self._wake.set())

    def _apply_ended_steps(self) -> bool:
        """Whether there was news for anybody."""
        has_news = False
        while self._inflight and self._inflight[0].is_done:
            step = self._inflight.popleft()
            plan, output = step.plan, step.result()
            self._poll_due |= plan.total_num_scheduled_tokens > 0 or step.may_have_news
            if plan.total_num_scheduled_tokens or output.kv_connector_output is not None:
                self._note_news()
            self._stayed_s = step.stayed_s
            if output.timings is not None:
                publish_timings(output.timings, self._events, self._clock.monotonic())
            updates = self._scheduler.take_tokens(plan, output)
            self._outputs.process(updates)
            has_news |= bool(updates)
        return has_news

    async def _drain(self) -> None:
        """Wait for device work that is under way when the loop ends early; its results are lost."""
        self._hurry()
        for step in self._inflight:
            try:
                await finish_despite_cancel(step.wait())
                step.result()
            except Exception:
                logger.exception("a step in flight failed while the engine was ending")
        self._inflight.clear()
