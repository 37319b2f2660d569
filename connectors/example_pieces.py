"""ExampleConnector's worker side, loading: one piece on its way from its folder to the pages, and
what is reported of pieces.

A piece, consecutive blocks of one folder, loads wholly or not at all: whatever is wrong with any
layer of it, all of its blocks are reported as invalid.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from interlace.connectors.example_messages import LoadPiece, LostFolder
from interlace.connectors.kv_folders.counters import Tally
from interlace.connectors.kv_folders.folders import KVFolders, Signature
from interlace.connectors.kv_folders.manifest import Manifest
from interlace.connectors.kv_folders.pages import LayerPages
from interlace.connectors.kv_folders.tensor_file import ByteArray, DamagedFileError

logger = logging.getLogger(__name__)

RETRY_S = 60.0
"""A folder that could not be read, and may be whole, is promised again after so many seconds."""

_NO_SIGNATURE = Signature(0, 0)

LayerRows = list[ByteArray | None]
"""One layer: rows [blocks, bytes of a block] of each piece, None where the piece has failed."""


class _GoneError(Exception):
    """What was promised is no longer there. What has come in its place is left alone."""


class Piece:
    """One piece while it loads. `read` is for a lane, the rest for the device thread."""

    def __init__(self, piece: LoadPiece, folders: KVFolders, tally: Tally) -> None:
        """Does no I/O yet."""
        self.block_ids = piece.block_ids
        self.lost: LostFolder | None = None
        """Set with a failure that has to do with the folder."""
        self._has_failed = False
        self._num_filled = 0  # layers
        self._piece = piece
        self._end = piece.first + len(piece.block_ids)
        self._folders = folders
        self._tally = tally
        self._path = Path(piece.folder)
        self._signature = _NO_SIGNATURE
        self._manifest: Manifest | None = None

    def read(self, index: int, layers: Mapping[str, LayerPages]) -> ByteArray | None:
        """Rows of layer number `index`, or None if the piece has failed.

        Only what is really damaged is removed: all other errors may pass.
        """
        if self._has_failed:
            return None
        try:
            if self._manifest is None:
                self._manifest = self._open(layers)
            rows = self._folders.read_layer(self._path, self._manifest, index)
        except _GoneError:
            self._lose(retry_s=0.0)
        except DamagedFileError:
            self._lose_damaged()
        except Exception as error:  # noqa: BLE001 - whatever it is, the load fails
            logger.warning("Cannot load KV from %s: %r.", self._path, error)
            self._lose(retry_s=RETRY_S)
        else:
            return rows[self._piece.first : self._end]
        return None

    def _open(self, layers: Mapping[str, LayerPages]) -> Manifest:
        """The manifest, if it holds what we were promised, and as our pages lie."""
        if not self._piece.folder:
            raise _GoneError
        try:
            self._signature = self._folders.signature(self._path)
        except (FileNotFoundError, NotADirectoryError):
            raise _GoneError from None
        manifest = self._folders.manifest(self._path)
        hashes = manifest.block_hashes[self._piece.first : self._end]
        if manifest.identity != self._folders.identity or hashes != self._piece.block_hashes:
            raise _GoneError
        shapes = {pages.block_shape for pages in layers.values()}
        if manifest.layer_names != tuple(layers) or {manifest.block_shape} != shapes:
            raise DamagedFileError("other layers, or blocks of another shape")
        return manifest

    def _lose_damaged(self) -> None:
        was_removed = self._folders.remove(self._path, self._signature)
        self._tally.add(damaged_folders=was_removed)
        is_still_there = self._folders.is_still(self._path, self._signature)
        self._lose(retry_s=math.inf if is_still_there else 0.0, was_removed=was_removed)

    def _lose(self, *, retry_s: float, was_removed: bool = False) -> None:
        self._has_failed = True
        self.lost = LostFolder(self._piece.folder, self._signature, was_removed, retry_s)

    @property
    def has_failed(self) -> bool:
        """Whether it cannot be filled any more."""
        return self._has_failed

    def fill(self, pages: LayerPages, rows: ByteArray | None) -> None:
        """Copy one layer into its pages, or fail without rows. What has failed fills no more."""
        if rows is None:
            self._has_failed = True
        elif not self._has_failed:
            pages.write(self.block_ids, rows)
            self._num_filled += 1

    def is_filled(self, num_layers: int) -> bool:
        """Whether all of so many layers are in the pages."""
        return self._num_filled == num_layers and not self._has_failed


class LoadReports:
    """What loads have come to, gathered until it is reported. Device thread."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._invalid: set[int] = set()
        self._lost: list[LostFolder] = []
        self._loaded: list[int] = []

    def take_stock(self, pieces: Iterable[Piece], layers: Mapping[str, LayerPages]) -> None:
        """These pieces are over. One that lacks any layer has failed."""
        block_bytes = sum(pages.block_bytes for pages in layers.values())
        for piece in pieces:
            num_blocks = len(piece.block_ids)
            if piece.is_filled(len(layers)):
                self._loaded += piece.block_ids
                self._tally.add(blocks_loaded=num_blocks, bytes_loaded=num_blocks * block_bytes)
                continue
            self._tally.add(blocks_failed=num_blocks)
            self._invalid.update(piece.block_ids)
            if piece.lost is not None:
                self._lost.append(piece.lost)

    def take_invalid(self) -> set[int]:
        """Blocks that were promised and not filled, since the last call."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_lost(self) -> tuple[LostFolder, ...]:
        """Folders that failed, since the last call."""
        lost, self._lost = tuple(self._lost), []
        return lost

    def take_loaded(self) -> tuple[int, ...]:
        """Blocks that were filled, since the last call."""
        loaded, self._loaded = tuple(self._loaded), []
        return loaded
