"""ExampleConnector's worker side, saving: copies pages within the step, and hands them on.

Pages are only read while the step runs whose metadata names them, so a preemption has nothing to
wait for. On a GPU the copies are queued with the step, and arrive while later ones are launched: a
save is handed on, and reported as copied, with the first step that finds it in host memory. Device
thread; the writer's lane never sees the pages.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from interlace.connectors.example_messages import CopiedSave, ExampleMetadata, Save
from interlace.connectors.example_save_planner import max_run_blocks
from interlace.connectors.kv_folders.folders import Run
from interlace.connectors.kv_folders.pages import LayerPages
from interlace.connectors.kv_folders.staging import StagingPool
from interlace.connectors.kv_folders.tensor_file import ByteArray
from interlace.connectors.kv_folders.writer import EndedSave, FolderWriter
from interlace.engine.ports import Gate


@dataclasses.dataclass(slots=True)
class _Copy:
    """A save whose pages are being copied."""

    save: Save
    memory: ByteArray
    """From the staging pool."""
    rows: ByteArray
    """A view on it, [layers, blocks, bytes of a block]."""
    missing: set[str]
    """Layers that were not copied yet."""


class _Arriving(NamedTuple):
    """Copies that were queued together."""

    gate: Gate
    copies: Sequence[_Copy]

    def holds(self, save_id: int) -> bool:
        return any(copy.save.save_id == save_id for copy in self.copies)


class WorkerSaves:
    """Repeated and missing layer hooks do no harm."""

    def __init__(self, writer: FolderWriter, *, rank: int, queue_bytes: int) -> None:
        """`queue_bytes` is the writer's; it bounds a run here and in the planner alike."""
        self._writer = writer
        self._rank = rank
        self._queue_bytes = queue_bytes
        self._layers: dict[str, LayerPages] = {}
        self._indices: dict[str, int] = {}
        self._block_shape: tuple[int, ...] = ()
        self._block_bytes = 0  # of one layer
        self._copies: list[_Copy] = []
        self._arriving: collections.deque[_Arriving] = collections.deque()  # bounded by the writer
        self._copied: list[CopiedSave] = []

    def register(self, layers: dict[str, LayerPages]) -> None:
        """Layer name -> pages of one shape, in order of depth. Once."""
        self._layers = layers
        self._indices = {name: index for index, name in enumerate(layers)}
        first = next(iter(layers.values()))
        self._block_shape, self._block_bytes = first.block_shape, first.block_bytes
        run_block_bytes = len(layers) * self._block_bytes
        longest = max_run_blocks(run_block_bytes, self._queue_bytes)
        self._staging = StagingPool(longest * run_block_bytes, first.staging)

    def start(self, metadata: ExampleMetadata) -> None:
        """Pass on the verdicts on earlier saves, and copy what earlier steps filled."""
        for save_id in sorted(metadata.publish):
            self._writer.publish(save_id)
        for save_id in sorted(metadata.discard):
            self._await_arrival(save_id)
            self._writer.discard(save_id)
        copies = [self._begin(save) for save in metadata.saves if self._has_room(save)]
        self._complete([copy for copy in copies if copy.save.is_filled])
        self._copies = [copy for copy in copies if not copy.save.is_filled]

    def _num_bytes(self, save: Save) -> int:
        return len(self._layers) * len(save.block_ids) * self._block_bytes

    def _has_room(self, save: Save) -> bool:
        return self._writer.reserve(save.save_id, self._num_bytes(save))

    def _begin(self, save: Save) -> _Copy:
        memory = self._staging.take(self._num_bytes(save))
        shape = (len(self._layers), len(save.block_ids), self._block_bytes)
        rows = memory[: self._num_bytes(save)].reshape(shape)
        return _Copy(save, memory, rows, set(self._layers))

    @property
    def has_layer_work(self) -> bool:
        """Whether blocks that this step fills are to be copied."""
        return bool(self._copies)

    def copy_layer(self, layer_name: str) -> None:
        """Copy one layer of what this step fills, after the layer was written."""
        for copy in self._copies:
            self._copy(copy, layer_name)

    def _copy(self, copy: _Copy, layer_name: str) -> None:
        if layer_name in copy.missing:
            rows = copy.rows[self._indices[layer_name]]
            self._layers[layer_name].read(copy.save.block_ids, rows)
            copy.missing.remove(layer_name)

    def finish_step(self) -> None:
        """Copy what is missing, and hand on to the writer what has arrived. May be repeated."""
        self._complete(self._copies)
        self._copies = []
        self._hand_on()

    def _complete(self, copies: Sequence[_Copy]) -> None:
        """Copy the layers that are missing. From now on the pages may change."""
        for copy in copies:
            for layer_name in sorted(copy.missing):
                self._copy(copy, layer_name)
        if copies:
            gate = next(iter(self._layers.values())).copied()
            self._arriving.append(_Arriving(gate, copies))

    def _hand_on(self) -> None:
        while self._arriving and self._arriving[0].gate.query():
            for copy in self._arriving.popleft().copies:
                self._writer.write(copy.save.save_id, self._run(copy))
                self._copied.append(CopiedSave(copy.save.save_id, self._rank))

    def _await_arrival(self, save_id: int) -> None:
        """The writer has to have a save before it is told what to do with it."""
        if any(arriving.holds(save_id) for arriving in self._arriving):
            self._arriving[-1].gate.wait()
            self._hand_on()

    def _run(self, copy: _Copy) -> Run:
        return Run(
            parent_hash=copy.save.parent_hash,
            block_hashes=copy.save.block_hashes,
            block_shape=self._block_shape,
            layer_names=tuple(self._layers),
            rows=copy.rows,
            release=lambda: self._staging.give_back(copy.memory),
        )

    def take_copied(self) -> tuple[CopiedSave, ...]:
        """Saves that were handed on since the last call."""
        copied, self._copied = tuple(self._copied), []
        return copied

    def take_ended(self) -> tuple[EndedSave, ...]:
        """Saves that ended since the last call."""
        return self._writer.take_ended()

    def close(self, timeout_s: float) -> None:
        """Write what was allowed, within that time. What is arriving was not."""
        if self._arriving:
            self._arriving[-1].gate.wait(timeout_s)  # it arrives in memory that goes now
            self._arriving.clear()
        self._writer.close(timeout_s)
