"""What a `GpuRunner` has while somebody looks at its steps: see `StepRunner.begin_recording`.

A step that calls its layer hooks, without graphs or in pieces, is timed by events around them; a
full graph by one that has such events in it (`traced_graphs.py`). Device thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from interlace.engine.ports import Clock
from interlace.engine.scheduler_output import SchedulerOutput
from interlace.engine.step_timings import RecordingFacts
from interlace.layers.cuda_streams import Streams
from interlace.layers.gpu.graphs import Captured, GraphPool
from interlace.layers.gpu.traced_graphs import TracedGraph, TracedGraphs
from interlace.layers.graph_mode import GraphMode
from interlace.layers.kv_hooks import LayerHooks
from interlace.layers.moments import EventMoments
from interlace.layers.step_recorder import StepRecorder, StepTimer


class GpuRecording:
    """Of one runner, from its making on."""

    def __init__(self, streams: Streams, graphs: GraphPool, num_layers: int, clock: Clock) -> None:
        """Waits for an event on a stream of its own."""
        moments = EventMoments(streams, clock.monotonic)
        self.recorder = StepRecorder(moments, num_layers)
        self._traced = TracedGraphs(graphs, moments, num_layers)
        self._lent: TracedGraph | None = None  # to the step that is launched, not replayed yet
        self._timer: StepTimer | None = None  # of that step

    def begin_step(self, output: SchedulerOutput) -> StepTimer | None:
        """A step is launched; None if it computes nothing."""
        self._timer = self.recorder.begin_step(output) if output.num_scheduled_tokens else None
        return self._timer

    def prepare(self, captured: Captured, *, is_gated: bool) -> None:
        """The step may replay this: before its loads begin, since it may be captured once more."""
        if self._lent is not None:  # that step ran without graphs in the end
            self._lent.give_back()
        self._lent = self._traced.lend(captured, is_gated=is_gated)

    def around(self, hooks: LayerHooks | None, mode: GraphMode) -> LayerHooks | None:
        """The layer hooks of a step that calls them, and runs in `mode`."""
        return hooks if self._timer is None else self._timer.around(hooks, mode)

    def graphs(self, *, is_gated: bool) -> Sequence[torch.cuda.CUDAGraph] | None:
        """What the step replays in place of a full graph, if there is anything."""
        lent, self._lent = self._lent, None
        if self._timer is None:
            return None
        self._timer.mode = GraphMode.FULL
        self._timer.is_gated = is_gated
        if lent is None:
            return None
        self._timer.borrow(lent.marks, lent.give_back)
        return lent.graphs


def facts_of(device: torch.device, num_layers: int) -> RecordingFacts:
    """Of a recording on this GPU."""
    return RecordingFacts("device", torch.cuda.get_device_name(device), num_layers)
