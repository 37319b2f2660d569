"""Full graphs that tell the times of their layers, while somebody looks.

A captured step calls no hooks, so its layers are timed by events within the graph: it is captured
once more, with records of external timing events around each layer's gate, when a step of its size
first runs while steps are recorded. Such a graph waits for the gates as the one that it stands for
does, and is replayed under the same rule: arm, then launch.

**Read before it is replayed again.** Its events are its own, and the next replay records them
anew. So a graph is lent to one step at a time, and comes back when that one's times were read,
which is before its output is handed on. With two steps under way each has a graph of its own, and
they take turns; where both are out, since more steps are under way, a step replays the graph that
it would have without all this, and only the whole of it is timed.

All of them go when the recording ends. They use the memory that the others have, since no two
graphs run at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from interlace.layers.cuda_streams import TimedEvent
from interlace.layers.gpu.graphs import Captured, GraphPool
from interlace.layers.graph_mode import GraphMode
from interlace.layers.moments import EventMoments
from interlace.layers.step_recorder import LayerMarks

logger = logging.getLogger(__name__)

TURNS = 2
"""Graphs of one kind: as many as steps are under way by default."""


class TracedGraph:
    """One of them."""

    def __init__(self, graphs: Sequence[torch.cuda.CUDAGraph], marks: LayerMarks) -> None:
        """`graphs` are the parts of one, in order. `marks` are recorded by each replay."""
        self.graphs = graphs
        self.marks = marks
        self.is_lent = False

    def give_back(self) -> None:
        """Its times were read, or never will be."""
        self.is_lent = False


class _Kind(NamedTuple):
    captured_id: int
    """Of what it stands for, which lives as long as the runner."""
    is_gated: bool


class TracedGraphs:
    """Those of one recording. Device thread."""

    def __init__(self, pool: GraphPool, moments: EventMoments, num_layers: int) -> None:
        """None yet."""
        self._pool = pool
        self._moments = moments
        self._num_layers = num_layers
        self._graphs: dict[_Kind, list[TracedGraph]] = {}
        self._has_failed = False

    def lend(self, captured: Captured, *, is_gated: bool) -> TracedGraph | None:
        """For the step that is launched now, before its loads begin: capturing waits for the
        device. None of a step in pieces, if all are lent, or if there is no memory for one."""
        if captured.runtime_mode is not GraphMode.FULL:
            return None
        graphs = self._graphs.setdefault(_Kind(id(captured), is_gated), [])
        found = next((one for one in graphs if not one.is_lent), None)
        if found is None and len(graphs) < TURNS and not self._has_failed:
            found = self._capture(captured, is_gated=is_gated)
            graphs += [] if found is None else [found]
        if found is not None:
            found.is_lent = True
        return found

    def _capture(self, captured: Captured, *, is_gated: bool) -> TracedGraph | None:
        marks = LayerMarks(self._external_marks(), self._num_layers)
        try:
            graphs = self._pool.capture_traced(captured, marks.around, is_gated=is_gated)
        except RuntimeError as error:  # want of memory among them
            self._has_failed = True
            logger.warning(
                "a graph of %d tokens that tells its layers' times could not be captured (%s):"
                " steps of it, and of others that are not captured yet, are timed as wholes",
                captured.size.num_tokens,
                str(error).partition("\n")[0],
            )
            return None
        return TracedGraph(graphs, marks) if graphs else None

    def _external_marks(self) -> Callable[[], TimedEvent]:
        """Makes all of them at once: not while a graph is captured."""
        events = [self._moments.external_event() for _ in range(2 * self._num_layers + 2)]
        return lambda: self._moments.record(events.pop())
