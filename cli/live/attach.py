"""The viewer's end of the socket: the frames of one engine, the newest first. Blocking by choice.

No event loop: a viewer waits for its socket and its terminal at once, by `select`.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable
from typing import Self

from interlace.engine.errors import LiveViewError
from interlace.engine.live_frame import Frame, FrameReader
from interlace.engine.live_socket import Place, connect, peer_uid

_CHUNK_BYTES = 1 << 16
_MOST_CHUNKS = 64
LONGEST_LINE = 4 << 20
"""Bytes of one frame."""
FIRST_FRAME_S = 5.0
"""For which an engine may not answer: its loop is held up then."""


class Attached:
    """A connection to one engine. A context manager; closed by leaving it."""

    def __init__(self, place: Place, peer_uid: Callable[[socket.socket], int] = peer_uid) -> None:
        """Connect. Raises: `LiveViewError` if the engine has gone, or is another user's."""
        self.place = place
        self.num_lost = 0
        """Frames that were left out since this viewer was too slow."""
        self.is_gone = False
        self.newest_line = b""
        """Of the frame that was read last, without its end."""
        self._reader = FrameReader()
        self._buffer = b""
        self._number: int | None = None
        try:
            self._socket = connect(place.path)
        except OSError as error:
            raise LiveViewError(
                f"engine {place.name} cannot be watched ({error.strerror or error}): `interlace"
                " top --list` tells which ones can."
            ) from error
        uid = peer_uid(self._socket)
        if uid != os.getuid():
            self._socket.close()
            raise LiveViewError(
                f"{place.path} is listened at by another user (uid {uid}): remove it."
            )
        self._socket.settimeout(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def fileno(self) -> int:
        """For `select`: readable when there is something for `receive`."""
        return self._socket.fileno()

    def receive(self) -> list[bytes]:
        """Whole lines that have come, without their ends; those of who sends without a pause later.
        Never waits; see `is_gone`.

        Raises: `LiveViewError` for a line that is too long.
        """
        for _ in range(_MOST_CHUNKS):
            if self.is_gone:
                break
            try:
                chunk = self._socket.recv(_CHUNK_BYTES)
            except BlockingIOError:
                break
            except OSError:  # reset, since it had more to say when it went
                chunk = b""
            self.is_gone = not chunk
            self._buffer += chunk
            if len(self._buffer) > LONGEST_LINE and b"\n" not in self._buffer:
                raise LiveViewError(f"{self.place.path} sends no frames: is it an engine's?")
        *lines, self._buffer = self._buffer.split(b"\n")
        return lines

    def newest(self) -> Frame | None:
        """The newest frame that has come; None if none has. Never waits.

        Raises: `LiveViewError` for frames that cannot be read.
        """
        lines = self.receive()
        if not lines:
            return None
        frame = self._reader.read(lines[-1])
        self.newest_line = lines[-1]
        if self._number is not None:
            self.num_lost += max(0, frame.number - self._number - len(lines))
        self._number = frame.number
        return frame

    def wait_for_frame(self, timeout_s: float = FIRST_FRAME_S) -> Frame:
        """The first frame.

        Raises: `LiveViewError` if none comes, or if it cannot be read.
        """
        while True:
            frame = self.newest()
            if frame is not None:
                return frame
            if self.is_gone:
                raise LiveViewError(
                    f"engine {self.place.name} sent nothing and has closed: it may have just ended,"
                    " or have as many viewers as it takes."
                )
            ready, _, _ = select.select([self], [], [], timeout_s)
            if not ready:
                raise LiveViewError(
                    f"engine {self.place.name} does not answer: its event loop is held up, or its"
                    " process is stopped. Try again."
                )
