"""Timelines of prompts that are computed from the front and loaded from the back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlace.bench.kv_blocks import BLOCK_SIZE, page_shape
from interlace.bench.session import Prepared
from interlace.bench.step_trace.facts import HybridFacts
from interlace.bench.step_trace.hybrid_build import HybridMarks, build_hybrid_trace
from interlace.bench.step_trace.hybrid_device import hybrid_marks_of
from interlace.bench.step_trace.hybrid_tape import HybridTape
from interlace.bench.step_trace.profiler import ProfiledSteps
from interlace.bench.step_trace.setup import ConnectorChoice, Run, TimelinePlan
from interlace.bench.step_trace.taped import TAPE
from interlace.bench.step_trace.trace import HybridTrace
from interlace.engine.ports import Clock

if TYPE_CHECKING:
    from interlace.engine.async_engine import AsyncEngine


class HybridHits:
    """A `HitTracer`. Loop thread."""

    def __init__(self, prepared: Prepared, plan: TimelinePlan, clock: Clock) -> None:
        """By a tape, beside which a GPU is profiled."""
        self._prepared = prepared
        self._plan = plan
        self._tape = HybridTape(clock)

    @property
    def connector(self) -> ConnectorChoice:
        """See `HitTracer`."""
        return ConnectorChoice(
            "HybridNotesConnector",
            "interlace.bench.step_trace.hybrid_connector",
            {"load_mode": "hybrid", TAPE: self._tape},
        )

    def shape(self) -> dict[str, object]:
        """See `HitTracer`."""
        return {}

    async def trace(self, engine: AsyncEngine, run: Run) -> HybridTrace:
        """See `HitTracer`. Raises: also `InterlaceError` if the two ends do not meet."""
        self._tape.clear()
        marks = await self._marks(run)
        return build_hybrid_trace(marks, self._facts(marks))

    async def _marks(self, run: Run) -> HybridMarks:
        prepared, tape = self._prepared, self._tape
        if prepared.gpu is None:
            await run()
            return tape.timed_marks()
        block = page_shape(prepared.loaded)
        profiled = ProfiledSteps(
            prepared.device,
            lambda events: hybrid_marks_of(events, tape, block.num_layers, block.page_bytes),
        )
        _, marks = await profiled.record(run)
        return marks

    def _facts(self, marks: HybridMarks) -> HybridFacts:
        prepared, plan = self._prepared, self._plan
        loaded_tokens = marks.num_loaded_blocks * BLOCK_SIZE
        return HybridFacts(
            model=prepared.settings.model,
            dtype=prepared.dtype,
            machine=prepared.gpu or str(prepared.machine["cpu"]),
            clock="host" if prepared.gpu is None else "device",
            num_layers=prepared.loaded.architecture.num_layers,
            block_size=BLOCK_SIZE,
            front_tokens=plan.prefix_tokens - loaded_tokens,
            loaded_tokens=loaded_tokens,
            new_tokens=plan.new_tokens,
            request_id=marks.request_id,
            steps=marks.ran,
        )
