"""Calls that may block for ever (a terminal, a pipe), kept off the event loop.

Knows nothing of what is read or written.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class BlockingThread:
    """One daemon thread that makes blocking calls one at a time, in the order of asking.

    A daemon: a read that never returns must not keep the process alive, as asyncio's own executor
    would.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._started = False
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    async def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the thread and return or raise what it does.

        Cancellation: the call itself goes on, its result is dropped.
        """
        return await self.submit(function)

    def submit(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Let `function` run on the thread; what becomes of it. The loop's thread."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self.post(lambda: _answer(loop, future, function))
        return future

    def post(self, function: Callable[[], None]) -> None:
        """Let `function`, which raises nothing, run on the thread. Any thread."""
        self._calls.put(function)
        with self._lock:
            is_first, self._started = not self._started, True
        if is_first:
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()

    def _serve(self) -> None:
        while True:
            self._calls.get()()


def _answer(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[T], function: Callable[[], T]
) -> None:
    """Call `function` on this thread, then hand the outcome to the loop's thread."""
    result: T | None = None
    error: BaseException | None = None
    try:
        result = function()
    except BaseException as e:  # noqa: BLE001 - whatever it is, the caller gets it
        error = e

    def settle() -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    try:
        loop.call_soon_threadsafe(settle)
    except RuntimeError:  # the loop has ended meanwhile, and the caller with it
        return
