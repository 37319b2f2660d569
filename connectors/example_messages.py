"""What the two sides of ExampleConnector tell each other. Plain frozen records."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from interlace.connectors.kv_folders.folders import Signature
from interlace.connectors.kv_folders.writer import EndedSave
from interlace.engine.kv_connector import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclasses.dataclass(frozen=True, slots=True)
class LoadPiece:
    """Consecutive blocks of one folder, and where they go."""

    folder: str
    """Empty if the blocks have gone since they were promised."""
    first: int
    """Position in the folder's run."""
    block_hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """All that one request loads."""

    request_id: str
    pieces: tuple[tuple[LoadPiece, ...], ...]
    """Of each rank, whose folders are its own; all ranks fill the same blocks."""
    is_async: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Save:
    """Copy these blocks in this step and write them aside."""

    save_id: int
    parent_hash: bytes
    block_hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    is_filled: bool
    """Earlier steps filled all of them: copy before this step's forward, if it has one."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExampleMetadata(KVConnectorMetadata):
    """One step's orders to the worker side."""

    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    publish: frozenset[int] = frozenset()
    """Saves of earlier steps that may become visible."""
    discard: frozenset[int] = frozenset()
    """Saves of earlier steps that must not."""
    release: frozenset[str] = frozenset()
    """Requests that were held until now, and whose last save has ended on all ranks: report them
    as sent."""


@dataclasses.dataclass(frozen=True, slots=True)
class LostFolder:
    """A folder that failed to load, reported once for each load that it failed."""

    folder: str
    signature: Signature
    """Of what was read: if it is still there, it is not to be tried again."""
    was_removed: bool
    """It was damaged; else it has gone, or could not be read or removed."""
    retry_s: float
    """After so many seconds it may be promised again, at once if it is another one."""


class CopiedSave(NamedTuple):
    """One worker has copied its part of a save."""

    save_id: int
    rank: int


@dataclasses.dataclass(frozen=True, slots=True)
class ExampleWorkerMetadata(KVConnectorWorkerMetadata):
    """What one worker, or several, report with a step. The scheduler side counts ranks."""

    copied: tuple[CopiedSave, ...] = ()
    """Saves whose blocks are in host memory since this step. On a GPU, copied in an earlier one."""
    ended: tuple[EndedSave, ...] = ()
    """Since the last report."""
    lost: tuple[LostFolder, ...] = ()
    loaded: tuple[int, ...] = ()
    """Ids of blocks that were filled; once for each worker."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> ExampleWorkerMetadata:
        """Both reports, one after the other: each part says of which rank it is."""
        assert isinstance(other, ExampleWorkerMetadata)
        return ExampleWorkerMetadata(
            copied=self.copied + other.copied,
            ended=self.ended + other.ended,
            lost=self.lost + other.lost,
            loaded=self.loaded + other.loaded,
        )
