"""What the engine asks of the world outside it, as Protocols: a step runner, a clock, progress.

The connector's two sides join this file with the connector seam.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from interlace.engine.outputs import ModelRunnerOutput
from interlace.engine.scheduler_output import SchedulerOutput


class StepRunner(Protocol):
    """Executes steps in the order in which they were scheduled. Lives on the device thread."""

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step and sample. An exception is fatal for the engine."""
        ...

    def close(self) -> None:
        """Release what the runner holds; called once, after the last step."""
        ...


class Clock(Protocol):
    """Time, injected so that tests can turn the hands."""

    def monotonic(self) -> float:
        """Seconds since some fixed point; never goes back."""
        ...


class Progress(Protocol):
    """Shows how far long work is: downloads, conversions. Called from any one thread."""

    def task(
        self, description: str, total: float | None
    ) -> AbstractContextManager[Callable[[float], None]]:
        """Show one task until the context ends; the callable inside adds to what is done.

        `total` is in whatever unit the callable is called with; None if it is not known. Either
        may raise to end the work; long work calls often, with 0 if there is no news.
        """
        ...
