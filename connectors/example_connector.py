"""ExampleConnector: KV in folders of files, and a pattern for connectors of your own.

    EngineConfig(kv_transfer_config=KVTransferConfig(
        kv_connector="ExampleConnector", kv_role="kv_both", kv_load_failure_policy="recompute",
        kv_connector_extra_config={"shared_storage_path": "~/kv"}))

This module maps the protocol's two roles to two objects. Read on in this order:

    example_messages.py       what the two sides tell each other
    example_scheduler.py      what is promised, and which blocks are loaded where
    example_save_planner.py   which blocks are saved, and when they become visible
    example_worker.py         the steps of the worker side
    example_pieces.py         what is loaded, and what becomes of it
    example_step_loads.py     files to pages, layer by layer within a step
    example_background_loads.py   files to pages across steps
    example_saves.py          pages to files
    kv_folders/               the files themselves
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from interlace.connectors.base import KVConnectorBase_V1
from interlace.connectors.example_messages import ExampleMetadata, ExampleWorkerMetadata
from interlace.connectors.example_options import ExampleConnectorOptions
from interlace.connectors.example_save_planner import MAX_RUN_BLOCKS, max_run_blocks
from interlace.connectors.example_scheduler import ExampleScheduler
from interlace.connectors.kv_folders.counters import KVFolderCounters, Tally
from interlace.connectors.kv_folders.folders import KVFolders
from interlace.connectors.kv_folders.identity import KVIdentity
from interlace.connectors.kv_folders.index import FolderIndex
from interlace.engine.config import EngineConfig
from interlace.engine.errors import ConfigError
from interlace.engine.kv_connector import (
    KVCacheBlocks,
    KVCacheConfig,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
)
from interlace.engine.request import Request
from interlace.engine.scheduler_output import SchedulerOutput

if TYPE_CHECKING:
    import torch

    from interlace.connectors.example_worker import ExampleWorker
    from interlace.layers.forward_context import ForwardContext

logger = logging.getLogger(__name__)


class ExampleConnector(KVConnectorBase_V1):
    """Each instance has one side: `_scheduler` on the event loop, or `_worker` on the device
    thread. See the base class for when each method is called and what it must not do."""

    def __init__(
        self,
        vllm_config: EngineConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        """The scheduler side starts a thread that indexes the directory; the worker side tries it.

        Raises: `ConfigError` for bad options, and on the worker side of a producer for a
        directory that cannot be written.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        self.options = ExampleConnectorOptions.of(self._kv_transfer_config)
        self._folders = KVFolders(self.options.root, KVIdentity.of(vllm_config))
        self._tally = Tally()
        self._index: FolderIndex | None = None
        self._scheduler_side: ExampleScheduler | None = None
        self._worker_side: ExampleWorker | None = None
        self._has_refused_reset = False
        if role is KVConnectorRole.SCHEDULER:
            self._make_scheduler_side(vllm_config.block_size)
        else:
            self._make_worker_side()

    def _make_scheduler_side(self, block_size: int) -> None:
        self._index = FolderIndex(
            self._folders,
            self._tally,
            refresh_s=self.options.refresh_s,
            deadline_s=self.options.deadline_s,
        )
        self._scheduler_side = ExampleScheduler(
            self._index,
            self._tally,
            block_size=block_size,
            longest_run=self._longest_run(),
            load_async=self.options.load_async,
            may_load=self._kv_transfer_config.is_kv_consumer,
            may_save=self._kv_transfer_config.is_kv_producer,
        )
        self._index.start()

    def _longest_run(self) -> int:
        """Most blocks of one save."""
        if self._kv_cache_config is None:
            return MAX_RUN_BLOCKS
        (group,) = self._kv_cache_config.kv_cache_groups
        block_bytes = len(group.layer_names) * group.kv_cache_spec.page_size_bytes
        return max_run_blocks(block_bytes, self.options.queue_bytes)

    def _make_worker_side(self) -> None:
        from interlace.connectors.example_worker import ExampleWorker

        if self._kv_transfer_config.is_kv_producer:
            try:
                self._folders.prepare()
            except OSError as error:
                raise ConfigError(
                    f"KV cannot be saved to {self.options.root}: {error.strerror or error}. Choose"
                    " a shared_storage_path that this user may create and write, or kv_role"
                    " 'kv_consumer' to load only."
                ) from error
        self._worker_side = ExampleWorker(
            self._folders,
            self._tally,
            self.options,
            may_save=self._kv_transfer_config.is_kv_producer,
        )

    @property
    def counters(self) -> KVFolderCounters:
        """What this side knows of loads, saves and damage since the start."""
        return self._tally.counters

    @property
    def _scheduler(self) -> ExampleScheduler:
        assert self._scheduler_side is not None, "called on the worker side"
        return self._scheduler_side

    @property
    def _worker(self) -> ExampleWorker:
        assert self._worker_side is not None, "called on the scheduler side"
        return self._worker_side

    @property
    def _metadata(self) -> ExampleMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ExampleMetadata)
        return metadata

    # ---------------------------------------------------------------- scheduler side

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """From the index in memory; None while it is built for the first time."""
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Order the load of what was promised."""
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ExampleMetadata:
        """Loads, saves and verdicts of this step."""
        return self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """A step was applied."""
        self._scheduler.update_connector_output(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """True while a save of the request is open."""
        return self._scheduler.request_finished(request, block_ids)

    def reset_cache(self) -> bool:
        """False: nothing is forgotten, since other processes may share the directory.

        To forget what is stored, close the engines that use the directory and remove it, or open
        an engine with another `shared_storage_path`.
        """
        if not self._has_refused_reset:
            self._has_refused_reset = True
            logger.warning(
                "KV in %s is not removed by a reset, since other processes may share it: to forget"
                " it, remove the directory, or choose another shared_storage_path.",
                self.options.root,
            )
        return False

    # ---------------------------------------------------------------- worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Raises: `ConnectorError` for pages of another layout or type than files hold."""
        self._worker.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Nothing to wait for: pages are copied before `wait_for_save` returns, and loads into
        them end within a step, or before their request is reported as received."""

    def has_connector_metadata(self) -> bool:
        """Whether layers of this step have something to wait for or to copy: the engine leaves
        the layer hooks out where they have not."""
        return super().has_connector_metadata() and self._worker.has_layer_work

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begin to read, and copy what earlier steps filled."""
        self._worker.start(self._metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Copy the layer from host memory into its pages, as soon as it has been read."""
        self._worker.step_loads.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Copy the layer's filled blocks to host memory."""
        self._worker.copy_layer(layer_name)

    def wait_for_save(self) -> None:
        """Hand the copies to the writer; from now on the pages may change."""
        self._worker.finish_saves()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests without open saves, and asynchronous loads that are in the pages now."""
        self._worker.start(self._metadata)
        received = self._worker.background_loads.take_received()
        return set(self._metadata.release) or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of pieces of which any layer failed."""
        return self._worker.take_invalid()

    def build_connector_worker_meta(self) -> ExampleWorkerMetadata | None:
        """What was copied, what has ended, which folders failed."""
        return self._worker.report()

    # ---------------------------------------------------------------- both

    def shutdown(self) -> None:
        """End the threads; the worker side writes what was allowed first, for some seconds."""
        if self._index is not None:
            self._index.close()
        if self._worker_side is not None:
            self._worker_side.close()
