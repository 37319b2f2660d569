"""ExampleConnector's worker side, loading: files are read and checked on a reader thread, and
copied into the pages on the device thread.

A piece, consecutive blocks of one folder, loads wholly or not at all: whatever is wrong with any
layer of it, all of its blocks are reported as invalid.
"""

from __future__ import annotations

import collections
import errno
from collections.abc import Iterable, Mapping
from pathlib import Path

from interlace.connectors.example_messages import Load, LoadPiece, LostFolder
from interlace.connectors.kv_folders.counters import Tally
from interlace.connectors.kv_folders.folders import KVFolders, Signature
from interlace.connectors.kv_folders.manifest import Manifest
from interlace.connectors.kv_folders.pages import LayerPages
from interlace.connectors.kv_folders.reading import ReaderThread, Reading
from interlace.connectors.kv_folders.tensor_file import ByteArray, DamagedFileError

_OUR_OWN_FAULT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR)
"""A folder that cannot be read for these reasons is not damaged."""

_NO_SIGNATURE = Signature(0, 0)

LayerRows = list[ByteArray | None]
"""One layer: rows [blocks, bytes of a block] of each piece, None where the piece has failed."""


class _GoneError(Exception):
    """What was promised is no longer there. What has come in its place is left alone."""


class _Piece:
    """One piece while it loads. `read` is for the reader thread, the rest for the device's."""

    def __init__(self, piece: LoadPiece, folders: KVFolders, tally: Tally) -> None:
        self.block_ids = piece.block_ids
        self.has_failed = False
        self.num_layers_done = 0
        self.lost: LostFolder | None = None
        self._piece = piece
        self._end = piece.first + len(piece.block_ids)
        self._folders = folders
        self._tally = tally
        self._path = Path(piece.folder)
        self._signature = _NO_SIGNATURE
        self._manifest: Manifest | None = None

    def read(self, index: int, layers: Mapping[str, LayerPages]) -> ByteArray | None:
        """Rows of layer number `index`, or None if the piece has failed."""
        if self.has_failed:
            return None
        try:
            if self._manifest is None:
                self._manifest = self._open(layers)
            rows = self._folders.read_layer(self._path, self._manifest, index)
        except _GoneError:
            self._lose(is_damaged=False)
            return None
        except DamagedFileError:
            self._lose(is_damaged=True)
            return None
        except OSError as error:
            self._lose(is_damaged=error.errno not in _OUR_OWN_FAULT)
            return None
        return rows[self._piece.first : self._end]

    def _open(self, layers: Mapping[str, LayerPages]) -> Manifest:
        """The manifest, if it holds what we were promised, and as our pages lie."""
        if not self._piece.folder:
            raise _GoneError
        try:
            self._signature = self._folders.signature(self._path)
        except FileNotFoundError:
            raise _GoneError from None
        manifest = self._folders.manifest(self._path)
        hashes = manifest.block_hashes[self._piece.first : self._end]
        if manifest.identity != self._folders.identity or hashes != self._piece.block_hashes:
            raise _GoneError
        shapes = {pages.block_shape for pages in layers.values()}
        if manifest.layer_names != tuple(layers) or {manifest.block_shape} != shapes:
            raise DamagedFileError("other layers, or blocks of another shape")
        return manifest

    def _lose(self, *, is_damaged: bool) -> None:
        self.has_failed = True
        was_removed = is_damaged and self._folders.remove(self._path, self._signature)
        self._tally.add(damaged_folders=was_removed)
        self.lost = LostFolder(self._piece.folder, self._signature, was_removed)


class WorkerLoads:
    """All methods are for the device thread; repeated and missing calls do no harm."""

    def __init__(self, folders: KVFolders, tally: Tally, *, deadline_s: float) -> None:
        """Starts two reader threads: a step must not wait behind an asynchronous load."""
        self._folders = folders
        self._tally = tally
        self._layers: dict[str, LayerPages] = {}
        self._sync_reader = ReaderThread("interlace-kv-read-step", deadline_s=deadline_s)
        self._async_reader = ReaderThread("interlace-kv-read-async", deadline_s=deadline_s)
        # Of this step: what it loads, layer by layer.
        self._pieces: list[_Piece] = []
        self._readings: dict[str, Reading[LayerRows]] = {}
        self._loaded_layers: set[str] = set()
        # Across steps: one request is read at a time, all of it into host memory.
        self._waiting: collections.deque[Load] = collections.deque()
        self._current: tuple[Load, list[_Piece], Reading[list[LayerRows]] | None] | None = None
        # To be reported.
        self._invalid: set[int] = set()
        self._lost: list[LostFolder] = []
        self._num_loaded = 0

    def register(self, layers: dict[str, LayerPages]) -> None:
        """Layer name -> pages, in order of depth. Once."""
        self._layers = layers

    def start(self, loads: Iterable[Load]) -> None:
        """Begin a step's loads: read the first layer, or the first request."""
        for load in loads:
            if load.is_async:
                self._waiting.append(load)
            else:
                self._pieces += self._open(load)
        if self._pieces:
            self._read_ahead(next(iter(self._layers)))
        self._start_next()

    def _open(self, load: Load) -> list[_Piece]:
        return [_Piece(piece, self._folders, self._tally) for piece in load.pieces]

    # ---------------------------------------------------------------- within a step

    def _read_ahead(self, layer_name: str) -> None:
        """Let the reader thread read one layer of all pieces, unless it hangs."""
        if layer_name in self._readings or self._sync_reader.hangs:
            return
        index = list(self._layers).index(layer_name)
        pieces, layers, reader = self._pieces, self._layers, self._sync_reader

        def read() -> LayerRows:
            rows: LayerRows = []
            for piece in pieces:
                rows.append(piece.read(index, layers))
                reader.tick()
            return rows

        self._readings[layer_name] = self._sync_reader.ask(read)

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
        is_read = reading is not None and self._sync_reader.wait(reading)
        names = list(self._layers)
        following = names.index(layer_name) + 1
        if is_read and following < len(names):
            self._read_ahead(names[following])
        rows = reading.result if reading is not None and is_read else None
        self._fill(layer_name, self._pieces, rows or [None] * len(self._pieces))

    def _fill(self, layer_name: str, pieces: list[_Piece], rows: LayerRows) -> None:
        """Copy one layer into the pages. A piece that has failed stays as it is from then on."""
        for piece, some in zip(pieces, rows, strict=True):
            if some is None:
                piece.has_failed = True
            elif not piece.has_failed:
                self._layers[layer_name].write(piece.block_ids, some)
                piece.num_layers_done += 1

    def _finish_step(self) -> None:
        """Take stock of what the step was to load."""
        self._take_stock(self._pieces)
        self._pieces = []  # a new list: a read that hangs still has the old one
        self._readings.clear()
        self._loaded_layers.clear()

    def _take_stock(self, pieces: list[_Piece]) -> None:
        for piece in pieces:
            if piece.num_layers_done < len(self._layers) or piece.has_failed:
                self._invalid.update(piece.block_ids)
                if piece.lost is not None:
                    self._lost.append(piece.lost)
            else:
                self._num_loaded += len(piece.block_ids)
                self._tally.add(blocks_loaded=len(piece.block_ids))

    # ---------------------------------------------------------------- across steps

    def _start_next(self) -> None:
        """Read the next waiting request, if none is being read. None for its reading: it fails
        at once, since the thread still hangs in an earlier one."""
        if self._current is not None or not self._waiting:
            return
        load = self._waiting.popleft()
        pieces, layers, reader = self._open(load), self._layers, self._async_reader

        def read() -> list[LayerRows]:
            found: list[LayerRows] = [[] for _ in layers]
            for index, rows in enumerate(found):
                for piece in pieces:
                    rows.append(piece.read(index, layers))
                    reader.tick()
            return found

        self._current = load, pieces, None if reader.is_busy else reader.ask(read)

    def take_received(self) -> set[str]:
        """Put requests whose reading has ended into the pages; their ids. Does not wait."""
        received = set()
        while self._current is not None:
            load, pieces, reading = self._current
            if reading is not None and not reading.is_done and not self._async_reader.hangs:
                break
            found = reading.result if reading is not None else None
            if found is not None:
                for name, rows in zip(self._layers, found, strict=True):
                    self._fill(name, pieces, rows)
            self._take_stock(pieces)
            received.add(load.request_id)
            self._current = None
            self._start_next()
        return received

    # ---------------------------------------------------------------- reports

    def take_invalid(self) -> set[int]:
        """Blocks that were promised and not filled, since the last call."""
        self._finish_step()
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_lost(self) -> tuple[LostFolder, ...]:
        """Folders that failed, since the last call."""
        lost, self._lost = tuple(self._lost), []
        return lost

    def take_num_loaded(self) -> int:
        """Blocks that were filled, since the last call."""
        num_loaded, self._num_loaded = self._num_loaded, 0
        return num_loaded

    def close(self) -> None:
        """End the reader threads; does not wait for a read that hangs."""
        self._sync_reader.close()
        self._async_reader.close()
