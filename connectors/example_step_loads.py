"""ExampleConnector's worker side, loading within a step: layer by layer, one layer ahead.

A lane reads and checks files; the device thread copies what was read into the pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from interlace.connectors.example_pieces import LayerRows, LoadReports, Piece
from interlace.connectors.kv_folders.pages import LayerPages
from interlace.connectors.kv_folders.reading import Reader, Reading
from interlace.engine.ports import Lanes


class StepLoads:
    """The loads of one step after another. Device thread; repeated and missing calls do no harm."""

    def __init__(self, reports: LoadReports, lanes: Lanes, *, deadline_s: float) -> None:
        """Its lane is its own: a step must not wait behind a load across steps."""
        self._reports = reports
        self._layers: dict[str, LayerPages] = {}
        self._reader = Reader(lanes, "load", deadline_s=deadline_s)
        self._pieces: list[Piece] = []
        self._readings: dict[str, Reading[LayerRows] | None] = {}
        self._loaded_layers: set[str] = set()

    def register(self, layers: dict[str, LayerPages]) -> None:
        """Layer name -> pages, in order of depth. Once."""
        self._layers = layers

    def start(self, pieces: Iterable[Piece]) -> None:
        """Begin a step that loads these: read the first layer."""
        self._pieces += pieces
        if self._pieces:
            self._read_ahead(next(iter(self._layers)))

    def _read_ahead(self, layer_name: str) -> None:
        """Let the lane read one layer of all pieces, unless none of them can succeed."""
        if layer_name in self._readings or all(piece.has_failed for piece in self._pieces):
            return
        index = list(self._layers).index(layer_name)
        pieces, layers = self._pieces, self._layers

        def read(beat: Callable[[], None]) -> LayerRows:
            rows: LayerRows = []
            for piece in pieces:
                rows.append(piece.read(index, layers))
                beat()
            return rows

        self._readings[layer_name] = self._reader.ask(read)

    @property
    def has_layer_work(self) -> bool:
        """Whether this step loads anything."""
        return bool(self._pieces)

    def wait_for_layer(self, layer_name: str) -> None:
        """Fill the layer's pages. Reads the next layer meanwhile; a hang fails all pieces."""
        if not self._pieces or layer_name in self._loaded_layers:
            return
        self._loaded_layers.add(layer_name)
        self._read_ahead(layer_name)
        reading = self._readings.pop(layer_name, None)  # two layers in memory at most
        is_read = reading is not None and self._reader.wait(reading)
        names = list(self._layers)
        following = names.index(layer_name) + 1
        if is_read and following < len(names):
            self._read_ahead(names[following])
        rows = reading.take_result() if reading is not None and is_read else None
        for piece, some in zip(self._pieces, rows or [None] * len(self._pieces), strict=True):
            piece.fill(self._layers[layer_name], some)

    def finish(self) -> None:
        """The step is over: take stock of what it was to load."""
        self._reports.take_stock(self._pieces, self._layers)
        self._pieces = []  # a new list: a read that hangs still has the old one
        self._readings.clear()
        self._loaded_layers.clear()

    def close(self) -> None:
        """End the lane; does not wait for a read that hangs."""
        self._reader.close()
