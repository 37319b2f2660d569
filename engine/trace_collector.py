"""From events to a trace of the newest steps. Keeps a bounded number of everything. Loop thread."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable
from typing import Any, TypeVar

from interlace.engine.engine_trace import (
    EngineTrace,
    EngineTraceFacts,
    HostTimes,
    LeftOut,
    TracedRequest,
    TracedStep,
)
from interlace.engine.events import (
    Event,
    LayerLoad,
    LayerSave,
    RequestFinished,
    RequestFirstToken,
    RequestPreempted,
    RequestQueued,
    RequestScheduled,
    StepDone,
    StepLaunched,
    StepScheduled,
    StepTimed,
    TimingsDropped,
)
from interlace.engine.step_timings import LayerTiming, StepTiming, TransferTiming

_Record = TypeVar("_Record", HostTimes, TransferTiming, TracedRequest)

TRANSFERS_PER_STEP = 64
REQUESTS_PER_STEP = 4
"""So many for each step that is kept, at most."""


class TraceCollector:
    """What happened from `begun_s` on, on the engine's clock."""

    def __init__(self, last_steps: int, begun_s: float) -> None:
        """Keeps the newest `last_steps` steps that compute."""
        self._last_steps = last_steps
        self._begun_s = begun_s
        self._zero_s = begun_s
        self._steps: dict[int, TracedStep] = {}  # by number, ascending
        self._newest_left_out = -1
        self._transfers: deque[TransferTiming] = deque()
        self._requests: dict[str, TracedRequest] = {}
        self._left_out = LeftOut()

    def take(self, event: Event) -> None:
        """Note one event. Those that a trace does not have are ignored."""
        match event:
            case StepScheduled() | StepLaunched() | StepDone() | StepTimed():
                self._take_step(event)
            case LayerLoad() | LayerSave():
                self._transfers.append(event.timing)
                if len(self._transfers) > TRANSFERS_PER_STEP * self._last_steps:
                    self._transfers.popleft()
                    self._leave_out(transfers=1)
            case TimingsDropped():
                self._leave_out(timings=event.number)
            case _:
                self._take_request(event)

    def _leave_out(self, **more: int) -> None:
        counts = {name: getattr(self._left_out, name) + number for name, number in more.items()}
        self._left_out = dataclasses.replace(self._left_out, **counts)

    # ---------------------------------------------------------------- steps

    def _take_step(self, event: StepScheduled | StepLaunched | StepDone | StepTimed) -> None:
        match event:
            case StepScheduled():
                if event.num_scheduled_tokens:
                    host = HostTimes(scheduled_s=event.time_s)
                    self._add(TracedStep(event.step_id, event.num_scheduled_tokens, host))
            case StepLaunched():
                self._note_host(event.step_id, launched_s=event.time_s)
            case StepDone():
                self._note_host(event.step_id, tokens_s=event.tokens_s, done_s=event.time_s)
            case StepTimed(timing=timing):
                before = self._steps.get(timing.step_id)
                if before is None:  # it was scheduled before anybody looked
                    before = TracedStep(timing.step_id, timing.num_scheduled_tokens)
                    self._add(before)
                if timing.step_id in self._steps:
                    self._steps[timing.step_id] = dataclasses.replace(before, timing=timing)

    def _add(self, step: TracedStep) -> None:
        if step.step_id <= self._newest_left_out:
            return
        self._steps[step.step_id] = step
        if len(self._steps) > self._last_steps:
            self._newest_left_out = min(self._steps)
            del self._steps[self._newest_left_out]
            self._leave_out(steps=1)

    def _note_host(self, step_id: int, **times: float | None) -> None:
        step = self._steps.get(step_id)
        if step is not None:  # else it computes nothing, or is too old
            host = dataclasses.replace(step.host, **times)
            self._steps[step_id] = dataclasses.replace(step, host=host)

    # ---------------------------------------------------------------- requests

    def _take_request(self, event: Event) -> None:
        match event:
            case RequestQueued():
                self._requests[event.request_id] = TracedRequest(
                    event.request_id, event.num_prompt_tokens, event.time_s
                )
                self._forget_requests()
            case RequestScheduled():
                before = self._requests.get(event.request_id)
                if before is None or before.scheduled_s is None:
                    self._note(
                        event.request_id,
                        scheduled_s=event.time_s,
                        num_local_cached_tokens=event.num_local_cached_tokens,
                        num_external_cached_tokens=event.num_external_cached_tokens,
                    )
            case RequestFirstToken():
                self._note(event.request_id, first_token_s=event.time_s)
            case RequestPreempted():
                self._note(event.request_id, num_preemptions=event.num_preemptions)
            case RequestFinished():
                self._note(
                    event.request_id,
                    finished_s=event.time_s,
                    finish_reason=event.finish_reason,
                    num_generated_tokens=event.num_generated_tokens,
                )
            case _:  # blocks, and what is told of steps in other words
                pass

    def _note(self, request_id: str, **known: Any) -> None:
        before = self._requests.get(request_id) or TracedRequest(request_id)
        self._requests[request_id] = dataclasses.replace(before, **known)
        self._forget_requests()

    def _forget_requests(self) -> None:
        if len(self._requests) > REQUESTS_PER_STEP * self._last_steps:
            del self._requests[next(iter(self._requests))]
            self._leave_out(requests=1)

    # ---------------------------------------------------------------- the trace

    def trace(self, facts: EngineTraceFacts, num_lost_events: int) -> EngineTrace:
        """What is known by now. Of copies and requests those that ended before the first step which
        is kept are left out with the steps before it."""
        from_s = self._begun_s if self._newest_left_out < 0 else self._first_s()
        transfers = [one for one in self._transfers if one.end_s >= from_s]
        requests = [
            one
            for one in self._requests.values()
            if one.finished_s is None or one.finished_s >= from_s
        ]
        left_out = dataclasses.replace(
            self._left_out,
            transfers=self._left_out.transfers + len(self._transfers) - len(transfers),
            requests=self._left_out.requests + len(self._requests) - len(requests),
            events=num_lost_events,
        )
        self._zero_s = self._zero(from_s, transfers, requests)
        return EngineTrace(
            facts,
            tuple(self._step(self._steps[step_id]) for step_id in sorted(self._steps)),
            tuple(self._moved(one, "begin_s", "end_s") for one in transfers),
            tuple(
                self._moved(one, "queued_s", "scheduled_s", "first_token_s", "finished_s")
                for one in requests
            ),
            left_out,
        )

    def _zero(
        self, from_s: float, transfers: Iterable[TransferTiming], requests: Iterable[TracedRequest]
    ) -> float:
        """Where times begin: the recording's begin, or that of what is kept of a long one, whose
        times would be too large to be exact."""
        if self._newest_left_out < 0:
            return self._begun_s
        begins = [one.begin_s for one in transfers]
        for request in requests:
            begins += [s for s in (request.queued_s, request.scheduled_s) if s is not None]
        return max(self._begun_s, min([from_s, *begins]))

    def _first_s(self) -> float:
        first = self._steps[min(self._steps)]
        begins = (first.host.scheduled_s, None if first.timing is None else first.timing.begin_s)
        return min((one for one in begins if one is not None), default=self._begun_s)

    def _step(self, step: TracedStep) -> TracedStep:
        host = self._moved(step.host, "scheduled_s", "launched_s", "tokens_s", "done_s")
        return dataclasses.replace(step, host=host, timing=self._timing(step.timing))

    def _timing(self, timing: StepTiming | None) -> StepTiming | None:
        if timing is None:
            return None
        at = self._at
        layers = tuple(
            LayerTiming(one.layer, at(one.arrived_s), at(one.passed_s), at(one.end_s))
            for one in timing.layers
        )
        return dataclasses.replace(
            timing, begin_s=at(timing.begin_s), end_s=at(timing.end_s), layers=layers
        )

    def _moved(self, record: _Record, *names: str) -> _Record:
        """`record` with these times counted from where the trace's begin."""
        times = {name: getattr(record, name) for name in names}
        moved: dict[str, Any] = {
            name: None if one is None else self._at(one) for name, one in times.items()
        }
        return dataclasses.replace(record, **moved)

    def _at(self, time_s: float) -> float:
        """From where times begin, in whole nanoseconds; what a device's clock tells a moment too
        soon is 0."""
        return max(0, round((time_s - self._zero_s) * 1e9)) / 1e9
