"""What happens in the engine, as frozen records, and the bus that carries them to readers.

Nothing is recorded while nobody reads: emitters ask `EventBus.active` first. A reader that falls
behind loses the oldest events and is told how many.
"""

from __future__ import annotations

import asyncio
import dataclasses
import weakref
from collections import deque
from typing import ClassVar, Protocol, Self

from interlace.engine.kv_events import MEDIUM_GPU
from interlace.engine.outputs import FinishReason
from interlace.engine.step_timings import LayerTiming, StepTiming, TransferTiming


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """Base of all events."""

    name: ClassVar[str] = ""
    time_s: float
    """On the engine's clock."""


@dataclasses.dataclass(frozen=True, slots=True)
class RequestQueued(Event):
    """A request was admitted to the waiting queue."""

    name: ClassVar[str] = "request.queued"
    request_id: str
    num_prompt_tokens: int
    priority: int


@dataclasses.dataclass(frozen=True, slots=True)
class RequestScheduled(Event):
    """A waiting or preempted request got its first blocks."""

    name: ClassVar[str] = "request.scheduled"
    request_id: str
    step_id: int
    num_local_cached_tokens: int
    num_external_cached_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class RequestFirstToken(Event):
    """The first token of a request's answer is known."""

    name: ClassVar[str] = "request.first_token"
    request_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class RequestFinished(Event):
    """A request ended, for whatever reason; also one that was never queued, since it was aborted
    or refused while it was tokenised."""

    name: ClassVar[str] = "request.finished"
    request_id: str
    finish_reason: FinishReason
    num_generated_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class RequestPreempted(Event):
    """A request lost its blocks and waits to be computed again."""

    name: ClassVar[str] = "request.preempted"
    request_id: str
    num_preemptions: int


@dataclasses.dataclass(frozen=True, slots=True)
class StepScheduled(Event):
    """A step was planned."""

    name: ClassVar[str] = "step.scheduled"
    step_id: int
    num_scheduled_tokens: tuple[tuple[str, int], ...]
    """(request id, tokens) in batch order."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepLaunched(Event):
    """A step was handed to the device thread."""

    name: ClassVar[str] = "step.launched"
    step_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class StepDone(Event):
    """A step's results were applied, all of them: its tokens have gone out before."""

    name: ClassVar[str] = "step.done"
    step_id: int
    num_sampled_tokens: int
    sampled_req_ids: tuple[str, ...] = ()
    """Requests that got them, in batch order; empty if nobody read events when they came."""
    tokens_s: float | None = None
    """When they were known, on the engine's clock; None likewise."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepTimed(Event):
    """How long a step took on its device; its `LayerCompute` come before. Only while the engine
    records its steps, as those that follow here: see `AsyncEngine.record_steps`."""

    name: ClassVar[str] = "step.timed"
    timing: StepTiming


@dataclasses.dataclass(frozen=True, slots=True)
class LayerCompute(Event):
    """A layer of a step was computed, with its wait at its gate."""

    name: ClassVar[str] = "layer.compute"
    step_id: int
    timing: LayerTiming


@dataclasses.dataclass(frozen=True, slots=True)
class LayerLoad(Event):
    """KV of some layers was loaded."""

    name: ClassVar[str] = "layer.load"
    timing: TransferTiming


@dataclasses.dataclass(frozen=True, slots=True)
class LayerSave(Event):
    """KV of some layers was saved."""

    name: ClassVar[str] = "layer.save"
    timing: TransferTiming


@dataclasses.dataclass(frozen=True, slots=True)
class GateFailed(Event):
    """What a step loads of some layers did not come: their gate has opened all the same."""

    name: ClassVar[str] = "gate.failed"
    step_id: int
    first_layer: int
    end_layer: int
    request_ids: tuple[str, ...]
    error: str


@dataclasses.dataclass(frozen=True, slots=True)
class TimingsDropped(Event):
    """Steps or copies came faster than they could be told, or never ended."""

    name: ClassVar[str] = "timings.dropped"
    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class BlockStored(Event):
    """A full block was published: from now on its content can be hit."""

    name: ClassVar[str] = "block.stored"
    block_id: int | None
    """In the engine's pool; None if a connector stored it elsewhere."""
    block_hash: bytes
    parent_block_hash: bytes | None
    """Of the block before it, or the root of its chain; None if a connector does not say."""
    token_ids: tuple[int, ...]
    """Empty if a connector does not say."""
    medium: str | None = MEDIUM_GPU
    """Where: the engine's pool, or what a connector calls its own."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockRemoved(Event):
    """A published block lost its content: evicted, or found to be bad."""

    name: ClassVar[str] = "block.removed"
    block_id: int | None
    """In the engine's pool; None if a connector removed it elsewhere."""
    block_hash: bytes
    medium: str | None = MEDIUM_GPU


@dataclasses.dataclass(frozen=True, slots=True)
class BlockCleared(Event):
    """The whole prefix cache was emptied, or a connector's store."""

    name: ClassVar[str] = "block.cleared"
    medium: str | None = MEDIUM_GPU
    """None if it was a connector's: it does not say more."""


class EventStream:
    """An async iterator over events from the moment of its creation. One reader, loop thread.

    At most `max_pending` events wait; beyond that the oldest is dropped and counted in
    `num_dropped`. Ends when the engine closes, or on `close()`. Cancelling a pending `anext`
    loses nothing.
    """

    def __init__(self, bus: EventBus, max_pending: int) -> None:
        self.num_dropped = 0
        self._bus = bus
        self._pending: deque[Event] = deque(maxlen=max_pending)
        self._wake = asyncio.Event()
        self._closed = False

    def push(self, event: Event) -> None:
        """Add one event; called by the bus."""
        self.num_dropped += len(self._pending) == self._pending.maxlen
        self._pending.append(event)
        self._wake.set()

    def take_pending(self) -> list[Event]:
        """All that wait, at once: for who comes by now and then and does not iterate."""
        taken = list(self._pending)
        self._pending.clear()
        return taken

    def close(self) -> None:
        """Stop listening. What is pending can still be read. Idempotent."""
        self._closed = True
        self._bus.discard(self)
        self._wake.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while not self._pending:
            if self._closed:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._pending.popleft()


class EventSink(Protocol):
    """Who takes events one by one, as an `EventStream` does for its reader."""

    def push(self, event: Event) -> None:
        """Take one event, at once: never raises."""
        ...

    def close(self) -> None:
        """There will be no more. Idempotent."""
        ...


class EventBus:
    """Hands each event to every open stream; a stream that was dropped leaves by itself."""

    def __init__(self) -> None:
        self._streams: weakref.WeakSet[EventSink] = weakref.WeakSet()
        self._closed = False

    @property
    def active(self) -> bool:
        """Whether anyone reads; emitters build events only then."""
        return len(self._streams) > 0

    def subscribe(self, max_pending: int = 65536) -> EventStream:
        """Open a stream of all events from now on."""
        stream = EventStream(self, max_pending)
        self.add(stream)
        return stream

    def add(self, sink: EventSink) -> None:
        """Hand all events from now on to this one too, as long as somebody holds it."""
        if self._closed:
            sink.close()
        else:
            self._streams.add(sink)

    def discard(self, sink: EventSink) -> None:
        """Forget a stream, or another sink."""
        self._streams.discard(sink)

    def emit(self, event: Event) -> None:
        """Hand `event` to every open stream."""
        for stream in list(self._streams):
            stream.push(event)

    def close(self) -> None:
        """End every stream, and every later one at once."""
        self._closed = True
        for stream in list(self._streams):
            stream.close()
