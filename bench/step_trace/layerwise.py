"""Timelines of steps that load layer by layer within themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlace.bench.kv_blocks import blocks_for, page_shape
from interlace.bench.session import Prepared
from interlace.bench.step_trace.build import StepMarks, build_trace
from interlace.bench.step_trace.device import LoadShape, marks_of
from interlace.bench.step_trace.facts import TraceFacts
from interlace.bench.step_trace.profiler import ProfiledSteps
from interlace.bench.step_trace.setup import ConnectorChoice, Run, StepRecorder, TimelinePlan
from interlace.bench.step_trace.tape import StepTape, TapedSteps
from interlace.bench.step_trace.taped import TAPE
from interlace.bench.step_trace.trace import StepTrace
from interlace.engine.errors import ConfigError, InterlaceError
from interlace.engine.events import EventStream, RequestFinished, RequestScheduled, StepScheduled
from interlace.engine.ports import Clock

if TYPE_CHECKING:
    from interlace.engine.async_engine import AsyncEngine


class LayerwiseHits:
    """A `HitTracer`. Loop thread."""

    def __init__(self, prepared: Prepared, plan: TimelinePlan, clock: Clock) -> None:
        """By a tape on a CPU, by profiling on a GPU."""
        self._prepared = prepared
        self._plan = plan
        self._group_size = plan.groups_of(prepared.loaded.architecture.num_layers)
        self._tape = StepTape(clock) if prepared.gpu is None else None
        self._recorder = _recorder(prepared, plan, self._tape)

    @property
    def connector(self) -> ConnectorChoice:
        """See `HitTracer`."""
        options = {"load_mode": "layerwise", "group_size": self._group_size}
        if self._tape is None:
            return ConnectorChoice(options=options)
        return ConnectorChoice(
            "TapedPipelineConnector",
            "interlace.bench.step_trace.connector",
            {**options, TAPE: self._tape},
        )

    def shape(self) -> dict[str, object]:
        """See `HitTracer`."""
        return {"group_size": self._group_size}

    async def trace(self, engine: AsyncEngine, run: Run) -> StepTrace:
        """See `HitTracer`. Raises: `ConfigError` if it took several steps."""
        events = engine.events()
        try:
            sample, marks = await self._recorder.record(run)
            request_id, step_id = await _loading_step(events, self._plan.new_tokens)
        finally:
            events.close()
        if sample.loaded_tokens != self._plan.prefix_tokens:
            raise InterlaceError(
                f"{sample.loaded_tokens} of {self._plan.prefix_tokens} tokens were loaded: give the"
                " KV pool and the host's records room for the whole prompt."
            )
        return build_trace(marks, self._facts(request_id, step_id))

    def _facts(self, request_id: str, step_id: int) -> TraceFacts:
        prepared, plan = self._prepared, self._plan
        return TraceFacts(
            model=prepared.settings.model,
            dtype=prepared.dtype,
            machine=prepared.gpu or str(prepared.machine["cpu"]),
            clock="host" if prepared.gpu is None else "device",
            loaded_tokens=plan.prefix_tokens,
            new_tokens=plan.new_tokens,
            group_size=self._group_size,
            request_id=request_id,
            step_id=step_id,
        )


def _recorder(
    prepared: Prepared, plan: TimelinePlan, tape: StepTape | None
) -> StepRecorder[StepMarks]:
    if tape is not None:
        return TapedSteps(tape)
    block = page_shape(prepared.loaded)
    shape = LoadShape(
        num_layers=block.num_layers,
        page_bytes=block.page_bytes,
        layer_bytes=blocks_for(plan.prefix_tokens) * block.page_bytes,
        group_size=plan.groups_of(block.num_layers),
    )
    return ProfiledSteps(prepared.device, lambda events: marks_of(events, shape))


async def _loading_step(events: EventStream, new_tokens: int) -> tuple[str, int]:
    """(request, step) of the one request that has just ended. Raises: `ConfigError` if that step
    did not compute all of the new tokens."""
    scheduled: RequestScheduled | None = None
    counts: dict[int, int] = {}
    async for event in events:
        if isinstance(event, RequestScheduled):
            scheduled = event
        elif isinstance(event, StepScheduled):
            counts[event.step_id] = sum(count for _, count in event.num_scheduled_tokens)
        elif isinstance(event, RequestFinished):
            break
    if scheduled is None or counts.get(scheduled.step_id) != new_tokens:
        computed = counts.get(scheduled.step_id, 0) if scheduled is not None else 0
        raise ConfigError(
            f"the step that loads computed {computed} of {new_tokens} new tokens, and a timeline is"
            " of one step: take fewer new tokens, or a larger --max-num-batched-tokens."
        )
    return scheduled.request_id, scheduled.step_id
