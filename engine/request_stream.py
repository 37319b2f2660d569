"""The caller's end of one request: an async iterator of deltas that cleans up after itself."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable
from typing import Self, final

from interlace.engine.errors import RequestError
from interlace.engine.mailbox import Mailbox
from interlace.engine.outputs import RequestOutput


def _abandon(loop: asyncio.AbstractEventLoop, abort: Callable[[], object]) -> None:
    # Runs wherever the garbage collector does, so it only asks the loop to act.
    with contextlib.suppress(RuntimeError):  # the loop is closed: nothing is left to abort
        loop.call_soon_threadsafe(abort)


@final
class RequestStream:
    """Deltas of one request, in order; the last one has a `finish_reason`.

    A reader that is slow gets fewer, larger deltas. Closing the stream, cancelling a pending
    `anext`, or dropping the stream aborts the request and frees all it held. One reader at a
    time, on the engine's loop.
    """

    def __init__(self, request_id: str, mailbox: Mailbox, abort: Callable[[], object]) -> None:
        self.request_id = request_id
        self._mailbox = mailbox
        self._abort = abort
        self._reading = False
        self._finalizer = weakref.finalize(self, _abandon, asyncio.get_running_loop(), abort)
        self._finalizer.atexit = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next delta, all pending ones merged.

        Raises: `StopAsyncIteration` after the last; `PromptError` at the first item if text
        turned out too long; `EngineDeadError` if the engine died; `RequestError` for a second
        reader. Cancellation: aborts the request.
        """
        if self._reading:
            raise RequestError(f"request {self.request_id} is being read by another task already.")
        self._reading = True
        try:
            output = await self._mailbox.get()
        except asyncio.CancelledError:
            self._close()
            raise
        finally:
            self._reading = False
        if output is None:
            self._finalizer.detach()
            raise StopAsyncIteration
        return output

    async def aclose(self) -> None:
        """Abort the request if it has not ended. Idempotent; never waits."""
        self._close()

    def _close(self) -> None:
        if self._finalizer.detach() is not None:
            self._abort()
