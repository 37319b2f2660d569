"""Stand-ins for CUDA's streams and events, whose work runs in an order that a seed decides."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any


@dataclasses.dataclass(eq=False)
class FakeEvent:
    """Passes as often as it was recorded."""

    device: FakeDevice
    is_external: bool = False
    num_recorded: int = 0
    num_passed: int = 0
    time: float = 0.0
    """When it passed last."""

    def record(self, stream: FakeStream) -> None:
        self.num_recorded += 1
        stream.ops.append(("record", self, self.num_recorded))

    def query(self) -> bool:
        return self.num_passed >= self.num_recorded

    def synchronize(self) -> None:
        while not self.query():
            assert self.device.step(), "this wait would never end"

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.query()
        assert other.query()
        return (other.time - self.time) * 1e3


Op = tuple[str, FakeEvent, int] | Callable[[], None]


@dataclasses.dataclass(eq=False)
class FakeStream:
    """What is queued, oldest first."""

    name: str = ""
    ops: collections.deque[Op] = dataclasses.field(default_factory=collections.deque)

    def wait_event(self, event: FakeEvent) -> None:
        self.ops.append(("wait", event, event.num_recorded))

    @property
    def can_run(self) -> bool:
        if not self.ops:
            return False
        op = self.ops[0]
        return callable(op) or op[0] != "wait" or op[1].num_passed >= op[2]

    def run(self, now: float) -> None:
        op = self.ops.popleft()
        if callable(op):
            op()
        elif op[0] == "record":
            # An older record, on another stream, does not undo a newer one.
            op[1].num_passed, op[1].time = max(op[1].num_passed, op[2]), now


class FakeDevice:
    """`Streams`: one piece of work at a time, each of which takes `op_s` seconds."""

    def __init__(self, seed: int = 0, *, op_s: float = 0.0) -> None:
        self.random = random.Random(seed)
        self.compute = FakeStream("compute")
        self.streams = [self.compute]
        self.now = 0.0
        self.sleeps: list[float] = []
        self._op_s = op_s
        self._current = [self.compute]

    def stream(self, *, is_urgent: bool) -> FakeStream:
        self.streams.append(FakeStream("urgent" if is_urgent else "other"))
        return self.streams[-1]

    def event(self, *, is_external: bool = False) -> FakeEvent:
        return FakeEvent(self, is_external)

    def timed_event(self, *, is_external: bool = False) -> FakeEvent:
        return FakeEvent(self, is_external)

    def current(self) -> FakeStream:
        return self._current[-1]

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        self._current.append(stream)
        yield
        self._current.pop()

    def queue(self, op: Callable[[], None]) -> None:
        self.current().ops.append(op)

    def step(self) -> bool:
        """Run one piece of some stream; False if nothing can run."""
        able = [stream for stream in self.streams if stream.can_run]
        if able:
            self.now += self._op_s
            self.random.choice(able).run(self.now)
        return bool(able)

    def drain(self) -> None:
        while self.step():
            pass

    def sleep(self, seconds: float) -> None:
        """Time passes, and the device gets on."""
        self.now += seconds
        self.sleeps.append(seconds)
        self.step()
