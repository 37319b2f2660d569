"""Stands for an engine that is watched: sends frames to whoever connects, on a thread."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from live_frames import busy

from interlace.engine.live_frame import Frame, to_line


class LiveServer:
    """`folder` is what XDG_RUNTIME_DIR is to be."""

    def __init__(self, folder: Path, name: str = "4711", frame: Frame | None = None) -> None:
        self.frame = frame or busy()
        self.line: bytes | None = None
        """Sent in place of frames."""
        own = folder / "interlace"
        own.mkdir(mode=0o700, exist_ok=True)
        self.path = own / f"{name}.sock"
        self._stop = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._listener.settimeout(0.05)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        viewers: list[socket.socket] = []
        number = 0
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                viewers.append(self._listener.accept()[0])
            frame = dataclasses.replace(self.frame, number=number)
            number += 1
            for viewer in list(viewers):
                try:
                    viewer.sendall(self.line or to_line(frame))
                except OSError:
                    viewers.remove(viewer)
                    viewer.close()
        for viewer in viewers:
            viewer.close()

    def close(self) -> None:
        """As an engine that dies: everybody is let go of, the socket stays. Idempotent."""
        self._stop.set()
        self._thread.join()
        self._listener.close()


@contextlib.contextmanager
def live_server(
    folder: Path, name: str = "4711", frame: Frame | None = None
) -> Iterator[LiveServer]:
    server = LiveServer(folder, name, frame)
    try:
        yield server
    finally:
        server.close()


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Of a viewer that is to find such servers."""
    root = Path(__file__).parents[2]
    # The last two would stand for the size of the terminal: who runs tests in processes sets them.
    left_out = ("NO_COLOR", "LC_ALL", "LC_CTYPE", "TMUX", "COLUMNS", "LINES")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    own = {
        "PYTHONPATH": str(root / "src"),
        "XDG_RUNTIME_DIR": str(folder),
        "TMPDIR": str(folder),
        "TERM": "xterm-256color",
        "LANG": "C.UTF-8",
    }
    return {**kept, **own, **more}
