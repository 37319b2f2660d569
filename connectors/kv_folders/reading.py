"""A daemon thread that reads, so that a read which hangs holds up nobody beyond a deadline.

Knows nothing of folders: it runs callables, one after another.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Reading(Generic[T]):
    """One callable on its way through the thread."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._done = threading.Event()
        self._result: T | None = None

    @property
    def is_done(self) -> bool:
        """Whether the callable has returned or raised."""
        return self._done.is_set()

    @property
    def result(self) -> T | None:
        """What it returned; None before, and if it raised."""
        return self._result

    def wait(self, timeout_s: float) -> bool:
        """Whether it is done after at most so long."""
        return self._done.wait(timeout_s)

    def run(self) -> None:
        """On the reader thread."""
        try:
            self._result = self._work()
        except Exception:
            logger.exception("Reading stored KV failed.")
        finally:
            self._done.set()


class ReaderThread:
    """Runs one callable at a time. All methods but `tick` are for one thread, the device thread."""

    def __init__(
        self, name: str, *, deadline_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Starts nothing: the thread begins with the first reading. `deadline_s` is the longest
        time without a `tick`."""
        self._deadline_s = deadline_s
        self._clock = clock
        self._ticked_at = clock()
        self._last: Reading[object] | None = None
        # Its users ask for a second reading ahead of the first at most, and for none if it hangs.
        self._queue: queue.SimpleQueue[Reading[object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._has_begun = False

    def ask(self, work: Callable[[], T]) -> Reading[T]:
        """Run `work` after what was asked for before."""
        if not self.is_busy:
            self.tick()
        if not self._has_begun:
            self._has_begun = True
            self._thread.start()
        reading = Reading(work)
        self._last = reading  # type: ignore[assignment]  # whatever the result's type
        self._queue.put(reading)  # type: ignore[arg-type]
        return reading

    def tick(self) -> None:
        """A part of the work is done; called by the work itself."""
        self._ticked_at = self._clock()

    @property
    def is_busy(self) -> bool:
        """Whether anything that was asked for is not done."""
        return self._last is not None and not self._last.is_done

    @property
    def hangs(self) -> bool:
        """Whether it is busy and has not ticked within the deadline."""
        return self.is_busy and self._clock() - self._ticked_at > self._deadline_s

    def wait(self, reading: Reading[T]) -> bool:
        """Whether `reading` is done; False as soon as the thread hangs."""
        while not reading.is_done:
            left = self._ticked_at + self._deadline_s - self._clock()
            if left < 0:
                return False
            reading.wait(left + 0.001)
        return True

    def close(self) -> None:
        """Let the thread end. Does not wait for it: it may hang."""
        self._queue.put(None)

    def _run(self) -> None:
        while (reading := self._queue.get()) is not None:
            self.tick()
            reading.run()
            self.tick()
