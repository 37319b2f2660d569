"""PipelineConnector: KV in host memory that comes back while the layers before it compute.

    EngineConfig(kv_transfer_config=KVTransferConfig(
        kv_connector="PipelineConnector", kv_role="kv_both",
        kv_connector_extra_config={"host_bytes": 8 << 30}))

**What it stores**: every full block of prompts and answers, as a record over all layers, in
`host_bytes` of host memory that is pinned beside a GPU. Records go least recently used first, of a
prefix its tail first. With `{"store": "file", "path": DIR}` also in files, which survive the engine
and may be shared (`slab_store/`): a GPU copies from those that lie in the page cache directly, and
others are read into host memory. For a request with `kv_transfer_params={"skip_save": True}`
nothing is stored, for one with `{"skip_load": True}` nothing is loaded.

**When it loads**: `load_mode` says, or per request the rates measured on this machine. Within the
step, layer by layer: the request computes at once, and each group of layers (`group_size`) waits at
its own gate until its KV is there, in captured graphs too. In bulk, beside the steps, before the
request joins the batch. From the back, beside the steps, while those compute what is stored from
its front, until the two meet ("hybrid"). Or not at all, where computing is sooner. Blocks hit in
any whole number; one token at least is left to compute.

**What it guarantees**:

- Nothing is visible to anyone before the step that computed it was applied with no bad block
  beneath.
- A step waits for loads within itself alone, and where the connector chooses, its requests together
  not longer than `max_load_stall_ms`, as far as the rates can tell.
- Saves are copied beside later steps. A preemption waits until its blocks are neither read nor
  written.
- A copy that fails costs a save or a recompute, never an answer. One that does not return is given
  up after a deadline.
- A record that a load reads is not given to another block.

Read on in this order:

    pipeline/messages.py     what the two sides tell each other
    pipeline/scheduler.py    what is promised, and what the worker side is told
    pipeline/sched_choice.py which way is best, by the rates so far
    pipeline/sched_loads.py  which records are loaded where, until that has ended
    pipeline/sched_tier.py   what is asked of where blocks are stored
    pipeline/sched_params.py what a request may ask for
    pipeline/rates.py        how long loads and steps take, and the choice between the ways
    pipeline/sched_split.py  what of a prompt is computed and what is loaded at the same time
    pipeline/planner.py      which blocks are saved, and when they become visible
    pipeline/host_index.py   which record holds which block, and which goes
    pipeline/worker.py       the steps of the worker side
    pipeline/layer_pipeline.py   copies, layer by layer or beside the steps
    pipeline/layer_groups.py     which layers share a gate
    pipeline/worker_loads.py     what one step loads within itself
    pipeline/worker_step_load.py which of that has failed
    pipeline/worker_feeder.py    what goes on beside the steps, slice by slice
    pipeline/worker_backward.py  the same from the back, with a share that may change
    pipeline/worker_deadlines.py what happens when a copy does not return
    pipeline/worker_notes.py     what was copied when, for who looks at steps
    pipeline/records.py          the host memory
    pipeline/store_directory.py  the directory of files
    pipeline/sched_files.py      files: what is read, copied from directly, and written there
    pipeline/worker_files.py     what is read before it is loaded, and written behind
    pipeline/worker_bulk.py      a load beside the steps, as far as its reads have come
    pipeline/worker_maps.py      files that a GPU copies from
    pipeline/worker_checks.py    whether what has come is what was stored
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlace.connectors.base import CheckSetup, KVConnectorBase_V1
from interlace.connectors.counted_metrics import CountedConnector
from interlace.connectors.kv_folders.identity import KVIdentity
from interlace.connectors.pipeline.layer_pipeline import Pace
from interlace.connectors.pipeline.messages import PipelineHandshake, PipelineMetadata
from interlace.connectors.pipeline.options import PipelineOptions
from interlace.connectors.pipeline.sched_metrics import NUMBERS
from interlace.connectors.pipeline.sched_stats import PipelineStats
from interlace.connectors.pipeline.scheduler import PipelineScheduler, SchedulerSettings
from interlace.connectors.pipeline.store_directory import check_directory
from interlace.connectors.slab_store.catalog import Catalog
from interlace.connectors.slab_store.faults import FAULT_KINDS
from interlace.connectors.slab_store.lookup import StoredBlocks
from interlace.connectors.slab_store.space import Space
from interlace.connectors.slab_store.watch import Watch
from interlace.engine.config import EngineConfig
from interlace.engine.errors import ConfigError, ConnectorError
from interlace.engine.kv_connector import (
    KVCacheBlocks,
    KVCacheConfig,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from interlace.engine.kv_connector_stats import KVConnectorStats
from interlace.engine.ports import LayerGates, TransferRecorder
from interlace.engine.request import Request
from interlace.engine.scheduler_output import SchedulerOutput
from interlace.engine.transfer_picture import ConnectorPicture
from interlace.layers.graph_mode import GraphMode

if TYPE_CHECKING:
    import torch

    from interlace.connectors.pipeline.worker import PipelineWorker
    from interlace.layers.forward_context import ForwardContext

_FIRST_LOOK_S = 10.0
"""What is found later is found all the same."""
_LOOK_DELAY_S = 0.03
"""A look takes the interpreter a millisecond or two, which a step's launch would wait for."""
_CLOSE_S = 5.0
CHECK_HOST_BYTES = 256 << 10
"""Of `interlace check`'s tiny engines: under a hundred records, so that they are reused."""


class PipelineConnector(CountedConnector, KVConnectorBase_V1):
    """See the module's docstring, and the base class for when each method is called.

    Each instance has one side: `_scheduler` on the event loop, from the handshake on, or `_worker`
    on the device thread.
    """

    default_load_failure_policy = "recompute"
    metric_numbers = NUMBERS

    def __init__(
        self,
        vllm_config: EngineConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        """Raises: `ConfigError` for bad options, for several workers, for an engine that keeps
        hidden states beside its KV, and on the worker side for memory that cannot be had."""
        super().__init__(vllm_config, role, kv_cache_config)
        _refuse_what_is_not_stored(vllm_config)
        self.options = PipelineOptions.of(self._kv_transfer_config, kv_cache_config)
        self._scheduler_side: PipelineScheduler | None = None
        self._worker_side: PipelineWorker | None = None
        if role is KVConnectorRole.WORKER:
            self._make_worker_side()

    def _make_worker_side(self) -> None:
        from interlace.connectors.pipeline.worker import PipelineWorker

        self._worker_side = PipelineWorker(self.options, self.lanes, make_space=self._make_space)

    @property
    def _make_space(self) -> Callable[[int, int], Space] | None:
        """See `PipelineWorker`."""
        return self._space if self.options.has_files else None

    def _space(self, num_layers: int, page_bytes: int) -> Space:
        """What a store of files is to hold."""
        config = self._vllm_config
        model = config.model_config
        return Space(
            identity=KVIdentity.of(config),
            model_name=config.model if model is None else model.model,
            num_layers=num_layers,
            page_bytes=page_bytes,
        )

    def _stored_blocks(self, record_bytes: int) -> StoredBlocks | None:
        """What lies in files, by the first look; waits for that."""
        if not self.options.has_files:
            return None
        assert self.options.path is not None, "options say so"
        assert self._kv_cache_config is not None, "the engine gives it"
        (group,) = self._kv_cache_config.kv_cache_groups
        num_layers = len(group.layer_names)
        space = self._space(num_layers, record_bytes // num_layers)
        catalog = Catalog(Path(self.options.path) / space.folder_name, space)
        is_replayed = self._vllm_config.lanes is not None  # by a seed, and not by time
        stored = StoredBlocks(
            catalog,
            self.lanes.lane("look"),
            delay_s=0.0 if is_replayed else _LOOK_DELAY_S,
            threshold=self.options.store_threshold,
            watch=None if is_replayed else Watch(catalog),
        )
        stored.wait_for_look(_FIRST_LOOK_S)
        return stored

    @property
    def _scheduler(self) -> PipelineScheduler:
        if self._scheduler_side is None:
            raise ConnectorError(
                "PipelineConnector's scheduler side does not know its records: it is used after"
                " set_xfer_handshake_metadata, and on the side of the role SCHEDULER alone."
            )
        return self._scheduler_side

    @property
    def _worker(self) -> PipelineWorker:
        assert self._worker_side is not None, "called on the scheduler side"
        return self._worker_side

    @property
    def _metadata(self) -> PipelineMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PipelineMetadata)
        return metadata

    # ---------------------------------------------------------------- for `interlace check`

    @property
    def store_fault_kinds(self) -> tuple[str, ...]:  # type: ignore[override]
        """Those of files, if nothing else holds blocks: memory would serve what they have lost."""
        only_files = self.options.has_files and not self.options.keeps_in_memory
        return FAULT_KINDS if only_files else ()

    def inject_store_fault(self, kind: str, block_hash: bytes) -> set[bytes]:
        """See the base class: damage the block in all files. Raises: `OSError`."""
        return self._worker.damage_stored(kind, block_hash)

    # ---------------------------------------------------------------- scheduler side

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Learn of the records. Raises: `ConnectorError` if no worker tells of any."""
        handshake = metadata.get(0)
        if not isinstance(handshake, PipelineHandshake) or handshake.num_records < 1:
            raise ConnectorError(
                f"PipelineConnector's worker side told of no records ({handshake!r}): both sides"
                " must be of one version, and pages be registered before the handshake."
            )
        config = self._vllm_config
        self._scheduler_side = PipelineScheduler(
            handshake,
            SchedulerSettings(
                block_size=config.block_size,
                max_step_tokens=config.scheduler_config.max_num_batched_tokens,
                max_inflight_steps=_most_inflight(config),
                load_mode=self.options.load_mode,
                max_stall_s=self.options.max_load_stall_ms / 1e3,
                may_load=self._kv_transfer_config.is_kv_consumer,
                may_save=self._kv_transfer_config.is_kv_producer,
                keeps_in_memory=self.options.keeps_in_memory,
            ),
            self._stored_blocks(handshake.record_bytes),
        )

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """From the index in memory; never None. Raises: `RequestError` for bad
        `kv_transfer_params`."""
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def get_compute_end(self, request: Request) -> int | None:
        """Where its load from the back begins, if that is how it comes."""
        return self._scheduler.get_compute_end(request)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Order the load of what was promised."""
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PipelineMetadata:
        """Loads, saves and fences of this step."""
        return self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """A step was applied."""
        self._scheduler.update_connector_output(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """True while a save of the request's blocks is open."""
        return self._scheduler.request_finished(request, block_ids)

    def reset_cache(self) -> None:
        """Forget all that is stored."""
        self._scheduler.reset_cache()

    # ---------------------------------------------------------------- worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Make the records for these pages. Raises: `ConfigError` if there is no memory for them,
        `ConnectorError` for pages that lie otherwise than records."""
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> PipelineHandshake:
        """How many records there are, and how fast they load."""
        return self._worker.handshake()

    def get_layer_gates(self) -> LayerGates | None:
        """Those that captured graphs wait at; None where there are no graphs."""
        return self._worker.layer_gates

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Wait for fenced saves and lost loads: the step hands their blocks on."""
        assert isinstance(kv_connector_metadata, PipelineMetadata)
        self._worker.handle_preemptions(kv_connector_metadata)

    def has_connector_metadata(self) -> bool:
        """Whether layers of this step have something to wait for: the engine leaves the layer
        hooks out where they have not."""
        return super().has_connector_metadata() and self._metadata.loads_within_step

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Queue the step's loads, those within it layer by layer."""
        is_replayed = forward_context.cudagraph_runtime_mode is GraphMode.FULL
        self._worker.start(self._metadata, Pace.IN_TWO if is_replayed else Pace.BY_LAYER)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Let the layer wait at its gate."""
        self._worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: blocks are copied as wholes behind the forward."""

    def wait_for_save(self) -> None:
        """Queue the step's saves behind its forward. Waits for none of them: see `Save`."""
        self._worker.finish_forward()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Held requests without open saves, and those whose load beside the steps has ended."""
        return self._worker.get_finished(finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of loads whose copies failed."""
        return self._worker.take_invalid()

    def get_late_load_errors(self) -> set[int]:
        """Blocks that came out of mapped files other than they were stored."""
        return self._worker.take_late_invalid()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Saves and loads that have ended, and how long things took."""
        return self._worker.report()

    def advance_transfers(self) -> bool:
        """Feed what goes on beside the steps, a slice or two."""
        return self._worker.advance()

    def record_transfers(self, recorder: TransferRecorder | None) -> None:
        """Of a step's own loads a piece is a group of layers, else a slice."""
        if self._worker_side is not None:
            self._worker_side.record(recorder)

    # ---------------------------------------------------------------- both

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What the scheduler side has counted since the last call: see `PipelineStats`; None on
        the worker side, or if it is nothing."""
        if self._scheduler_side is None:
            return None
        return self._scheduler_side.take_stats()

    def get_transfer_pictures(self) -> tuple[ConnectorPicture, ...]:
        """Loads, saves and lanes on the worker side, tiers on the scheduler side."""
        worker, scheduler = self._worker_side, self._scheduler_side
        shown = (
            None if worker is None else worker.pictures(),
            None if scheduler is None else scheduler.picture(),
        )
        return tuple(one for one in shown if one is not None)

    def shutdown(self) -> None:
        """End the lanes, and let go of the records. A second call does nothing."""
        worker, self._worker_side = self._worker_side, None
        if worker is not None:
            worker.close()
        scheduler, self._scheduler_side = self._scheduler_side, None
        if scheduler is not None:
            scheduler.close(_CLOSE_S)

    # ---------------------------------------------------------------- of the class

    @classmethod
    def validate_config(cls, vllm_config: EngineConfig) -> None:
        """Raises: `ConfigError` for bad options, for more host memory than there is, for a store's
        directory that cannot be used, and for engines that it does not work in."""
        from interlace.connectors.pipeline.records import check_available

        assert vllm_config.kv_transfer_config is not None, "it names this class"
        _refuse_what_is_not_stored(vllm_config)
        options = PipelineOptions.of(vllm_config.kv_transfer_config)
        check_available(options.host_bytes)
        if options.has_files:
            check_directory(options)

    @classmethod
    def check_setup(cls, scratch: Path) -> CheckSetup:
        """Little memory, so that records are evicted; one way of loading, since what "auto" chooses
        depends on times, and a check is to be repeatable. Give the others by `--config`."""
        return CheckSetup({"host_bytes": CHECK_HOST_BYTES, "load_mode": "layerwise"})

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: EngineConfig) -> str:
        """Records hold blocks as "NHD" pages do."""
        return "NHD"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """False: it has gates, see `get_layer_gates`."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PipelineStats:
        """Statistics of this kind that consist of a copy of `data`."""
        return PipelineStats(data=dict(data or {}))


def _most_inflight(config: EngineConfig) -> int:
    """Steps that may not have ended, with the empty one that may go behind one that computes."""
    depth = config.scheduler_config.max_inflight_steps
    return depth if depth == 1 else depth + 1


def _refuse_what_is_not_stored(config: EngineConfig) -> None:
    """Raises: `ConfigError`."""
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            "PipelineConnector works with one worker only: leave out tensor_parallel_size, or use"
            " ExampleConnector."
        )
    if config.hidden_state_layer_ids:
        raise ConfigError(
            "PipelineConnector does not store hidden states, so prompts that it loads would lack"
            " them: leave out hidden_state_layer_ids, or this connector."
        )
