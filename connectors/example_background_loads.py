"""ExampleConnector's worker side, loading across steps: one request after another, each of them
read wholly into host memory and then copied into the pages between two forwards.
"""

from __future__ import annotations

import collections
from typing import NamedTuple

from interlace.connectors.example_pieces import LayerRows, LoadReports, Piece
from interlace.connectors.kv_folders.pages import LayerPages
from interlace.connectors.kv_folders.reading import ReaderThread, Reading


class _Current(NamedTuple):
    """The request whose turn it is."""

    request_id: str
    pieces: list[Piece]
    reading: Reading[list[LayerRows]] | None
    """None if the reader thread still hung in an earlier request: this one fails at once."""


class BackgroundLoads:
    """Loads of requests that wait for them. Device thread."""

    def __init__(self, reports: LoadReports, *, deadline_s: float) -> None:
        """No thread before the first load."""
        self._reports = reports
        self._layers: dict[str, LayerPages] = {}
        self._reader = ReaderThread("interlace-kv-read-async", deadline_s=deadline_s)
        # Bounded by the engine's requests.
        self._waiting: collections.deque[tuple[str, list[Piece]]] = collections.deque()
        self._current: _Current | None = None

    def register(self, layers: dict[str, LayerPages]) -> None:
        """Layer name -> pages, in order of depth. Once."""
        self._layers = layers

    def start(self, request_id: str, pieces: list[Piece]) -> None:
        """Load a request when those before it have ended."""
        self._waiting.append((request_id, pieces))
        self._start_next()

    def _start_next(self) -> None:
        """Read the next waiting request, if none is being read."""
        if self._current is not None or not self._waiting:
            return
        request_id, pieces = self._waiting.popleft()
        layers, reader = self._layers, self._reader

        def read() -> list[LayerRows]:
            found: list[LayerRows] = [[] for _ in layers]
            for index, rows in enumerate(found):
                for piece in pieces:
                    rows.append(piece.read(index, layers))
                    reader.tick()
            return found

        reading = None if reader.is_busy else reader.ask(read)
        self._current = _Current(request_id, pieces, reading)

    def take_received(self) -> set[str]:
        """Put requests whose reading has ended into the pages; their ids. Does not wait."""
        received = set()
        while (current := self._current) is not None:
            reading = current.reading
            if reading is not None and not reading.is_done and not self._reader.hangs:
                break
            self._fill(current.pieces, None if reading is None else reading.result)
            self._reports.take_stock(current.pieces, len(self._layers))
            received.add(current.request_id)
            self._current = None
            self._start_next()
        return received

    def _fill(self, pieces: list[Piece], found: list[LayerRows] | None) -> None:
        """Without rows, of a read that hangs or raised, no piece is filled."""
        for pages, rows in zip(self._layers.values(), found or (), strict=found is not None):
            for piece, some in zip(pieces, rows, strict=True):
                piece.fill(pages, some)

    def close(self) -> None:
        """End the reader thread; does not wait for a read that hangs."""
        self._reader.close()
