"""What lanes ask of CUDA: streams and events of one device. Tests have stand-ins for them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Event(Protocol):
    """As `torch.cuda.Event` is."""

    def record(self, stream: Any) -> None:
        """Pass when all that is queued on `stream` now has ended."""
        ...

    def query(self) -> bool:
        """Whether the last record has passed."""
        ...

    def synchronize(self) -> None:
        """Wait until it has."""
        ...


class TimedEvent(Event, Protocol):
    """One that knows when it passed."""

    def elapsed_time(self, other: Any) -> float:
        """Milliseconds from its last record to that of `other`, both of which have passed."""
        ...


class Stream(Protocol):
    """As `torch.cuda.Stream` is."""

    def wait_event(self, event: Any) -> None:
        """Begin what is queued from now on when the event's last record has passed."""
        ...


class Streams(Protocol):
    """Where streams and events of one device come from."""

    def stream(self, *, is_urgent: bool) -> Stream:
        """A stream; the work of an urgent one goes before that of others."""
        ...

    def event(self, *, is_external: bool = False) -> Event:
        """An event; a graph does not take an external one into itself, but waits for it."""
        ...

    def timed_event(self, *, is_external: bool = False) -> TimedEvent:
        """One that knows when it passed; each replay of a graph in which an external one was
        recorded records it again."""
        ...

    def current(self) -> Stream:
        """The stream on which this thread queues work now."""
        ...

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Make it the current one."""
        ...


class CudaStreams:
    """Those of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        """Makes nothing yet."""
        self._device = device

    def stream(self, *, is_urgent: bool) -> Stream:
        """See `Streams`. From torch's pool, which hands them out again after 32."""
        priority = -1 if is_urgent else 0
        stream: Any = torch.cuda.Stream(self._device, priority=priority)  # type: ignore[no-untyped-call]
        return stream  # type: ignore[no-any-return]

    def event(self, *, is_external: bool = False) -> Event:
        """See `Streams`. Who waits for it sleeps."""
        event: Any = torch.cuda.Event(blocking=True, external=is_external)  # type: ignore[no-untyped-call]
        return event  # type: ignore[no-any-return]

    def timed_event(self, *, is_external: bool = False) -> TimedEvent:
        """See `Streams`. Who waits for it does not sleep."""
        event: Any = torch.cuda.Event(enable_timing=True, external=is_external)  # type: ignore[no-untyped-call]
        return event  # type: ignore[no-any-return]

    def current(self) -> Stream:
        """See `Streams`."""
        stream: Any = torch.cuda.current_stream(self._device)
        return stream  # type: ignore[no-any-return]

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """See `Streams`."""
        context: AbstractContextManager[object] = torch.cuda.stream(stream)
        return context
