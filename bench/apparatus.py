"""What an experiment is run with: the arms, what feeds and shows them, what figures are held to."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from interlace.bench.arms import Arm
from interlace.bench.bars import NO_BARS, Bars
from interlace.bench.device_idle import Interval, busy_at_the_end
from interlace.bench.figures import Figures
from interlace.bench.limits import Limits
from interlace.bench.report import Check, Row
from interlace.bench.spread import Spread
from interlace.bench.timeline import Sample
from interlace.bench.work_size import WorkSize, work_size
from interlace.bench.workload import Work, WorkSource
from interlace.engine.ports import Progress
from interlace.layers.architecture import Architecture

Outcome = tuple[tuple[Row, ...], tuple[Check, ...]]


class Tracer(Protocol):
    """What tells when kernels ran: `KernelTracer`."""

    async def trace(
        self, run: Callable[[], Awaitable[Sample]], /
    ) -> tuple[Sample, tuple[Interval, ...]]:
        """Await `run()`; beside its sample, the kernels that ran, none if that cannot be told."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Yardstick:
    """Turns times into shares of what the device can do."""

    limits: Limits
    architecture: Architecture
    itemsize: int
    """Bytes of a number, of weights and KV."""

    def size(self, batch_size: int, cached: int, new: int) -> WorkSize:
        """The least work of one step: see `work_size`."""
        return work_size(
            self.architecture, self.itemsize, batch_size=batch_size, cached=cached, new=new
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Bench:
    """The arms of one benchmark, and what feeds, shows and judges them."""

    ours: Sequence[Arm]
    theirs: Arm | None
    source: WorkSource
    progress: Progress
    yardstick: Yardstick | None = None
    """None: figures are not told as shares of the device's limits."""
    tracer: Tracer | None = None
    """None where no kernels run beside the host: on a CPU."""
    on_gpu: bool = False
    """Then `bars` are the only ones for speed: the others were set for a CPU."""
    bars: Bars = NO_BARS


async def trace_figures(bench: Bench, arm: Arm, work: Work) -> Figures:
    """Run `work` once more with the kernels traced: what they take, and how long none runs.

    Of the decode steps, or of the time to the first token if no more than that is asked for.
    Empty if there is no tracer, or it saw nothing. Call it when all is measured, since a profiler
    may leave something behind.
    """
    if bench.tracer is None:
        return {}
    with bench.progress.task("tracing kernels", None):
        sample, kernels = await bench.tracer.trace(lambda: arm.run(work))
    if not kernels:
        return {}
    wall_s = sample.decode_s or sample.first_token_s
    busy_s = busy_at_the_end(kernels, wall_s)
    return {
        "kernels ms": Spread.of([busy_s * 1e3 / (sample.decode_steps or 1)]),
        "no kernel": Spread.of([1 - busy_s / wall_s]),
    }
