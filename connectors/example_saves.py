"""ExampleConnector's worker side, saving: copies pages within the step, and hands them on.

Pages are only read while the step runs whose metadata names them, so a preemption has nothing to
wait for. Device thread; the writer's lane never sees the pages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from interlace.connectors.example_messages import CopiedSave, ExampleMetadata, Save
from interlace.connectors.example_save_planner import max_run_blocks
from interlace.connectors.kv_folders.folders import Run
from interlace.connectors.kv_folders.pages import LayerPages
from interlace.connectors.kv_folders.staging import StagingPool
from interlace.connectors.kv_folders.tensor_file import ByteArray
from interlace.connectors.kv_folders.writer import EndedSave, FolderWriter


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
        self._copied: list[CopiedSave] = []

    def register(self, layers: dict[str, LayerPages]) -> None:
        """Layer name -> pages of one shape, in order of depth. Once."""
        self._layers = layers
        self._indices = {name: index for index, name in enumerate(layers)}
        first = next(iter(layers.values()))
        self._block_shape, self._block_bytes = first.block_shape, first.block_bytes
        run_block_bytes = len(layers) * self._block_bytes
        longest = max_run_blocks(run_block_bytes, self._queue_bytes)
        self._staging = StagingPool(longest * run_block_bytes)

    def start(self, metadata: ExampleMetadata) -> None:
        """Pass on the verdicts on earlier saves, and copy what earlier steps filled."""
        for save_id in sorted(metadata.publish):
            self._writer.publish(save_id)
        for save_id in sorted(metadata.discard):
            self._writer.discard(save_id)
        copies = [self._begin(save) for save in metadata.saves if self._has_room(save)]
        self._hand_on(copy for copy in copies if copy.save.is_filled)
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
        """Copy what is missing, and hand all on to the writer. May be repeated."""
        self._hand_on(self._copies)
        self._copies = []

    def _hand_on(self, copies: Iterable[_Copy]) -> None:
        for copy in copies:
            for layer_name in sorted(copy.missing):
                self._copy(copy, layer_name)
            self._writer.write(copy.save.save_id, self._run(copy))
            self._copied.append(CopiedSave(copy.save.save_id, self._rank))

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
        """Saves that were copied since the last call."""
        copied, self._copied = tuple(self._copied), []
        return copied

    def take_ended(self) -> tuple[EndedSave, ...]:
        """Saves that ended since the last call."""
        return self._writer.take_ended()

    def close(self, timeout_s: float) -> None:
        """Write what was allowed, within that time."""
        self._writer.close(timeout_s)
