"""What passes between the two sides of a `ScriptedConnector`: loads and saves there, copies back.

Plain frozen records. Host pages travel in them, so the sides share no store.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from interlace.connectors.conformance.script import Pages
from interlace.engine.block_hash import BlockHash
from interlace.engine.kv_connector import KVConnectorMetadata, KVConnectorWorkerMetadata


class LoadBlock(NamedTuple):
    """One block to fill."""

    block_id: int
    pages: Pages | None
    """None: paint it, and report it."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoadJob:
    """One load of one request."""

    req_id: str
    is_async: bool
    blocks: tuple[LoadBlock, ...]

    @property
    def failing_block_ids(self) -> list[int]:
        """Those that will not be filled, in order of position."""
        return [block.block_id for block in self.blocks if block.pages is None]


@dataclasses.dataclass(frozen=True, slots=True)
class ScriptedMetadata(KVConnectorMetadata):
    """One step."""

    step_id: int
    loads: tuple[LoadJob, ...]
    saves: dict[BlockHash, int]
    """Hash -> the block that holds it when the step ends."""
    held: frozenset[str]
    """Of the ended requests that the step tells of, those whose end of sending is awaited."""
    not_brought: dict[str, int]
    """Request id -> how many of the first blocks of its load from the back are computed instead."""
    lost_loads: frozenset[str]
    """Requests whose load ends with their preemption, without a report."""


@dataclasses.dataclass(frozen=True, slots=True)
class ScriptedWorkerMetadata(KVConnectorWorkerMetadata):
    """What the steps have copied. It may be stored when the step was applied."""

    copies: dict[int, dict[int, dict[BlockHash, Pages]]]
    """Step id -> rank -> hash -> that rank's host pages."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> ScriptedWorkerMetadata:
        """All ranks' copies."""
        assert isinstance(other, ScriptedWorkerMetadata)
        merged = dict(self.copies)
        for step_id, by_rank in other.copies.items():
            merged[step_id] = {**merged.get(step_id, {}), **by_rank}
        return ScriptedWorkerMetadata(merged)
