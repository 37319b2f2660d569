"""When each layer of each step began and ended, taken down while somebody looks.

A step's marks are made as it is launched and read when it has ended, so nothing waits for them; the
connector's, for which this is the `TransferRecorder`, are read whenever they have passed. Runners
have one of these while they record, and none else. Knows no connector, and neither CPU nor GPU: a
`Moments` does.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from interlace.engine.outputs import ModelRunnerOutput
from interlace.engine.scheduler_output import SchedulerOutput
from interlace.engine.step_timings import LayerTiming, StepTiming, Timings, TransferTiming
from interlace.layers.graph_mode import GraphMode
from interlace.layers.kv_hooks import LayerHooks
from interlace.layers.moments import Moments

logger = logging.getLogger(__name__)

MOST_STEPS = 64
"""That have not been told of: older ones are dropped."""
MOST_PIECES = 8192
"""Likewise; further ones are dropped."""


class LayerMarks:
    """Marks at the layers of one step, or of all replays of one graph. Device thread."""

    def __init__(self, mark: Callable[[], Any], num_layers: int) -> None:
        """`mark` makes one on the current stream."""
        self._mark = mark
        self._last = num_layers - 1
        self.arrived: list[Any] = []
        self.passed: list[Any] = []
        self._ends: list[Any] = []  # all are kept: a graph in which one was recorded needs it

    def around(self, hooks: LayerHooks | None) -> LayerHooks:
        """`hooks` with marks around each layer's wait, once a step or a capture; None: marks alone.

        Where nobody calls `end`, since a captured piece goes on to the head, the last layer ends
        with its attention.
        """

        def wait(layer: int) -> None:
            arrived = self._mark()
            self.arrived.append(arrived)
            if hooks is not None:
                hooks.wait(layer)
            self.passed.append(arrived if hooks is None else self._mark())

        def save(layer: int) -> None:
            if layer == self._last:
                self.end_layers()
            if hooks is not None:
                hooks.save(layer)

        return LayerHooks(wait, save, self.end_layers)

    def end_layers(self) -> None:
        """The last layer was computed, so far as one knows. The last call counts."""
        self._ends.append(self._mark())

    @property
    def has_all(self) -> bool:
        """Whether every layer was marked."""
        are_all = len(self.arrived) == len(self.passed) == self._last + 1
        return are_all and bool(self._ends)

    def timings(self, time_s: Callable[[Any], float]) -> tuple[LayerTiming, ...]:
        """Of all layers, once the step has ended; none if they were not marked."""
        if not self.has_all:
            return ()
        arrived = [time_s(mark) for mark in self.arrived]
        passed = [
            begin if after is before else time_s(after)
            for begin, before, after in zip(arrived, self.arrived, self.passed, strict=True)
        ]
        bounds = (*arrived[1:], time_s(self._ends[-1]))
        return tuple(map(LayerTiming, range(len(arrived)), arrived, passed, bounds))


class StepTimer:
    """One step on its way through the device. Device thread."""

    def __init__(self, moments: Moments, output: SchedulerOutput, num_layers: int) -> None:
        """It begins now, or when the device is free for it."""
        moments.refresh()
        self._moments = moments
        self._anchor = moments.anchor
        self._step_id = output.step_id
        self._tokens = tuple(output.num_scheduled_tokens.items())
        self._own: list[Any] = []
        self._own_marks = LayerMarks(self._mark, num_layers)
        self._marks = self._own_marks
        self._give_back: Callable[[], None] | None = None
        self._begin = self._mark()
        self._end: Any = None
        self.mode = GraphMode.NONE
        """How the step runs, as soon as that is known."""
        self.is_gated = False

    def _mark(self) -> Any:
        mark = self._moments.mark()
        self._own.append(mark)
        return mark

    def around(self, hooks: LayerHooks | None, mode: GraphMode = GraphMode.NONE) -> LayerHooks:
        """The layer hooks of a step that calls them, with marks; it runs in `mode`, maybe after a
        graph whose gates were not all armed."""
        self.mode = mode
        self.is_gated = False
        self._marks = self._own_marks
        return self._own_marks.around(hooks)

    def end_layers(self) -> None:
        """The last layer was computed: for who does not call `LayerHooks.end`."""
        self._own_marks.end_layers()

    def borrow(self, marks: LayerMarks, give_back: Callable[[], None]) -> None:
        """The step replays a graph that records these; `give_back` when they were read."""
        self._marks = marks
        self._give_back = give_back

    def end(self) -> None:
        """All of the step was queued, or computed."""
        self._end = self._mark()

    @property
    def has_ended(self) -> bool:
        """Whether all marks have passed. Never waits."""
        return self._end is not None and self._moments.has_passed(self._end)

    def wait(self) -> None:
        """Until they have."""
        if self._end is not None:
            self._moments.wait(self._end)

    def timing(self, *, has_layers: bool = True) -> StepTiming:
        """Of a step that has ended; without layers, of the whole. Raises: `RuntimeError` if the
        device does not tell."""
        return StepTiming(
            self._step_id,
            self._tokens,
            self.mode.name,
            self.is_gated,
            self._time_s(self._begin),
            self._time_s(self._end),
            self._marks.timings(self._time_s) if has_layers else (),
        )

    def _time_s(self, mark: Any) -> float:
        return self._moments.time_s(mark, self._anchor)

    def close(self) -> None:
        """It was read, or never will be."""
        for mark in self._own:
            self._moments.release(mark)
        self._own = []
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class _Piece(NamedTuple):
    begin: Any
    end: Any
    anchor: Any
    tell: Callable[[float, float], TransferTiming]


class StepRecorder:
    """What one runner records; a `TransferRecorder`. Device thread but for `mark` and `add`."""

    def __init__(self, moments: Moments, num_layers: int) -> None:
        """From now on."""
        self.moments = moments
        self._num_layers = num_layers
        self._steps: deque[StepTimer] = deque()
        self._pieces: deque[_Piece] = deque()
        self._lock = threading.Lock()  # of the count, to which any lane's thread adds
        self._num_dropped = 0
        self._has_warned = False

    # ---------------------------------------------------------------- for runners

    def begin_step(self, output: SchedulerOutput) -> StepTimer:
        """A step that computes is launched: say `end` of it, and ask `with_timings`."""
        timer = StepTimer(self.moments, output, self._num_layers)
        self._steps.append(timer)
        while len(self._steps) > MOST_STEPS:
            self._steps.popleft().close()
            self._drop()
        return timer

    def with_timings(
        self, output: ModelRunnerOutput, ended: StepTimer | None = None
    ) -> ModelRunnerOutput:
        """A step's output, with what has ended by now. `ended`: that step's, whose tokens have
        come, so that its last mark passes in this moment, if it has not yet."""
        if ended is not None:
            ended.wait()
        timings = self.take()
        return output if timings.is_empty else dataclasses.replace(output, timings=timings)

    def take(self) -> Timings:
        """What has ended since the last call. Never waits."""
        steps: list[StepTiming] = []
        while self._steps and self._steps[0].has_ended:
            timer = self._steps.popleft()
            try:
                steps.append(self._read(timer))
            finally:
                timer.close()
        pieces = self._take_pieces()
        with self._lock:
            num_dropped, self._num_dropped = self._num_dropped, 0
        return Timings(tuple(steps), pieces, num_dropped)

    def _read(self, timer: StepTimer) -> StepTiming:
        try:
            return timer.timing()
        except RuntimeError as error:
            if not self._has_warned:
                logger.warning("times of layers cannot be read, only those of steps: %s", error)
            self._has_warned = True
            return timer.timing(has_layers=False)

    def close(self) -> Timings:
        """What is left, when the steps under way have ended; the rest is dropped."""
        for timer in self._steps:
            timer.wait()
        timings = self.take()
        num_left = len(self._steps) + len(self._pieces)
        while self._steps:
            self._steps.popleft().close()
        self._pieces.clear()
        return dataclasses.replace(timings, num_dropped=timings.num_dropped + num_left)

    def _take_pieces(self) -> tuple[TransferTiming, ...]:
        found: list[TransferTiming] = []
        for _ in range(len(self._pieces)):
            piece = self._pieces.popleft()
            if not (self.moments.has_passed(piece.end) and self.moments.has_passed(piece.begin)):
                self._pieces.append(piece)
                continue
            told = self._tell(piece)  # its marks may be those of another piece too: none is reused
            found += [] if told is None else [told]
        return tuple(found)

    def _tell(self, piece: _Piece) -> TransferTiming | None:
        """None, and it counts as dropped, if whoever copied it cannot tell."""
        try:
            begin, end = (self.moments.time_s(m, piece.anchor) for m in (piece.begin, piece.end))
            told: object = piece.tell(begin, end)
            if isinstance(told, TransferTiming) and told.is_sound(self._num_layers):
                return told
        except Exception:
            logger.warning("it could not be told when a transfer's piece was copied", exc_info=True)
        self._drop()
        return None

    def _drop(self) -> None:
        with self._lock:
            self._num_dropped += 1

    # ---------------------------------------------------------------- for connectors

    def mark(self) -> Any:
        """See `TransferRecorder`."""
        return self.moments.mark()

    def add(self, begin: Any, end: Any, tell: Callable[[float, float], TransferTiming]) -> None:
        """See `TransferRecorder`."""
        if len(self._pieces) >= MOST_PIECES:
            self._drop()
        else:
            self._pieces.append(_Piece(begin, end, self.moments.anchor, tell))
