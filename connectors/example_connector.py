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
    example_stats.py          what is counted
    example_faults.py         what `interlace check` damages
    kv_folders/               the files themselves
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlace.connectors.base import CheckSetup, KVConnectorBase_V1
from interlace.connectors.counted_metrics import CountedConnector
from interlace.connectors.example_faults import FAULT_KINDS, damage
from interlace.connectors.example_messages import ExampleMetadata, ExampleWorkerMetadata
from interlace.connectors.example_options import ExampleConnectorOptions
from interlace.connectors.example_save_planner import MAX_RUN_BLOCKS, max_run_blocks
from interlace.connectors.example_scheduler import ExampleScheduler
from interlace.connectors.example_stats import NUMBERS, ExampleConnectorStats
from interlace.connectors.kv_folders.counters import KVFolderCounters, Tally
from interlace.connectors.kv_folders.folders import KVFolders
from interlace.connectors.kv_folders.identity import KVIdentity
from interlace.connectors.kv_folders.index import FolderIndex
from interlace.connectors.new_folder import check_writable
from interlace.connectors.slab_store.directory import MARKER
from interlace.engine.config import EngineConfig
from interlace.engine.errors import ConfigError
from interlace.engine.kv_connector import (
    KVCacheBlocks,
    KVCacheConfig,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
)
from interlace.engine.kv_connector_stats import KVConnectorStats
from interlace.engine.kv_events import KVCacheEvent
from interlace.engine.request import Request
from interlace.engine.scheduler_output import SchedulerOutput

if TYPE_CHECKING:
    import torch

    from interlace.connectors.example_worker import ExampleWorker
    from interlace.layers.forward_context import ForwardContext

logger = logging.getLogger(__name__)


class ExampleConnector(CountedConnector, KVConnectorBase_V1):
    """Stores every full block of prompts and answers in files, and loads them from there.

    What is stored: one folder for a run of blocks, with a safetensors file a layer and a manifest
    of their hashes and digests. Each worker stores its part, in folders of its own. Nothing is
    evicted.

    When it loads: within the step, layer by layer; or, with `load_async`, before the request joins
    the batch. Blocks hit in any whole number, wherever one engine with the same model, type, block
    size and number of workers has computed them; engines on one directory see what the others
    store within `refresh_s`.

    What it guarantees: a block is promised only if all workers have it. What is loaded was checked
    against its digest, and what cannot be loaded is reported block by block, within `deadline_s`
    of the last sign of life of the file system. Nothing is visible to anyone before the step that
    computed it was applied with no bad block beneath. A full disk, a slow one or a damaged file
    costs saves or a recompute, never an answer. Pages are only read while the step runs that names
    them. File I/O goes through `lanes` alone.

    Each instance has one side: `_scheduler` on the event loop, or `_worker` on the device thread.
    See the base class for when each method is called and what it must not do.
    """

    store_fault_kinds = FAULT_KINDS
    metric_numbers = NUMBERS

    def __init__(
        self,
        vllm_config: EngineConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        """The scheduler side begins to index the directory; the worker side tries it.

        Raises: `ConfigError` for bad options, for an engine that keeps hidden states beside its
        KV, and on the worker side of a producer for a directory that cannot be written.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        _refuse_hidden_states(vllm_config)
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
        num_ranks = self._folders.identity.world_size
        self._index = FolderIndex(
            [self._folders.of_rank(rank) for rank in range(num_ranks)],
            self._tally,
            self.lanes,
            refresh_s=self.options.refresh_s,
            deadline_s=self.options.deadline_s,
        )
        self._scheduler_side = ExampleScheduler(
            self._index,
            self._tally,
            num_ranks=num_ranks,
            block_size=block_size,
            longest_run=self._longest_run(),
            load_async=self.options.load_async,
            may_load=self._kv_transfer_config.is_kv_consumer,
            may_save=self._kv_transfer_config.is_kv_producer,
        )

    def _longest_run(self) -> int:
        """Most blocks of one save."""
        if self._kv_cache_config is None:
            return MAX_RUN_BLOCKS
        (group,) = self._kv_cache_config.kv_cache_groups
        block_bytes = len(group.layer_names) * group.kv_cache_spec.page_size_bytes
        return max_run_blocks(block_bytes, self.options.queue_bytes)

    def _make_worker_side(self) -> None:
        from interlace.connectors.example_worker import ExampleWorker

        _refuse_slabs(self.options.root)
        if self._kv_transfer_config.is_kv_producer:
            with _saving_to(self.options.root):
                self._folders.prepare()
        self._worker_side = ExampleWorker(
            self._folders,
            self._tally,
            self.options,
            self.lanes,
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

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Runs of blocks that this engine has published, and any that cannot be found any more."""
        return self._scheduler.take_events()

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
        """Nothing to wait for: pages are copied before `wait_for_save` returns, or on a GPU their
        copies are queued before what follows, and loads into them end within a step, or before
        their request is reported as received."""

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
        """Hand the copies to the writer as far as they have arrived; from now on the pages may
        change, on a GPU by what is queued from now on."""
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

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What this worker has loaded, saved, dropped and failed since the last call; None on the
        scheduler side, or if it is nothing."""
        if self._worker_side is None:
            return None
        new = self._tally.take_new()
        return ExampleConnectorStats(data=dict(new)) if new else None

    def inject_store_fault(self, kind: str, block_hash: bytes) -> Iterable[bytes]:
        """See `example_faults`. Only this worker's part is damaged."""
        return damage(self._folders, kind, block_hash)

    # ---------------------------------------------------------------- both

    def shutdown(self) -> None:
        """End the lanes; the worker side writes what was allowed first, for some seconds."""
        if self._index is not None:
            self._index.close()
        if self._worker_side is not None:
            self._worker_side.close()

    # ---------------------------------------------------------------- of the class

    @classmethod
    def validate_config(cls, vllm_config: EngineConfig) -> None:
        """Raises: `ConfigError` for bad options, for an engine that keeps hidden states beside its
        KV, and for a directory that is another store's, or cannot be made, written or read."""
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None, "it names this class"
        _refuse_hidden_states(vllm_config)
        root = ExampleConnectorOptions.of(transfer).root
        with _saving_to(root) if transfer.is_kv_producer else _loading_from(root):
            _refuse_slabs(root)
            if transfer.is_kv_producer:
                check_writable(root)
            else:
                _check_readable(root)

    @classmethod
    def check_setup(cls, scratch: Path) -> CheckSetup:
        """A directory in `scratch`, which is listed once: the time of day decides nothing."""
        return CheckSetup(
            {"shared_storage_path": str(scratch / "kv"), "refresh_s": 86_400.0, "deadline_s": 60.0}
        )

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: EngineConfig) -> str:
        """Files hold blocks as "NHD" pages do."""
        return "NHD"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """True: it loads and saves in the hooks of the layers."""
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ExampleConnectorStats:
        """Statistics of this kind that consist of a copy of `data`."""
        return ExampleConnectorStats(data=dict(data or {}))


def _refuse_hidden_states(config: EngineConfig) -> None:
    """Raises: `ConfigError`."""
    if config.hidden_state_layer_ids:
        raise ConfigError(
            "ExampleConnector does not store hidden states, so prompts that it loads would lack"
            " them: leave out hidden_state_layer_ids, or this connector."
        )


def _refuse_slabs(root: Path) -> None:
    """Raises: `ConfigError`; `OSError` if that cannot be told."""
    if (root / MARKER).exists():
        raise ConfigError(
            f"{root} holds slabs of PipelineConnector's store of files (it has a {MARKER}): give"
            " ExampleConnector's shared_storage_path a directory of its own."
        )


def _check_readable(root: Path) -> None:
    """It may not be there yet: others make it. Raises: `OSError`."""
    with contextlib.suppress(FileNotFoundError):
        os.scandir(root).close()


@contextlib.contextmanager
def _loading_from(root: Path) -> Iterator[None]:
    """Raises: `ConfigError` for an `OSError`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"KV cannot be loaded from {root}: {error.strerror or error}. Choose a"
            " shared_storage_path that this user may read."
        ) from error


@contextlib.contextmanager
def _saving_to(root: Path) -> Iterator[None]:
    """Raises: `ConfigError` for an `OSError`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"KV cannot be saved to {root}: {error.strerror or error}. Choose a"
            " shared_storage_path that this user may create and write, or kv_role 'kv_consumer' to"
            " load only."
        ) from error
