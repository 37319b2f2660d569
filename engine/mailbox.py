"""Where the loop leaves a request's deltas until its caller takes them.

A slow reader's pending deltas are merged into one: nothing is dropped, the loop never waits, and
what is held is bounded by the answer itself. Loop thread only.
"""

from __future__ import annotations

import asyncio

from interlace.engine.outputs import RequestOutput, merge_outputs


class Mailbox:
    """Holds the deltas since the last `get`, and the error that ended everything, if one did."""

    def __init__(self) -> None:
        self._pending: list[RequestOutput] = []
        self._error: Exception | None = None
        self._wake = asyncio.Event()
        self.closed = False
        """Whether the last delta, or an error, was put in."""

    def put(self, output: RequestOutput) -> None:
        """Add a delta; ignored after the last one."""
        if not self.closed:
            self._pending.append(output)
            self.closed = output.finished
            self._wake.set()

    def fail(self, error: Exception) -> None:
        """End with an error in place of a last delta; ignored after the last one."""
        if not self.closed:
            self._error = error
            self.closed = True
            self._wake.set()

    async def get(self) -> RequestOutput | None:
        """All pending deltas as one; None after the last.

        Raises: the error given to `fail`, once the deltas before it were taken.
        Cancellation: nothing is lost.
        """
        while not self._pending:
            if self._error is not None:
                raise self._error
            if self.closed:
                return None
            self._wake.clear()
            await self._wake.wait()
        pending, self._pending = self._pending, []
        return merge_outputs(pending)
