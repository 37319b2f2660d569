"""The engine's end of live views: a socket that whoever connects to is sent frames.

    async with engine.live_view() as feed: ...  # then `interlace top` finds it

**Nobody waits.** While nobody is connected there is no event stream and no timer. A viewer that
does not read loses frames: whoever has bytes of the frame before left to take gets none. So at most
one frame is kept for each, and there are `MOST_VIEWERS` at most.

**Who may look.** The socket lies in a folder that only its user may enter, and each peer's uid is
asked for. Viewers are sent to, and have nothing to say: one that does is sent away.

Everything runs on the event loop's thread, but for what touches files.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, cast

from interlace.engine import live_socket
from interlace.engine.device_thread import finish_despite_cancel
from interlace.engine.errors import LiveViewError
from interlace.engine.events import EventStream
from interlace.engine.live_frame import EngineFacts, frame_of, to_line
from interlace.engine.live_rates import RateMeter
from interlace.engine.ports import Clock
from interlace.engine.snapshot import EngineSnapshot

logger = logging.getLogger(__name__)

FRAME_S = 0.2
TICKS_OF_FRAME = 4
"""Between two frames the loop is asked so often whether it is late, and events are counted."""
MOST_VIEWERS = 8
MOST_EVENTS = 16_384
"""That wait to be counted, of a twentieth of a second."""


class Watched(Protocol):
    """The part of `AsyncEngine` that frames are made of."""

    def snapshot(self) -> EngineSnapshot:
        """The engine as it is now."""
        ...

    def events(self, max_pending: int = ...) -> EventStream:
        """What happens from now on."""
        ...


class LiveFeed:
    """See the module's docstring. An async context manager, entered once."""

    def __init__(
        self,
        engine: Watched,
        facts: EngineFacts,
        clock: Clock,
        *,
        frame_s: float = FRAME_S,
        folders: Iterable[Path] | None = None,
        peer_uid: Callable[[socket.socket], int] = live_socket.peer_uid,
    ) -> None:
        """`frame_s` seconds lie between two frames. `folders`: where the socket may lie, in place
        of the usual places. `peer_uid` tells who has connected."""
        self._engine = engine
        self._facts = facts
        self._clock = clock
        self._frame_s = frame_s
        self._folders = None if folders is None else tuple(folders)
        self._peer_uid = peer_uid
        self._own_uid = os.getuid()
        self._viewers: set[_Viewer] = set()
        self._has_come = asyncio.Event()
        self._number = 0
        self._tasks = asyncio.TaskGroup()
        self._task: asyncio.Task[None] | None = None
        self._opened: tuple[socket.socket, live_socket.Place] | None = None
        self._server: asyncio.Server | None = None

    @property
    def name(self) -> str:
        """What `interlace top` calls the engine: the process, and which of its engines it is."""
        return self._place.name

    @property
    def path(self) -> Path:
        """Of the socket."""
        return self._place.path

    @property
    def num_viewers(self) -> int:
        """Who look right now."""
        return len(self._viewers)

    @property
    def _place(self) -> live_socket.Place:
        if self._opened is None:
            raise LiveViewError("the live view is not open; use it inside `async with`.")
        return self._opened[1]

    async def __aenter__(self) -> Self:
        """Listen. Raises: `LiveViewError`. Cancellation: nothing is left behind."""
        loop = asyncio.get_running_loop()
        opening = loop.run_in_executor(None, live_socket.listen, self._folders)
        try:
            self._opened = await finish_despite_cancel(opening)
        except asyncio.CancelledError:
            if not opening.cancelled() and opening.exception() is None:
                self._opened = opening.result()
                await self._close_socket()
            raise
        try:
            listener, _ = self._opened
            self._server = await loop.create_unix_server(self._make_viewer, sock=listener)
            await self._tasks.__aenter__()
        except BaseException:
            await self._close_socket()
            raise
        self._task = self._tasks.create_task(self._run(), name="interlace-live-view")
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Send everybody away, and remove the socket. Cancellation: that happens all the same."""
        assert self._task is not None
        self._task.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            await self._close_socket()

    async def _close_socket(self) -> None:
        assert self._opened is not None
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for viewer in list(self._viewers):
            viewer.leave()
        listener, place = self._opened
        closing = asyncio.get_running_loop().run_in_executor(
            None, live_socket.close, listener, place
        )
        await finish_despite_cancel(closing)

    # ---------------------------------------------------------------- viewers

    def _make_viewer(self) -> _Viewer:
        return _Viewer(self)

    def admit(self, viewer: _Viewer, transport: asyncio.Transport) -> bool:
        """For `_Viewer`: whether it may look."""
        try:
            uid = self._peer_uid(transport.get_extra_info("socket"))
        except OSError as error:
            logger.warning("nobody knows who has connected to the live view: %s", error)
            return False
        if uid != self._own_uid:
            logger.warning("uid %d has connected to the live view, and was sent away", uid)
            return False
        if len(self._viewers) >= MOST_VIEWERS:
            logger.warning("%d viewers look already: one more was sent away", MOST_VIEWERS)
            return False
        self._viewers.add(viewer)
        self._has_come.set()
        return True

    def discard(self, viewer: _Viewer) -> None:
        """For `_Viewer`: it looks no more."""
        self._viewers.discard(viewer)

    # ---------------------------------------------------------------- frames

    async def _run(self) -> None:
        while True:
            self._has_come.clear()
            if not self._viewers:
                await self._has_come.wait()
            try:
                await self._show()
            except Exception:  # whatever it is, nobody's request depends on it
                logger.exception("the live view failed; viewers were sent away")
                for viewer in list(self._viewers):
                    viewer.leave()
                self._viewers.clear()

    async def _show(self) -> None:
        """While anybody looks."""
        clock, tick_s = self._clock, self._frame_s / TICKS_OF_FRAME
        meter = RateMeter(clock.monotonic(), self._engine.snapshot().num_inflight_steps)
        with contextlib.closing(self._engine.events(MOST_EVENTS)) as events:
            num_ticks = 0
            while self._viewers:
                meter.follow(events.take_pending())
                if num_ticks % TICKS_OF_FRAME == 0:
                    self._send(meter, events.num_dropped)
                num_ticks += 1
                asked_s = clock.monotonic() + tick_s
                await asyncio.sleep(tick_s)
                now_s = clock.monotonic()
                meter.note_lag(now_s, now_s - asked_s)

    def _send(self, meter: RateMeter, num_lost_events: int) -> None:
        rates = meter.rates(self._clock.monotonic(), num_lost_events)
        frame = frame_of(self._number, self._facts, rates, self._engine.snapshot())
        self._number += 1
        line = to_line(frame)
        for viewer in list(self._viewers):
            viewer.send(line)

    def __repr__(self) -> str:
        where = "not open" if self._opened is None else self.path
        return f"<LiveFeed {where} viewers={len(self._viewers)}>"


class _Viewer(asyncio.Protocol):
    """One connection."""

    def __init__(self, feed: LiveFeed) -> None:
        self._feed = feed
        self._transport: asyncio.Transport | None = None
        self.num_lost = 0
        """Frames that it was too slow for."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Somebody has connected."""
        both_ways = cast("asyncio.Transport", transport)  # uvloop's is none by its class
        if self._feed.admit(self, both_ways):
            self._transport = both_ways
        else:
            both_ways.abort()

    def data_received(self, data: bytes) -> None:
        """Viewers have nothing to say."""
        self.leave()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        self._transport = None
        self._feed.discard(self)

    def send(self, line: bytes) -> None:
        """Unless it has not taken all of what it was sent before. Never waits."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if transport.get_write_buffer_size() > 0:
            self.num_lost += 1
            return
        transport.write(line)

    def leave(self) -> None:
        """Send it away at once, whatever it has not taken."""
        if self._transport is not None:
            self._transport.abort()


class Watchable(Protocol):
    """An engine that can be watched: the part of `AsyncEngine`."""

    def live_view(self) -> LiveFeed:
        """See `AsyncEngine`."""
        ...


@contextlib.asynccontextmanager
async def watchable(engine: Watchable) -> AsyncIterator[LiveFeed | None]:
    """`engine.live_view()`, for commands that work as well if there is no place for its socket:
    None then, and why is logged. Cancellation: the socket goes."""
    async with contextlib.AsyncExitStack() as stack:
        feed = None
        try:
            feed = await stack.enter_async_context(engine.live_view())
        except LiveViewError as error:
            logger.info("this engine cannot be watched: %s", error)
        yield feed
