"""Something that is awaited between the start and the stop of a profiler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from interlace.engine.device_thread import DeviceThread, finish_despite_cancel

P = TypeVar("P")
R = TypeVar("R")
T = TypeVar("T")


async def profiled_run(
    device: DeviceThread,
    start: Callable[[], P],
    run: Callable[[], Awaitable[T]],
    stop: Callable[[P], R],
) -> tuple[T, R]:
    """What `run` comes to, and what `stop` makes of what `start` made; both on the device thread.

    Loop thread, which other work may use meanwhile. Raises: what any of them raises; without a
    start nothing is run or stopped. Cancelling cancels `run`, and returns when `stop` has ended.
    """
    started = device.submit(start)
    try:
        await finish_despite_cancel(started)
        outcome = await run()
    finally:
        if started.exception() is None:
            profiler = started.result()
            found = await finish_despite_cancel(device.submit(lambda: stop(profiler)))
    return outcome, found
