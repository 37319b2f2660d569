"""What a step does on a CPU, written down by the threads that do it: see `connector.py`.

Every note is one `append` or assignment, so a step is hardly slowed down.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from interlace.bench.step_trace.build import LayerLoad, StepMarks
from interlace.bench.step_trace.intervals import Interval
from interlace.bench.step_trace.taped import now_ns
from interlace.engine.errors import InterlaceError
from interlace.engine.ports import Clock

T = TypeVar("T")


class StepTape:
    """Notes of the first step that loads within itself since the last `clear`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.clear()

    def clear(self) -> None:
        """Forget it all. Only while nothing is under way."""
        self._loads: dict[int, LayerLoad] = {}
        self._reached: dict[int, int] = {}
        self._passed: dict[int, int] = {}
        self._begin: int | None = None
        self._forward_end: int | None = None
        self._end: int | None = None

    def now_ns(self) -> int:
        """The clock in nanoseconds. Any thread."""
        return now_ns(self._clock)

    # ---------------------------------------------------------------- device thread

    def begin(self) -> None:
        """A step that loads begins to compute."""
        if self._begin is None:
            self._begin = self.now_ns()

    def reach(self, layer: int) -> None:
        """Computing stands before the layer's gate."""
        self._reached.setdefault(layer, self.now_ns())

    def go_on(self, layer: int) -> None:
        """Computing goes on behind the gate."""
        self._passed.setdefault(layer, self.now_ns())

    def end_forward(self) -> None:
        """The last layer was computed, if a step has begun."""
        if self._begin is not None and self._forward_end is None:
            self._forward_end = self.now_ns()

    def end(self) -> None:
        """The step has sampled, if its forward has ended."""
        if self._forward_end is not None and self._end is None:
            self._end = self.now_ns()

    # ---------------------------------------------------------------- load lane

    def add_load(self, layer: int, begin_ns: int, num_bytes: int) -> None:
        """A copy into the layer's pages has just ended. Several become one."""
        known = self._loads.get(layer)
        if known is not None:
            begin_ns, num_bytes = known.begin_ns, known.num_bytes + num_bytes
        self._loads[layer] = LayerLoad(begin_ns, self.now_ns(), num_bytes)

    # ---------------------------------------------------------------- afterwards

    def marks(self) -> StepMarks:
        """What was noted. Raises: `InterlaceError` if it is not one whole step."""
        layers = sorted(self._loads)
        whole = layers == sorted(self._reached) == sorted(self._passed) == [*range(len(layers))]
        if self._begin is None or self._forward_end is None or self._end is None or not whole:
            raise InterlaceError(
                f"no whole step that loads layer by layer was seen ({len(layers)} layers loaded,"
                f" {len(self._reached)} computed): is the prefix stored, and longer than a block?"
            )
        return StepMarks(
            loads=tuple(self._loads[layer] for layer in layers),
            begin_ns=self._begin,
            gates=tuple(Interval(self._reached[layer], self._passed[layer]) for layer in layers),
            forward_end_ns=self._forward_end,
            end_ns=self._end,
        )


class TapedSteps:
    """A `StepRecorder` for a CPU."""

    def __init__(self, tape: StepTape) -> None:
        """`tape` is the one that the engine's connector writes on."""
        self._tape = tape

    async def record(self, run: Callable[[], Awaitable[T]]) -> tuple[T, StepMarks]:
        """See `StepRecorder`."""
        self._tape.clear()
        outcome = await run()
        return outcome, self._tape.marks()
