"""When each part of a step, and each copy beside it, began and ended. Plain values.

    compute  [embed][...wait... layer 0  ][ layer 1 ][ layer 2 ][head]
                    ^ arrived   ^ passed  ^ end

All times are seconds on the engine's clock: those that a device tells are carried over to it, and
right to some ten microseconds beside the host's; among themselves they are as right as the device's
own. Made by a `StepRunner` that records; knows no device and no connector.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, TypeAlias, get_args

Way: TypeAlias = Literal["load", "save"]
MOST = (1 << 63) - 1
"""Of anything that is counted."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayerTiming:
    """A layer on the compute lane: from its gate to the next one's, or to the head."""

    layer: int
    """From 0."""
    arrived_s: float
    """Computing has come to its gate."""
    passed_s: float
    """Its KV is there; the same where there is nothing to wait for."""
    end_s: float

    @property
    def waited_s(self) -> float:
        """Seconds for which it stood at its gate."""
        return self.passed_s - self.arrived_s


@dataclasses.dataclass(frozen=True, slots=True)
class StepTiming:
    """One step that computed."""

    step_id: int
    num_scheduled_tokens: tuple[tuple[str, int], ...]
    """(request id, tokens) in batch order."""
    mode: str
    """NONE, PIECEWISE or FULL: how its kernels were launched."""
    is_gated: bool
    """Whether it was one graph that waits for the gates of its layers."""
    begin_s: float
    """The device was free for it, and it was being launched."""
    end_s: float
    """Its tokens were chosen."""
    layers: tuple[LayerTiming, ...] = ()
    """All of them, in order; none if only the whole step was timed. What is before the first one is
    called "embed", what is behind the last one "head"."""


@dataclasses.dataclass(frozen=True, slots=True)
class TransferTiming:
    """A piece of a transfer: what a lane copied at a time."""

    lane: str
    """Its name: "load" for what a step loads within itself, "bulk" and "store" beside the steps."""
    way: Way
    request_ids: tuple[str, ...]
    """For whom, as far as that is known."""
    first_layer: int
    end_layer: int
    """Behind the last one."""
    num_blocks: int
    num_bytes: int
    """Copied."""
    copied_by: str
    """How, in the connector's words: "strided", "gather"."""
    begin_s: float
    end_s: float
    step_id: int | None = None
    """The step that waits for it; None beside the steps."""
    error: str | None = None
    """Why not all of it was copied."""
    failed_ids: tuple[str, ...] = ()
    """Of `request_ids`, for whom not all has come; empty if nobody knows, or nothing failed."""
    transfer: str = ""
    """What the connector calls the transfer that it is a piece of, if anything."""

    def is_sound(self, num_layers: int) -> bool:
        """Whether all of it is what it says, for a model of so many layers: connectors of others
        make these, and a file of them is to be read again."""
        step_id = 0 if self.step_id is None else self.step_id
        counts = (self.first_layer, self.end_layer, self.num_blocks, self.num_bytes, step_id)
        error = "" if self.error is None else self.error
        names = (*self.request_ids, *self.failed_ids)
        texts = (self.lane, self.copied_by, self.transfer, error, *names)
        return (
            self.way in get_args(Way)
            and all(type(one) is int and 0 <= one <= MOST for one in counts)
            and all(type(one) is str for one in texts)
            and self.first_layer < self.end_layer <= max(num_layers, self.first_layer + 1)
            and -math.inf < self.begin_s <= self.end_s < math.inf
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Timings:
    """What was recorded since it was asked for last."""

    steps: tuple[StepTiming, ...] = ()
    transfers: tuple[TransferTiming, ...] = ()
    num_dropped: int = 0
    """Steps and pieces that came faster than they could be told, or never ended."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not (self.steps or self.transfers or self.num_dropped)


@dataclasses.dataclass(frozen=True, slots=True)
class RecordingFacts:
    """What records, and how."""

    clock: Literal["device", "host"] = "host"
    """Who tells the times."""
    machine: str = ""
    """Name of the GPU or the processor; empty if nobody knows."""
    num_layers: int = 0
    """0 if the runner does not record."""
