"""Connectors that save what they must not, or show it too early."""

from __future__ import annotations

from typing import Any

import numpy as np
from memory_broken import Broken
from memory_connector import MemoryConnector
from memory_messages import MemoryMetadata, MemoryReport
from memory_scheduler import OpenSave, Tracked
from memory_store import Record
from memory_worker import StepSaves

from interlace.connectors.step_tables import added_blocks
from interlace.engine.kv_connector import KVConnectorMetadata
from interlace.engine.request import Request
from interlace.engine.scheduler_output import SchedulerOutput


class SavesAfterPreemption(MemoryConnector):
    """Copies beside the steps, and lets copies of a preempted request's blocks go on: what the
    next owner computes there is filed under the key of the last one."""

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Preempted requests come back, it thinks."""


class LetsGoWhileSaving(MemoryConnector):
    """Copies beside the steps, and holds no request that ends meanwhile."""

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        super().request_finished(request, block_ids)
        self._held.discard(request.request_id)
        return False, None


class ShowsEachLayer(MemoryConnector):
    """Lists a block with its first layer, and fills in the others as they are copied: what is to
    be renamed into place at the end is written there from the start."""

    def copy_layer(self, saves: StepSaves, layer_name: str) -> None:
        super().copy_layer(saves, layer_name)
        for place, order in enumerate(saves.orders):
            layers = [
                saves.copies[name][place]
                if name in saves.copies
                else np.zeros_like(self._pages[name][order.block_id])
                for name in self._pages
            ]
            self.store.put(order.key, {self._rank: Record.of(tuple(layers))})


class ShowsWhenCopied(MemoryConnector):
    """Lists a block as soon as it is copied, before anyone has looked at the step's output: if KV
    beneath it did not come, what was computed on top of it is served."""

    def build_connector_worker_meta(self) -> MemoryReport | None:
        report = super().build_connector_worker_meta()
        saves = {order.save_id: order.key for order in self._step.saves}
        for save_id, records in report.copies.items() if report is not None else ():
            record = records[self._rank]
            if save_id in saves and record is not None:
                self.store.put(saves[save_id], {self._rank: record})
        return report


class TrustsBadGround(MemoryConnector):
    """Waits until the step was applied, but does not ask whether KV beneath a block was bad."""

    def distrust(self, invalid: set[int]) -> None:
        """The bad blocks themselves are known to the workers, it thinks."""


class CountsTokensItself(MemoryConnector):
    """Keeps a running count of each request's tokens and goes on counting after a preemption: it
    takes half-filled blocks for full ones."""

    _num_tokens: dict[str, int] | None = None

    def num_tokens_after(self, output: SchedulerOutput) -> dict[str, int]:
        counts = self._num_tokens = self._num_tokens or {}
        right = super().num_tokens_after(output)
        for req_id in right:
            start = right[req_id] - output.num_scheduled_tokens[req_id]
            counts[req_id] = counts.get(req_id, start) + output.num_scheduled_tokens[req_id]
        return {req_id: counts[req_id] for req_id in right}

    def full_blocks(self, tracked: Tracked, num_tokens: int) -> range:
        return super().full_blocks(
            tracked, min(num_tokens, len(tracked.block_ids) * self._block_size)
        )

    def forget(self, req_id: str) -> None:
        super().forget(req_id)
        (self._num_tokens or {}).pop(req_id, None)


class SavesThePromptAtOnce(MemoryConnector):
    """Saves all blocks of a prompt in the step in which it is new, also if that computes only the
    first chunk of it."""

    def full_blocks(self, tracked: Tracked, num_tokens: int) -> range:
        known = super().full_blocks(tracked, max(num_tokens, tracked.request.num_prompt_tokens))
        return range(min(known.stop, len(tracked.block_ids)))


class TakesNewBlocksForAll(MemoryConnector):
    """Takes the blocks that a step adds to a request for all that the request has, as they are
    after a preemption: later chunks are filed under the keys of earlier ones."""

    def _follow_tables(self, output: SchedulerOutput) -> None:
        for req_id, added, _ in added_blocks(output):
            if added:
                self._tracked[req_id].block_ids[:] = added

    def full_blocks(self, tracked: Tracked, num_tokens: int) -> range:
        full = super().full_blocks(tracked, num_tokens)
        return full[: len(tracked.block_ids)]


class CopiesAllButOneLayer(MemoryConnector):
    """Saves zeros for the last layer, as one does that counts layers wrongly."""

    def copy_layer(self, saves: StepSaves, layer_name: str) -> None:
        super().copy_layer(saves, layer_name)
        if self._layer_index(layer_name) == len(self._pages) - 1:
            copies = saves.copies[layer_name]
            saves.copies[layer_name] = [np.zeros_like(copy) for copy in copies]


class CompressesInPlace(MemoryConnector):
    """Rounds KV before it copies it, in the engine's own pages."""

    def copy_layer(self, saves: StepSaves, layer_name: str) -> None:
        for order in saves.orders:
            self._pages[layer_name][order.block_id][..., ::8] &= 0
        super().copy_layer(saves, layer_name)


class BlindToRanks(MemoryConnector):
    """Files every rank's share of a block under the same name: the last one to write wins."""

    def _begin_scheduler_side(self) -> None:
        super()._begin_scheduler_side()
        self._num_ranks = 1

    def store_rank(self) -> int:
        return 0


class ResetsNothing(MemoryConnector):
    """Says that it has forgotten everything, and goes on serving it."""

    def reset_cache(self) -> bool:
        return True


class PublishesAfterReset(MemoryConnector):
    """Lists blocks some steps after they were saved, and does not think of those on a reset: KV of
    the old weights comes back (B80)."""

    def _begin_scheduler_side(self) -> None:
        super()._begin_scheduler_side()
        self._later: list[tuple[int, OpenSave, dict[int, Record]]] = []

    def publish(self, save: OpenSave, records: dict[int, Record]) -> None:
        self._later.append((3, save, records))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MemoryMetadata:
        waiting, self._later = self._later, []
        for num_steps, save, records in waiting:
            if num_steps:
                self._later.append((num_steps - 1, save, records))
            else:
                super().publish(save, records)
        return super().build_connector_meta(scheduler_output)


_ASYNC = {"save_async": True}

BROKEN = [
    Broken(SavesAfterPreemption, "saves-fenced", _ASYNC),
    Broken(LetsGoWhileSaving, "saves-fenced", _ASYNC),
    Broken(ShowsEachLayer, "saves-visible-when-whole", _ASYNC),
    Broken(ShowsWhenCopied, "saves-visible-when-whole"),
    Broken(TrustsBadGround, "saves-visible-when-whole"),
    Broken(CountsTokensItself, "tokens-preempted"),
    Broken(SavesThePromptAtOnce, "saves-visible-when-whole"),
    Broken(TakesNewBlocksForAll, "tokens-chunked"),
    Broken(CopiesAllButOneLayer, "loaded-kv-right", seen_in="tokens-hit"),
    Broken(CompressesInPlace, "loads-write-only-their-blocks", seen_in="tokens-cold"),
    Broken(BlindToRanks, "workers-agree", workers=2, seen_in="tokens-hit"),
    Broken(ResetsNothing, "reset-forgets"),
    Broken(PublishesAfterReset, "reset-forgets"),
]
