"""ExampleConnector's worker side, loading across steps: one request after another, each of them
read wholly into host memory and then copied into the pages between two forwards.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import NamedTuple

from interlace.connectors.example_pieces import LayerRows, LoadReports, Piece
from interlace.connectors.kv_folders.pages import LayerPages
from interlace.connectors.kv_folders.reading import Reader, Reading
from interlace.engine.ports import Lanes


class _Current(NamedTuple):
    """The request whose turn it is."""

    request_id: str
    pieces: list[Piece]
    reading: Reading[list[LayerRows]] | None
    """None if too many reads hang: this one fails at once."""


class BackgroundLoads:
    """Loads of requests that wait for them. Device thread."""

    def __init__(self, reports: LoadReports, lanes: Lanes, *, deadline_s: float) -> None:
        """Takes a lane, which does nothing before the first load."""
        self._reports = reports
        self._layers: dict[str, LayerPages] = {}
        self._reader = Reader(lanes, "load", deadline_s=deadline_s)
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
        layers = self._layers

        def read(beat: Callable[[], None]) -> list[LayerRows]:
            found: list[LayerRows] = [[] for _ in layers]
            for index, rows in enumerate(found):
                for piece in pieces:
                    rows.append(piece.read(index, layers))
                    beat()
            return found

        self._current = _Current(request_id, pieces, self._reader.ask(read))

    def take_received(self) -> set[str]:
        """Put requests whose reading has ended into the pages; their ids. Does not wait."""
        received = set()
        while (current := self._current) is not None:
            reading = current.reading
            is_done = reading is not None and reading.is_done
            if reading is not None and not is_done and not self._reader.hangs:
                break
            self._fill(current.pieces, reading.take_result() if reading and is_done else None)
            self._reports.take_stock(current.pieces, self._layers)
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
        """End the lane; does not wait for a read that hangs."""
        self._reader.close()
