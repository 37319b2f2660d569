"""What one step loads within itself, as the worker side follows it: which of it has failed, and
when that is known. Device thread."""

from __future__ import annotations

from interlace.connectors.pipeline.layer_pipeline import LayerPipeline, PipelinedLoad
from interlace.connectors.pipeline.messages import Load
from interlace.connectors.pipeline.worker_bulk import block_ids_of, records_of


class StepLoad:
    """All loads of one step, which share one `PipelinedLoad`."""

    def __init__(self, loads: list[Load], pipelined: PipelinedLoad) -> None:
        self.loads = loads
        self.pipelined = pipelined
        self._judged: set[int] | None = None
        """Loads, by number, that were told to have failed, once that is asked."""
        self._has_verdict = False
        self.damaged: set[int] = set()
        """Records whose content is not what was stored."""

    @property
    def owes_verdict(self) -> bool:
        """Whether `take_late` is to say whether what came is good."""
        return self.pipelined.has_checks and not self._has_verdict

    def take_invalid(self) -> set[int]:
        """Blocks of the loads that failed, once: the step that loads them is over."""
        if self._judged is not None:
            return set()
        self._judged = set()
        return self._take_failed()

    def _take_failed(self) -> set[int]:
        """Blocks of loads that have failed since this was asked."""
        assert self._judged is not None
        errors = enumerate(self.pipelined.errors)
        failed = {number for number, error in errors if error is not None} - self._judged
        self._judged |= failed
        return set().union(*(block_ids_of(self.loads[number].runs) for number in failed))

    def take_late(self, pipeline: LayerPipeline) -> set[int]:
        """The step's tokens have come: blocks that have turned out bad, once. Waits for that."""
        if self._judged is None:
            return set()
        self._has_verdict = True
        bad = pipeline.wait_for_checks(self.pipelined)
        if not bad:
            return self._take_failed()
        runs = (run for load in self.loads for run in load.runs)
        self.damaged |= records_of(runs, bad)
        return bad | self._take_failed()
