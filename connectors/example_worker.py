"""ExampleConnector's worker side: loads and saves of one step after another. Device thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlace.connectors.example_loads import WorkerLoads
from interlace.connectors.example_messages import ExampleMetadata, ExampleWorkerMetadata
from interlace.connectors.example_options import ExampleConnectorOptions
from interlace.connectors.example_saves import WorkerSaves
from interlace.connectors.kv_folders.counters import Tally
from interlace.connectors.kv_folders.folders import KVFolders
from interlace.connectors.kv_folders.pages import layer_pages
from interlace.connectors.kv_folders.writer import FolderWriter
from interlace.engine.errors import ConnectorError

if TYPE_CHECKING:
    import torch

_CLOSE_S = 10.0


class ExampleWorker:
    """Hooks may come repeatedly, or not at all: a step begins once, however it is told."""

    def __init__(self, folders: KVFolders, tally: Tally, options: ExampleConnectorOptions) -> None:
        """Starts the writer and the reader threads."""
        self._folders = folders
        self._begun: ExampleMetadata | None = None
        self.loads = WorkerLoads(folders, tally, deadline_s=options.deadline_s)
        self._saves = WorkerSaves(FolderWriter(folders, tally, queue_bytes=options.queue_bytes))

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Raises: `ConnectorError` for pages that files of our identity cannot hold."""
        layers = {name: layer_pages(name, pages) for name, pages in kv_caches.items()}
        for name, pages in layers.items():
            if pages.dtype != self._folders.identity.dtype:
                raise ConnectorError(
                    f"register_kv_caches: {name} has pages of {pages.dtype}, but the engine's dtype"
                    f" is {self._folders.identity.dtype}; make them equal."
                )
        if len({pages.block_shape for pages in layers.values()}) != 1:
            raise ConnectorError(
                "register_kv_caches: KV folders hold one block shape, the same in all layers."
            )
        self.loads.register(layers)
        self._saves.register(layers)

    def start(self, metadata: ExampleMetadata) -> None:
        """Begin a step, unless it has begun."""
        if metadata is self._begun:
            return
        self._begun = metadata
        self.loads.start(metadata.loads)
        self._saves.start(metadata)

    @property
    def has_layer_work(self) -> bool:
        """Whether this step loads or copies layer by layer."""
        return self.loads.has_layer_work or self._saves.has_layer_work

    def copy_layer(self, layer_name: str) -> None:
        """The layer's new KV has been written."""
        self._saves.copy_layer(layer_name)

    def finish_saves(self) -> None:
        """The forward is over."""
        self._saves.finish_step()

    def report(self) -> ExampleWorkerMetadata | None:
        """What the scheduler side is to know of this step; None if there is nothing."""
        self._saves.finish_step()
        copied, ended = self._saves.take_copied(), self._saves.take_ended()
        lost, num_loaded = self.loads.take_lost(), self.loads.take_num_loaded()
        if not (copied or ended or lost or num_loaded):
            return None
        return ExampleWorkerMetadata(copied, ended, lost, num_loaded)

    def close(self) -> None:
        """Write what was allowed, for some seconds; may be repeated."""
        self.loads.close()
        self._saves.close(_CLOSE_S)
