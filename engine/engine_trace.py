"""What a trace of an engine has: its newest steps, what lanes copied, and the requests. Plain
values.

Times are seconds from the begin of the trace, whole nanoseconds. A step has what its device tells,
and what the event loop did for it; either may be missing at the ends of a trace. See
`trace_collector.py`, which makes it of events, and `trace_file.py`, which writes it.
"""

from __future__ import annotations

import dataclasses

from interlace.engine.outputs import FinishReason
from interlace.engine.step_timings import StepTiming, TransferTiming


@dataclasses.dataclass(frozen=True, slots=True)
class EngineTraceFacts:
    """Of what engine, and on what machine."""

    model: str
    dtype: str
    device: str
    machine: str
    """Name of the GPU, or of the processor; empty if nobody knows."""
    clock: str
    """"device" or "host": who tells the times of steps and copies."""
    num_layers: int
    """0 if the engine's runner does not record."""
    kv_connector: str | None
    interlace: str
    """Version, as of torch: empty without it."""
    torch: str


@dataclasses.dataclass(frozen=True, slots=True)
class HostTimes:
    """What the event loop did for a step, as far as that was seen."""

    scheduled_s: float | None = None
    launched_s: float | None = None
    """Handed to the device thread."""
    tokens_s: float | None = None
    """Its tokens were known."""
    done_s: float | None = None
    """All of it was applied."""


@dataclasses.dataclass(frozen=True, slots=True)
class TracedStep:
    """One step that computes."""

    step_id: int
    num_scheduled_tokens: tuple[tuple[str, int], ...]
    """(request id, tokens) in batch order."""
    host: HostTimes = HostTimes()
    timing: StepTiming | None = None

    @property
    def num_tokens(self) -> int:
        """Of all requests."""
        return sum(number for _, number in self.num_scheduled_tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request, as far as it was seen: what came before the trace is None."""

    request_id: str
    num_prompt_tokens: int | None = None
    queued_s: float | None = None
    scheduled_s: float | None = None
    """It got its first blocks, for the first time."""
    first_token_s: float | None = None
    finished_s: float | None = None
    finish_reason: FinishReason | None = None
    num_generated_tokens: int | None = None
    num_local_cached_tokens: int | None = None
    num_external_cached_tokens: int | None = None
    num_preemptions: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class LeftOut:
    """What a trace lacks, since it keeps the newest only, or since it came too fast."""

    steps: int = 0
    """Older than those that are kept."""
    transfers: int = 0
    requests: int = 0
    timings: int = 0
    """Steps and copies that were not told of: see `TimingsDropped`."""
    events: int = 0
    """That could not be taken in."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineTrace:
    """Steps by their numbers, copies in the order in which they ended, requests as they came."""

    facts: EngineTraceFacts
    steps: tuple[TracedStep, ...]
    transfers: tuple[TransferTiming, ...]
    requests: tuple[TracedRequest, ...]
    left_out: LeftOut = LeftOut()
