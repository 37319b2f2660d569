"""ExampleConnector's worker side, saving: copies pages within the step, and hands them on.

Pages are only read while the step runs whose metadata names them, so a preemption has nothing to
wait for. Device thread; the writer thread never sees the pages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from interlace.connectors.example_messages import ExampleMetadata, Save
from interlace.connectors.kv_folders.folders import Run
from interlace.connectors.kv_folders.pages import LayerPages
from interlace.connectors.kv_folders.tensor_file import ByteArray
from interlace.connectors.kv_folders.writer import EndedSave, FolderWriter


@dataclasses.dataclass(slots=True)
class _Copy:
    save: Save
    rows: dict[str, ByteArray] = dataclasses.field(default_factory=dict)
    """Layer name -> its blocks."""


class WorkerSaves:
    """Repeated and missing layer hooks do no harm."""

    def __init__(self, writer: FolderWriter) -> None:
        self._writer = writer
        self._layers: dict[str, LayerPages] = {}
        self._copies: list[_Copy] = []
        self._copied: list[int] = []

    def register(self, layers: dict[str, LayerPages]) -> None:
        """Layer name -> pages, in order of depth. Once."""
        self._layers = layers

    def start(self, metadata: ExampleMetadata) -> None:
        """Pass on the verdicts on earlier saves, and copy what earlier steps filled."""
        for save_id in sorted(metadata.publish):
            self._writer.publish(save_id)
        for save_id in sorted(metadata.discard):
            self._writer.discard(save_id)
        copies = [_Copy(save) for save in metadata.saves if self._has_room(save)]
        self._hand_on(copy for copy in copies if copy.save.is_filled)
        self._copies = [copy for copy in copies if not copy.save.is_filled]

    def _has_room(self, save: Save) -> bool:
        block_bytes = sum(pages.block_bytes for pages in self._layers.values())
        return self._writer.reserve(save.save_id, block_bytes * len(save.block_ids))

    def copy_layer(self, layer_name: str) -> None:
        """Copy one layer of what this step fills, after the layer was written."""
        pages = self._layers[layer_name]
        for copy in self._copies:
            if layer_name not in copy.rows:
                copy.rows[layer_name] = pages.read(copy.save.block_ids)

    def finish_step(self) -> None:
        """Copy what is missing, and hand all on to the writer. May be repeated."""
        self._hand_on(self._copies)
        self._copies = []

    def _hand_on(self, copies: Iterable[_Copy]) -> None:
        for copy in copies:
            for layer_name, pages in self._layers.items():
                if layer_name not in copy.rows:
                    copy.rows[layer_name] = pages.read(copy.save.block_ids)
            self._writer.write(copy.save.save_id, self._run(copy))
            self._copied.append(copy.save.save_id)

    def _run(self, copy: _Copy) -> Run:
        return Run(
            parent_hash=copy.save.parent_hash,
            block_hashes=copy.save.block_hashes,
            block_shape=next(iter(self._layers.values())).block_shape,
            layers={name: copy.rows[name] for name in self._layers},
        )

    def take_copied(self) -> tuple[int, ...]:
        """Saves that were copied since the last call."""
        copied, self._copied = tuple(self._copied), []
        return copied

    def take_ended(self) -> tuple[EndedSave, ...]:
        """Saves that ended since the last call."""
        return self._writer.take_ended()

    def close(self, timeout_s: float) -> None:
        """Write what was allowed, within that time."""
        self._writer.close(timeout_s)
