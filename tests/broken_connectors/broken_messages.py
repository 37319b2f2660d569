"""Connectors that mistreat what passes between scheduler and worker in each step."""

from __future__ import annotations

import dataclasses

from memory_broken import Broken
from memory_connector import MemoryConnector
from memory_messages import LoadOrder, MemoryMetadata, SaveOrder
from memory_store import Record

from interlace.engine.scheduler_output import SchedulerOutput


class MutatesTheOutput(MemoryConnector):
    """Takes the loaded blocks off the list of a new request's blocks, to look at the others only.

    That list is the runner's block table too.
    """

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MemoryMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        loaded = {block.block_id for load in metadata.loads for block in load.blocks}
        for new in scheduler_output.scheduled_new_reqs:
            (table,) = new.block_ids
            table[:] = [block_id for block_id in table if block_id not in loaded]
        return metadata


class NeverResetsThePlan(MemoryConnector):
    """Orders the loads of a step again in each step that follows, when others own the blocks."""

    def take_loads(self) -> tuple[LoadOrder, ...]:
        return tuple(self._loads)


class RepeatsSaves(MemoryConnector):
    """Keeps the saves of a step until one with others comes: the blocks are copied again, and put
    under their old keys, when they may hold something else."""

    _last_saves: tuple[SaveOrder, ...] = ()

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MemoryMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        self._last_saves = metadata.saves or self._last_saves
        return dataclasses.replace(metadata, saves=self._last_saves)

    def _take_copies(self, save_id: int, copies: dict[int, Record | None]) -> None:
        if save_id in self._open_saves:
            super()._take_copies(save_id, copies)
            return
        records = {rank: record for rank, record in copies.items() if record is not None}
        for order in self._last_saves:
            if order.save_id == save_id:
                self.store.put(order.key, records)


class KeepsMetadata(MemoryConnector):
    """Overrides `clear_connector_metadata` and does not call super: what is bound outlives the
    step, and the layer hooks of a run without a connector would still act on it."""

    def clear_connector_metadata(self) -> None:
        """Nothing to do, it thinks."""


class SendsNoMetadata(MemoryConnector):
    """Has nothing to say in a step without loads and saves, and returns None."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MemoryMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        return metadata if metadata.loads or metadata.saves else None  # type: ignore[return-value]


class SaysIdleTooSoon(MemoryConnector):
    """Thinks that its worker side has nothing to do where it is told nothing new, although copies
    are on their way."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MemoryMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        is_idle = metadata == MemoryMetadata()
        return dataclasses.replace(metadata, is_idle=is_idle)


class IsAlwaysIdle(MemoryConnector):
    """Spares its worker side all hooks, in steps that load too."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MemoryMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        return dataclasses.replace(metadata, is_idle=True)


BROKEN = [
    Broken(MutatesTheOutput, "output-not-mutated", seen_in="tokens-hit"),
    Broken(NeverResetsThePlan, "plan-reset"),
    Broken(RepeatsSaves, "saves-fenced"),
    Broken(KeepsMetadata, "metadata-cleared", seen_in="tokens-cold"),
    Broken(SendsNoMetadata, "answers-lawful", seen_in="tokens-cold"),
    Broken(SaysIdleTooSoon, "idle-at-the-end", seen_in="shared-prefix"),
    Broken(IsAlwaysIdle, "promises-kept", seen_in="tokens-hit"),
]
