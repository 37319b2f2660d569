"""The one crossing from the event loop to the device thread, and waits that never abandon it.

asyncio's own executors return to a cancelled caller while the function still runs. Here, whoever
waits for device work waits for its end, and is told of the cancellation afterwards.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def finish_despite_cancel(
    future: asyncio.Future[T], on_cancel: Callable[[], None] | None = None
) -> T:
    """Await `future` to its end.

    Cancellation: `on_cancel` may ask the work to end sooner; the wait goes on until the future is
    done, then `CancelledError` is raised (the future's own outcome is dropped). Loop thread.
    """
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError as error:
            if future.cancelled():
                raise
            cancelled = error
            if on_cancel is not None:
                on_cancel()
        except BaseException:
            if not future.done():  # not its outcome: the loop is gone, and this coroutine with it
                raise
    if cancelled is not None:
        future.exception()  # mark as retrieved
        raise cancelled
    return future.result()


def with_ordinary_errors(function: Callable[[], T]) -> T:
    """Call `function` in a thread whose outcome an asyncio future carries. Any thread.

    Raises: what it raises. `RuntimeError` in place of an error that such a future would lose
    (`StopIteration`: whoever waits would wait for ever), would turn into a cancellation, or that
    would end the event loop.
    """
    try:
        return function()
    except (StopIteration, concurrent.futures.CancelledError) as error:
        raise RuntimeError(f"{type(error).__name__} was raised: {error}") from error
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__} was raised: {error}") from error


class DeviceThread:
    """One thread that runs what it is given in order: the only one that computes on the device.

    On a CPU "only" is worth a factor of 1.6 in decoding: each thread that runs a parallel torch
    operation gets OpenMP helpers of its own, and as soon as a process has more of them than
    cores, all stop spinning and sleep between operations. Whoever makes it closes it.
    """

    def __init__(self, name: str = "interlace-device") -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._num_open = 0  # calls that have not ended

    @property
    def is_wanted(self) -> bool:
        """Whether further calls wait for the one that runs, be they another engine's. That one
        asks, if it may end sooner."""
        return self._num_open > 1

    def submit(
        self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        """Queue one call behind all earlier ones. Loop thread.

        Cancelling the returned future does not stop the call; await it through
        `finish_despite_cancel`. The call's errors arrive through `with_ordinary_errors`.
        """
        call = functools.partial(function, *args, **kwargs)
        return asyncio.wrap_future(self._submit(call))

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run one call behind all earlier ones and wait for it. Any thread but a loop's."""
        call = functools.partial(function, *args, **kwargs)
        return self._submit(call).result()

    def _submit(self, call: Callable[[], T]) -> concurrent.futures.Future[T]:
        future = self._executor.submit(with_ordinary_errors, call)
        with self._lock:
            self._num_open += 1
        future.add_done_callback(self._note_ended)
        return future

    def _note_ended(self, _: concurrent.futures.Future[T]) -> None:
        with self._lock:
            self._num_open -= 1

    def close(self) -> None:
        """End the thread once it is idle; the caller has awaited all its work."""
        self._executor.shutdown(wait=False)
