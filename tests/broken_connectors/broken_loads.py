"""Connectors whose loads come too late, too early, or to the wrong place."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from memory_broken import Broken
from memory_connector import MemoryConnector
from memory_messages import LoadBlock
from memory_worker import Load

from interlace.engine.ports import Lane
from interlace.engine.request import Request

if TYPE_CHECKING:
    from interlace.layers.forward_context import ForwardContext


class WaitsForNothing(MemoryConnector):
    """`wait_for_layer_load` returns at once: a layer attends to what is not there yet."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All is queued, so it will come in time, it thinks."""


class ForgetsOneLayer(MemoryConnector):
    """Waits for the layer before the one that is asked for, and so for the last one never."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        index = self._layer_index(layer_name)
        if index < len(self._pages) - 1:
            super().wait_for_layer_load(layer_name)


class LoadsAllButOneLayer(MemoryConnector):
    """Leaves out a layer, as one does that counts layers from 1."""

    def load_block(self, layer_name: str, key: bytes, block_id: int) -> None:
        if self._layer_index(layer_name) > 0:
            super().load_block(layer_name, key, block_id)


class ReportsWhenQueued(MemoryConnector):
    """Reports an asynchronous load when its copies are queued, not when they have ended."""

    def is_loaded(self, load: Load) -> bool:
        return True


class ReportsAtTheFirstLayer(MemoryConnector):
    """Asks the gate of the first layer whether an asynchronous load has ended."""

    def is_loaded(self, load: Load) -> bool:
        return load.gates[0].query()


class FillsFromTheFirstBlock(MemoryConnector):
    """Puts what it loads into the request's first blocks, as if nothing were cached here: it
    overwrites blocks that others share, and leaves its targets empty."""

    def blocks_to_load(
        self, request: Request, block_ids: list[int], start: int, end: int
    ) -> Iterator[LoadBlock]:
        blocks = super().blocks_to_load(request, block_ids, start, end)
        for (key, _), block_id in zip(blocks, block_ids, strict=False):
            yield LoadBlock(key, block_id)


class LoadsTheCachedPrefixAgain(MemoryConnector):
    """Counts blocks from the first, not from where its promise began: what is cached here is filled
    with the same once more, and what was promised is not."""

    def blocks_to_load(
        self, request: Request, block_ids: list[int], start: int, end: int
    ) -> Iterator[LoadBlock]:
        yield from super().blocks_to_load(request, block_ids, 0, end - start)


class ClearsAllBlocksFirst(MemoryConnector):
    """Zeroes every block of the request before it loads, those of the cached prefix too."""

    def blocks_to_load(
        self, request: Request, block_ids: list[int], start: int, end: int
    ) -> Iterator[LoadBlock]:
        for block_id in block_ids[: start // self._block_size]:
            yield LoadBlock(b"", block_id)
        yield from super().blocks_to_load(request, block_ids, start, end)

    def load_block(self, layer_name: str, key: bytes, block_id: int) -> None:
        self._pages[layer_name][block_id] = 0
        if key:
            super().load_block(layer_name, key, block_id)


class WritesAfterTheReport(MemoryConnector):
    """Brings a first version of each block, reports it, and brings it once more, from a replica
    that has not everything: by then the blocks may belong to others."""

    def take_received(self) -> set[str]:
        loads = list(self._background_loads)
        received = super().take_received()
        for load in loads:
            if load not in self._background_loads:
                self._load_lane.submit(functools.partial(self._bring_again, load))
        return received

    def _bring_again(self, load: Load) -> None:
        for pages in self._pages.values():
            for _, block_id in load.order.blocks:
                pages[block_id] = 0


class GoesOnAfterAbort(MemoryConnector):
    """Reports a load as ended when its request has ended, and lets its copies go on: they write
    into blocks that were handed on."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = super().get_finished(finished_req_ids)
        cut = [one for one in self._background_loads if one.order.req_id in finished_req_ids]
        self._background_loads = [one for one in self._background_loads if one not in cut]
        return sent, (received or set()) | {one.order.req_id for one in cut} or None


class WaitsForAsynchronousLoads(MemoryConnector):
    """Begins an asynchronous load, and waits for it there and then: every request stands still."""

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        for load in self._background_loads:
            for gate in load.gates:
                self.await_gate(gate)


class LoadsForTheFirstOnly(MemoryConnector):
    """Loads no block twice at the same time: who asks for one that is on its way to another
    request's blocks gets nothing into its own."""

    def blocks_to_load(
        self, request: Request, block_ids: list[int], start: int, end: int
    ) -> Iterator[LoadBlock]:
        coming = {block.key for load in self._loads for block in load.blocks}
        for block in super().blocks_to_load(request, block_ids, start, end):
            if block.key not in coming:
                yield block


class ServesTheQueueInOrder(MemoryConnector):
    """Gives each load a lane of its own, counts how many have ended, and takes them for the ones
    that began first."""

    def _begin_worker_side(self) -> None:
        super()._begin_worker_side()
        self._own_lanes: list[Lane] = []

    def _start_background_load(self, load: Load) -> None:
        lane = self.lanes.lane("load")
        self._own_lanes.append(lane)
        for layer_name in self._pages:
            self._queue_layer(lane, load, layer_name)

    def take_received(self) -> set[str]:
        num_ended = sum(self.is_loaded(load) for load in self._background_loads)
        ended = self._background_loads[:num_ended]
        del self._background_loads[:num_ended]
        for load in ended:
            self._settle(load)
        return {load.order.req_id for load in ended}

    def _end_worker_side(self) -> None:
        super()._end_worker_side()
        for lane in self._own_lanes:
            lane.close()


_ASYNC = {"load_async": True}

BROKEN = [
    Broken(WaitsForNothing, "layer-loads-complete", seen_in="tokens-hit"),
    Broken(ForgetsOneLayer, "layer-loads-complete", seen_in="tokens-hit"),
    Broken(LoadsAllButOneLayer, "layer-loads-complete", seen_in="tokens-hit"),
    Broken(ReportsWhenQueued, "loads-reported-when-done", _ASYNC, seen_in="tokens-hit"),
    Broken(ReportsAtTheFirstLayer, "loads-reported-when-done", _ASYNC, seen_in="tokens-hit"),
    Broken(FillsFromTheFirstBlock, "loads-write-only-their-blocks", seen_in="tokens-hit"),
    Broken(FillsFromTheFirstBlock, "loads-write-only-their-blocks", _ASYNC, seen_in="tokens-hit"),
    Broken(LoadsTheCachedPrefixAgain, "loads-write-only-their-blocks", seen_in="tokens-hit"),
    Broken(
        LoadsTheCachedPrefixAgain, "loads-write-only-their-blocks", _ASYNC, seen_in="tokens-hit"
    ),
    Broken(ClearsAllBlocksFirst, "loads-write-only-their-blocks", seen_in="tokens-hit"),
    Broken(WritesAfterTheReport, "loads-write-only-their-blocks", _ASYNC, seen_in="tokens-hit"),
    Broken(
        GoesOnAfterAbort, "loads-write-only-their-blocks", _ASYNC, seen_in="aborted-in-every-state"
    ),
    Broken(WaitsForAsynchronousLoads, "loads-do-not-hold-up-steps", _ASYNC, seen_in="tokens-hit"),
    Broken(LoadsForTheFirstOnly, "shared-prefix", _ASYNC),
    Broken(ServesTheQueueInOrder, "transfers-in-any-order", _ASYNC),
]
