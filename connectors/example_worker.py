"""ExampleConnector's worker side: loads and saves of one step after another. Device thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlace.connectors.example_background_loads import BackgroundLoads
from interlace.connectors.example_messages import ExampleMetadata, ExampleWorkerMetadata, Load
from interlace.connectors.example_options import ExampleConnectorOptions
from interlace.connectors.example_pieces import LoadReports, Piece
from interlace.connectors.example_saves import WorkerSaves
from interlace.connectors.example_step_loads import StepLoads
from interlace.connectors.kv_folders.counters import Tally
from interlace.connectors.kv_folders.folders import KVFolders
from interlace.connectors.kv_folders.pages import layer_pages
from interlace.connectors.kv_folders.writer import FolderWriter
from interlace.engine.errors import ConnectorError
from interlace.engine.ports import Lanes

if TYPE_CHECKING:
    import torch

_CLOSE_S = 10.0


class ExampleWorker:
    """Hooks may come repeatedly, or not at all: a step begins once, however it is told."""

    def __init__(
        self,
        folders: KVFolders,
        tally: Tally,
        options: ExampleConnectorOptions,
        lanes: Lanes,
        *,
        may_save: bool,
    ) -> None:
        """`folders` are those of this worker's rank. A consumer has no writer, and no memory for
        copies."""
        self._folders = folders
        self._tally = tally
        self._begun: ExampleMetadata | None = None
        self._reports = LoadReports(tally)
        self._rank = folders.identity.rank
        deadline_s = options.deadline_s
        self.step_loads = StepLoads(self._reports, lanes, deadline_s=deadline_s)
        self.background_loads = BackgroundLoads(self._reports, lanes, deadline_s=deadline_s)
        self.saves: WorkerSaves | None = None
        if may_save:
            writer = FolderWriter(folders, tally, lanes, queue_bytes=options.queue_bytes)
            self.saves = WorkerSaves(writer, rank=self._rank, queue_bytes=options.queue_bytes)

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
        self.step_loads.register(layers)
        self.background_loads.register(layers)
        if self.saves is not None:
            self.saves.register(layers)

    def start(self, metadata: ExampleMetadata) -> None:
        """Begin a step, unless it has begun."""
        if metadata is self._begun:
            return
        self._begun = metadata
        within = [load for load in metadata.loads if not load.is_async]
        self.step_loads.start(piece for load in within for piece in self._open(load))
        for load in metadata.loads:
            if load.is_async:
                self.background_loads.start(load.request_id, self._open(load))
        if self.saves is not None:
            self.saves.start(metadata)

    def _open(self, load: Load) -> list[Piece]:
        return [Piece(piece, self._folders, self._tally) for piece in load.pieces[self._rank]]

    @property
    def has_layer_work(self) -> bool:
        """Whether this step loads or copies layer by layer."""
        saves = self.saves is not None and self.saves.has_layer_work
        return saves or self.step_loads.has_layer_work

    def copy_layer(self, layer_name: str) -> None:
        """The layer's new KV has been written."""
        if self.saves is not None:
            self.saves.copy_layer(layer_name)

    def finish_saves(self) -> None:
        """The forward is over."""
        if self.saves is not None:
            self.saves.finish_step()

    def take_invalid(self) -> set[int]:
        """The step's loads are over: blocks that these, or loads across steps, did not fill."""
        self.step_loads.finish()
        return self._reports.take_invalid()

    def report(self) -> ExampleWorkerMetadata | None:
        """What the scheduler side is to know of this step; None if there is nothing."""
        self.finish_saves()
        report = ExampleWorkerMetadata(
            copied=() if self.saves is None else self.saves.take_copied(),
            ended=() if self.saves is None else self.saves.take_ended(),
            lost=self._reports.take_lost(),
            loaded=self._reports.take_loaded(),
        )
        return None if report == ExampleWorkerMetadata() else report

    def close(self) -> None:
        """Write what was allowed, for some seconds; may be repeated."""
        self.step_loads.close()
        self.background_loads.close()
        if self.saves is not None:
            self.saves.close(_CLOSE_S)
