"""The worker side of `MemoryConnector`: moves blocks between pages and store by two lanes.

Device thread, but for what is submitted to a lane. Work there copies with numpy.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from memory_messages import LoadOrder, MemoryMetadata, MemoryReport, MemoryStats, SaveOrder
from memory_store import FAULTS, Bytes, LostBlockError, MemoryStore, Record

from interlace.connectors.base import KVConnectorBase_V1
from interlace.engine.errors import ConnectorError, LaneFullError
from interlace.engine.kv_connector import KVConnectorMetadata
from interlace.engine.kv_events import MEDIUM_CPU, BlockRemoved, CountedKVEvents
from interlace.engine.ports import Gate, Lane

if TYPE_CHECKING:
    import torch

    from interlace.layers.forward_context import ForwardContext

DEADLINE_S = 30.0


@dataclasses.dataclass(slots=True, eq=False)
class Load:
    """A load that was begun."""

    order: LoadOrder
    gates: list[Gate] = dataclasses.field(default_factory=list)
    lost: set[int] = dataclasses.field(default_factory=set)
    """Ids of blocks of which some layer could not be loaded. Only the lane adds to it."""
    lost_keys: set[bytes] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(slots=True, eq=False)
class StepSaves:
    """The blocks that one step saves."""

    orders: tuple[SaveOrder, ...]
    copies: dict[str, list[Bytes]] = dataclasses.field(default_factory=dict)
    """Layer -> the blocks' bytes, in the order of `orders`. Only the lane adds to it."""
    gates: dict[str, Gate] = dataclasses.field(default_factory=dict)
    """Layer -> the end of its copying."""

    @property
    def is_over(self) -> bool:
        """Whether no copy is on its way any more."""
        return all(gate.query() for gate in self.gates.values())


class MemoryWorkerSide(KVConnectorBase_V1):
    """The methods of the role WORKER."""

    store: MemoryStore
    save_async: bool
    _stats: MemoryStats

    def _begin_worker_side(self) -> None:
        self._rank = self._vllm_config.parallel_config.rank
        self._pages: dict[str, Bytes] = {}
        """Layer -> [num_blocks, ..., bytes], a view on the engine's pages."""
        self._load_lane: Lane = self.lanes.lane("load")
        self._store_lane: Lane = self.lanes.lane("store")
        self._step_loads: list[Load] = []
        self._layer_gates: dict[str, Gate] = {}
        self._background_loads: list[Load] = []
        self._invalid: set[int] = set()
        self._lost_keys: list[bytes] = []
        self._step_saves: StepSaves | None = None
        self._saves: list[StepSaves] = []  # those of the step, and those on their way
        self._copied: dict[int, dict[int, Record | None]] = {}
        self._sending: set[str] = set()

    @property
    def _step(self) -> MemoryMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, MemoryMetadata)
        return metadata

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Remember the pages as bytes, whatever their type and layout."""
        import torch

        self._pages = {name: pages.view(torch.uint8).numpy() for name, pages in kv_caches.items()}

    def _layer_index(self, layer_name: str) -> int:
        return list(self._pages).index(layer_name)

    def await_gate(self, gate: Gate) -> None:
        """Wait until the lane has done it. Raises: `ConnectorError` if it hangs."""
        if not gate.wait(DEADLINE_S):
            raise ConnectorError(f"a lane of MemoryConnector hangs for {DEADLINE_S} s")

    # ---------------------------------------------------------------- loads

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Queue the step's loads: those within the step layer by layer."""
        self._start_saves()
        for order in self._step.loads:
            load = Load(order)
            if order.is_async:
                self._background_loads.append(load)
                self._start_background_load(load)
            else:
                self._step_loads.append(load)
        for layer_name in self._pages if self._step_loads else ():
            for load in self._step_loads:
                self._queue_layer(self._load_lane, load, layer_name)
            self._layer_gates[layer_name] = self._load_lane.record()

    def _start_background_load(self, load: Load) -> None:
        for layer_name in self._pages:
            self._queue_layer(self._load_lane, load, layer_name)

    def _queue_layer(self, lane: Lane, load: Load, layer_name: str) -> None:
        try:
            gate = lane.submit(functools.partial(self.load_layer, load, layer_name))
        except LaneFullError:
            self._lose(load)
        else:
            load.gates.append(gate)

    def _lose(self, load: Load) -> None:
        """Nothing of it can be trusted, and nothing of the store is known to be damaged."""
        load.lost.update(block.block_id for block in load.order.blocks)

    def load_layer(self, load: Load, layer_name: str) -> None:
        """Fill one layer of the load's blocks. On the lane."""
        for key, block_id in load.order.blocks:
            try:
                self.load_block(layer_name, key, block_id)
            except (LostBlockError, OSError):
                load.lost.add(block_id)
                load.lost_keys.add(key)

    def load_block(self, layer_name: str, key: bytes, block_id: int) -> None:
        """Fill one layer of one block. On the lane. Raises: `LostBlockError`, `OSError`."""
        record = self.store.get(key, self.store_rank())
        self._pages[layer_name][block_id] = record.read(self._layer_index(layer_name))

    def store_rank(self) -> int:
        """Whose records are this worker's."""
        return self._rank

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for the layer's gate, if the step loads anything."""
        gate = self._layer_gates.get(layer_name)
        if gate is not None:
            self.await_gate(gate)

    def _settle(self, load: Load) -> None:
        """The load has ended: take stock."""
        if any(gate.error is not None for gate in load.gates):
            self._lose(load)
        self._invalid |= self.blocks_to_report(load)
        self._lost_keys += sorted(load.lost_keys)
        self._stats.count(loaded=len(load.order.blocks) - len(load.lost), lost=len(load.lost))

    def blocks_to_report(self, load: Load) -> set[int]:
        """Blocks of a load that has ended that were not filled."""
        return load.lost

    def is_loaded(self, load: Load) -> bool:
        """Whether an asynchronous load has ended."""
        return all(gate.query() for gate in load.gates)

    def take_received(self) -> set[str]:
        """Requests whose asynchronous loads have ended since the last call."""
        ended = [load for load in self._background_loads if self.is_loaded(load)]
        self._background_loads = [load for load in self._background_loads if load not in ended]
        for load in ended:
            self._settle(load)
        return {load.order.req_id for load in ended}

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that the step's loads, and those that it reported as received, did not fill."""
        for load in self._step_loads:
            for gate in load.gates:
                self.await_gate(gate)
            self._settle(load)
        self._step_loads, self._layer_gates = [], {}
        invalid, self._invalid = self._invalid, set()
        return invalid

    # ---------------------------------------------------------------- saves

    def _start_saves(self) -> None:
        self._step_saves = None
        if self._step.saves:
            self._step_saves = StepSaves(self._step.saves)
            self._saves.append(self._step_saves)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Queue the copying of the layer's full blocks."""
        if self._step_saves is not None:
            self._queue_copy(self._step_saves, layer_name)

    def _queue_copy(self, saves: StepSaves, layer_name: str) -> None:
        work = functools.partial(self.copy_layer, saves, layer_name)
        try:
            saves.gates[layer_name] = self._store_lane.submit(work)
        except LaneFullError:
            saves.gates[layer_name] = self._store_lane.record()  # and there will be no copies

    def copy_layer(self, saves: StepSaves, layer_name: str) -> None:
        """Copy one layer of the blocks. On the lane."""
        pages = self._pages[layer_name]
        saves.copies[layer_name] = [pages[order.block_id].copy() for order in saves.orders]

    def wait_for_save(self) -> None:
        """Wait for the copies, unless they may go on; then `handle_preemptions` waits, and
        requests that end are held."""
        saves = self._step_saves
        if saves is None:
            return
        for layer_name in self._pages.keys() - saves.gates.keys():
            self._queue_copy(saves, layer_name)
        if not self.save_async:
            self.finish_copies([saves])

    def finish_copies(self, some: Iterable[StepSaves]) -> None:
        """Wait until these no longer read any page."""
        for saves in some:
            for gate in saves.gates.values():
                self.await_gate(gate)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Wait for copies of blocks that are handed on."""
        assert isinstance(kv_connector_metadata, MemoryMetadata)
        preempted = kv_connector_metadata.preempted
        self.finish_copies(
            saves
            for saves in self._saves
            if not preempted.isdisjoint(order.req_id for order in saves.orders)
        )

    def _settle_saves(self) -> None:
        """Take the copies that have ended since the last call."""
        over = [saves for saves in self._saves if saves.is_over]
        self._saves = [saves for saves in self._saves if saves not in over]
        for saves in over:
            for place, order in enumerate(saves.orders):
                self._copied[order.save_id] = {self.store_rank(): self._record(saves, place)}
        self._stats.count(copied=sum(len(saves.orders) for saves in over))

    def _record(self, saves: StepSaves, place: int) -> Record | None:
        if saves.copies.keys() != self._pages.keys():
            return None
        return Record.of(tuple(saves.copies[layer_name][place] for layer_name in self._pages))

    def take_sent(self) -> set[str]:
        """Held requests none of whose saves goes on, once."""
        going_on = {order.req_id for saves in self._saves for order in saves.orders}
        sent = self._sending - going_on
        self._sending -= sent
        return sent

    # ---------------------------------------------------------------- reports

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Each id once: held requests without open saves, and loads that have ended."""
        assert self._step.held <= finished_req_ids
        self._sending |= self._step.held
        self._settle_saves()
        return self.take_sent() or None, self.take_received() or None

    def get_kv_connector_kv_cache_events(self) -> CountedKVEvents | None:
        """Blocks that turned out to be damaged."""
        lost, self._lost_keys = self._lost_keys, []
        return CountedKVEvents([BlockRemoved([key], MEDIUM_CPU) for key in lost]) if lost else None

    def build_connector_worker_meta(self) -> MemoryReport | None:
        """Copies that have ended."""
        copied, self._copied = self._copied, {}
        return MemoryReport(copied) if copied else None

    def inject_store_fault(self, kind: str, block_hash: bytes) -> Iterable[bytes]:
        """Damage this rank's record of the block."""
        assert kind in FAULTS
        return [block_hash] if self.store.damage(kind, block_hash, self.store_rank()) else []

    def _end_worker_side(self) -> None:
        self._load_lane.close(DEADLINE_S)
        self._store_lane.close(DEADLINE_S)

    def what_is_left_of_worker_side(self) -> list[object]:
        """Whatever is under way or remembered of any request."""
        maps = (self._step_loads, self._layer_gates, self._background_loads, self._invalid)
        more = (self._saves, self._copied, self._sending, self._lost_keys)
        return [some for some in (*maps, *more) if some]
