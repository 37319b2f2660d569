"""The base class of every KV connector: vLLM 0.20.2's names, signatures and defaults.

An engine makes two instances of one class, first the WORKER and then the SCHEDULER, both on the
device thread, where it shuts both down again. Between those two calls the one in the role SCHEDULER
is called on the event loop (but for the handshake and `get_finished_count`, before the first step),
the one in the role WORKER on the device thread; what passes between them is metadata and outputs.
Scheduler-side methods must return at once: no file I/O, no waiting.
When a method breaks its contract or raises, the error belongs to one request if the method was
called for that request alone and nothing else depends on it (`get_num_new_matched_tokens`,
`request_finished`); all else ends the engine with a `ConnectorError` that names the connector and
the method.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

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
from interlace.engine.kv_connector_stats import KVConnectorPromMetrics, KVConnectorStats
from interlace.engine.kv_events import KVCacheEvent, KVConnectorKVEvents
from interlace.engine.ports import Lanes, LayerGates, TransferRecorder
from interlace.engine.request import Request
from interlace.engine.scheduler_output import SchedulerOutput
from interlace.engine.transfer_picture import ConnectorPicture

if TYPE_CHECKING:
    import torch

    from interlace.engine.block_pool import BlockPool
    from interlace.layers.forward_context import ForwardContext

__all__ = [
    "CheckSetup",
    "CopyBlocksOp",
    "KVCacheBlocks",
    "KVCacheConfig",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorOutput",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorWorkerMetadata",
    "SupportsHMA",
    "supports_hma",
]

logger = logging.getLogger(__name__)

CopyBlocksOp = Callable[
    [
        "dict[str, torch.Tensor]",
        "dict[str, torch.Tensor]",
        list[int],
        list[int],
        Literal["h2d", "d2h"],
    ],
    None,
]
"""(source caches, target caches, source block ids, target block ids, direction)."""


class CheckSetup(NamedTuple):
    """How `interlace check` is to run a connector."""

    extra_config: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it
    """`kv_connector_extra_config`."""
    engine_options: dict[str, Any] = {}  # noqa: RUF012
    """Keywords of `EngineConfig` that the connector cannot do without."""


class SupportsHMA(ABC):
    """Mix-in of connectors that know several KV-cache groups."""

    @abstractmethod
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`, which it replaces, with one list of block ids per group."""


def supports_hma(connector: object) -> bool:
    """Whether `connector`, a class or an instance, knows several KV-cache groups."""
    if isinstance(connector, type):
        return issubclass(connector, SupportsHMA)
    return isinstance(connector, SupportsHMA)


class KVConnectorBase_V1(ABC):  # noqa: N801 - the protocol's name
    """Brings KV from elsewhere and takes it there. See the module's docstring.

    Beside vLLM's protocol there are extensions, all of which a connector may leave alone: `lanes`,
    `get_layer_gates`, `get_compute_end`, `advance_transfers`, `get_late_load_errors`,
    `get_transfer_pictures`, `record_transfers`, `KVConnectorMetadata.is_idle`,
    `default_load_failure_policy`, `validate_config`, and what `interlace check` is told by
    `kv_is_synthetic`, `check_setup`, `store_fault_kinds` and `inject_store_fault`.
    """

    kv_is_synthetic: bool = False
    """Whether loaded KV is invented, so that answers cannot be right: `interlace check` then looks
    at protocol, leaks and isolation only. Of the class, or of an instance: the worker side is
    asked."""
    default_load_failure_policy: Literal["fail", "recompute"] = "fail"
    """`KVTransferConfig.kv_load_failure_policy` where that says nothing. Of the class."""
    store_fault_kinds: tuple[str, ...] = ()
    """Ways in which `inject_store_fault` can damage what is stored; as above."""

    def __init__(
        self,
        vllm_config: EngineConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        """Called once per role before the first step, on the device thread: it may wait for files.

        `vllm_config` is resolved: all of its parts can be read. Raises: `ConfigError` if it has
        no `kv_transfer_config`.
        """
        if vllm_config.kv_transfer_config is None:
            raise ConfigError(
                f"{type(self).__name__} needs a configuration with a kv_transfer_config: pass"
                " EngineConfig(kv_transfer_config=KVTransferConfig(...))."
            )
        if kv_cache_config is None:
            logger.warning(
                "%s was made without a kv_cache_config: it cannot know how the KV cache lies."
                " Pass the constructor's third argument on to KVConnectorBase_V1.",
                type(self).__name__,
            )
        self._connector_metadata: KVConnectorMetadata | None = None
        self._vllm_config = vllm_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        self._role = role

    @property
    def role(self) -> KVConnectorRole:
        """Which side this instance is."""
        return self._role

    @property
    def lanes(self) -> Lanes:
        """Where to get lanes, for all that goes on beside the step. An extension of the protocol.

        Work that goes through lanes can be replayed by a seed: `interlace check` hands out virtual
        ones. Elsewhere they are threads.
        """
        if self._vllm_config.lanes is not None:
            return self._vllm_config.lanes
        from interlace.layers.lanes import ThreadLanes

        return ThreadLanes()

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """Whether one tensor with all layers is preferred; asked of the worker side, once."""
        return False

    def inject_store_fault(self, kind: str, block_hash: bytes) -> Iterable[bytes]:
        """Damage the stored KV of one block, so that its loads fail until it is saved again.

        `kind` is one of `store_fault_kinds`. Called by `interlace check` on a worker side, between
        two steps. Returns the hashes of all blocks that are lost with it, or nothing if the block
        is not stored. An extension of the protocol, for connectors that declare such kinds.
        """
        raise NotImplementedError(f"{type(self).__name__} declares no store_fault_kinds")

    # ---------------------------------------------------------------- worker side, once

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:  # noqa: B027
        """Layer name -> its pages [num_blocks, 2, block_size, num_kv_heads, head_dim].

        Device thread, once, before the first step. The heads are those of this worker. Strides
        tell how pages lie: "HND" ones have heads before tokens in memory. A cache-only layer,
        if there is one, comes last: [num_blocks, block_size, vectors per token, vector size].
        The tensors stay the engine's: a connector writes only into blocks that it was told to
        fill, and only while it may.
        """

    def register_cross_layers_kv_cache(  # noqa: B027
        self, kv_cache: torch.Tensor, attn_backend: type[Any]
    ) -> None:
        """One tensor with all layers, in place of `register_kv_caches`; never both.

        For a connector with `prefer_cross_layer_blocks`, unless there is a cache-only layer.
        `kv_cache` is contiguous, [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim] or
        what else `attn_backend.get_kv_cache_stride_order(include_num_layers_dimension=True)` says.
        """

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:  # noqa: B027
        """How to copy blocks between host and device; device thread, once, after registering.

        `copy_operation(source, target, source_block_ids, target_block_ids, "h2d" or "d2h")` takes
        dicts of pages by layer name and is complete when it returns.
        """

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What the scheduler side is to know of this worker; once, after registering."""
        return None

    def get_layer_gates(self) -> LayerGates | None:
        """Gates with which loads within a step work in captured graphs too; None has none.

        Asked once, on a GPU, after registering and before graphs are captured. With gates, each
        short step is captured a second time with a wait before every layer's KV write, and a step
        that loads is replayed so: `start_load_kv` queues the copies layer by layer, arms the gates
        for the step's id behind them, and returns; no layer hook is called. Were they not all
        armed for that step, it runs eager, with its layer hooks, though `start_load_kv` was told
        that a full graph would run. Gates that are `LateLayerGates` too may arm all but the first
        layers' when those are launched: then a long load holds nothing up. A connector with gates
        need not say `requires_piecewise_for_cudagraph`. An extension of the protocol.
        """
        return None

    # ---------------------------------------------------------------- worker side, every step
    # In this order. All on the device thread.

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:  # noqa: B027
        """Finish or cancel every read of blocks that this step hands on, before returning.

        First of all in every step, also in one without tokens. A read that goes on sees another
        request's KV and files it under a hash that it does not have.
        """

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The step's metadata, before its other hooks. An override calls super."""
        self._connector_metadata = connector_metadata

    def has_connector_metadata(self) -> bool:
        """Whether metadata is bound. The layer hooks are only called while it is."""
        return self._connector_metadata is not None

    def _get_connector_metadata(self) -> KVConnectorMetadata:
        """What is bound. Raises: `ConnectorError` outside of a step."""
        if self._connector_metadata is None:
            raise ConnectorError(
                f"{type(self).__name__} asked for its metadata outside of a step: it is bound"
                " between bind_connector_metadata and clear_connector_metadata."
            )
        return self._connector_metadata

    @abstractmethod
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begin the step's loads.

        Synchronous ones are complete, layer by layer, when `wait_for_layer_load` returns.
        Asynchronous ones must not make this wait: it would hold up every request of the step. In
        a step without tokens `forward_context.attn_metadata` is None.
        """

    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return when the layer's synchronously loaded KV is in its pages.

        Before each layer writes its new K and V and attends. Returning early lets the layer read
        what is not there; what failed is to be reported by `get_block_ids_with_load_errors`.
        """

    @abstractmethod
    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """The layer's new K and V have been written to its pages `kv_layer`.

        After each layer's attention. The copy may go on until `wait_for_save`. What is saved must
        not be served before the scheduler side knows that the step was applied and that no block
        beneath was bad.
        """

    @abstractmethod
    def wait_for_save(self) -> None:
        """Return when the step's pages may be overwritten.

        After the forward; not called in a step without tokens. Pages that are read after this
        returns may hold another request's KV, unless `handle_preemptions` and a held
        `request_finished` fence the read.
        """

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Ids whose (saves, loads) have ended since the last call, each of them once.

        In every step. `finished_req_ids` are requests that ended since the step before; each is
        passed once, to each worker. Sending: only ids that were passed here, now or before, and
        whose `request_finished` returned True; their blocks return to the pool. Receiving: every
        asynchronous load, whether it went well or badly, and also if its request was aborted
        meanwhile. Until it is reported, the request waits and its blocks stay; reported early, it
        computes on what is not there. With several workers an id takes effect when
        `get_finished_count` of them have reported it. Late and repeated reports, and those of ids
        that nobody waits for, are counted and ignored, where vLLM 0.20.2 dies.
        """
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that a load promised and did not fill.

        In every step, after `get_finished`. Of a synchronous load in that very step; of an
        asynchronous one at the latest in the step that lists its request as received. A block
        that is not reported counts as filled, and everyone with that prefix is served from it.
        With several workers a block is bad as soon as one of them says so. vLLM 0.20.2 leaves bad
        blocks in the prefix cache under some policies; here every request that shares a bad block
        is set back, and its blocks from there on cannot be hit.
        """
        return set()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Statistics since the last call, or None: in every step of the worker side, and of the
        scheduler side when a step is applied. The engine adds them up: `snapshot()`."""
        return None

    def get_kv_connector_kv_cache_events(self) -> KVConnectorKVEvents | None:
        """Cache events since the last call, or None. Those of all workers are merged and come to
        the scheduler side's `update_connector_output`; `take_events` makes them public."""
        return None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What the scheduler side should know of this step; the last question of a step."""
        return None

    def clear_connector_metadata(self) -> None:
        """The step is over. An override calls super."""
        self._connector_metadata = None

    def advance_transfers(self) -> bool:
        """Move on what goes on beside the steps; whether there is more of it.

        While the device thread waits for the device, outside of any step's hooks and without
        metadata: once when it begins to wait for a step, and then again and again while the answer
        is True and the step has not ended. Likewise while nothing computes and somebody waits for
        a load or a save, for some milliseconds: False is followed by a step that asks for news.
        So transfers need not be queued by the hooks, which hold up the launch of steps, nor far
        ahead. What is done here holds up whoever waits for the step's tokens: a fraction of a
        millisecond at a time. Not called while the connector is idle
        in the step that was launched last, nor on a device that computes within the launch, as a
        CPU does. An extension of the protocol.
        """
        return False

    def get_late_load_errors(self) -> set[int]:
        """Blocks that the step loaded within itself and that turn out to be bad.

        When the step's tokens have come, before anybody sees them, and only of a step that loads
        within itself. On a GPU `get_block_ids_with_load_errors` is asked when all is queued, and a
        load whose content is checked there is not known to be good by then. What the answer names
        is as if it had been named there. May wait for the end of the check. An extension of the
        protocol.
        """
        return set()

    def record_transfers(self, recorder: TransferRecorder | None) -> None:  # noqa: B027
        """Somebody looks at the engine's steps: tell `recorder` what is copied when, until this is
        called again with None.

        Between steps, on the device thread, and only if somebody asked for it
        (`AsyncEngine.record_steps`); what is under way need not be told of. For each piece, a layer
        or a slice, a lane's work takes `mark()` before it copies and after it, and gives both to
        `add` with what makes the `TransferTiming` of them. A piece without a begin or an end is not
        told of. On a GPU a mark is an event on the current stream, so works of a lane that is a
        stream take them as they queue their copies; a lane that is a thread beside a GPU keeps
        silent. Of several workers the first one is asked. An exception is told to who wanted to
        look, and ends nothing. An extension of the protocol.
        """

    # ---------------------------------------------------------------- scheduler side
    # All on the event loop, while it plans or applies a step.

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens beyond the computed ones can be brought, and whether asynchronously.

        Whenever a request without blocks is considered, so any number of times: it must change
        nothing. `num_computed_tokens` is what the local prefix cache holds. None means "not known
        yet, ask in the next step". The count is from 0 to all that the request lacks; if it is
        all, the engine computes the last token again. "Asynchronously" needs a count above 0.
        Any other answer, or an exception, ends this request with an error.
        """

    def get_compute_end(self, request: Request) -> int | None:
        """Up to where the engine computes the request itself while what is behind is loaded.

        Asked when an asynchronous load was promised, before `update_state_after_alloc`. With None
        the request waits for its load, as in vLLM. With a number of tokens it runs at once: what
        lies before that is computed by the following steps, and the connector loads from there to
        the end of what it promised, from the back. If nothing of that is left to compute, it waits
        all the same. While the load goes on, this is asked whenever a step is planned for the
        request: the answer may fall, down to what steps were planned for by then, and it may rise,
        by blocks that the load has not touched and never will. It is asked once more when
        `get_finished` has reported the load: that answer says what was brought, and holds. When all
        before it is planned, the request goes on behind the load.

        A multiple of the block size, not above the end of what was promised, and below the
        request's last token; anything else ends the request, or, later on, the engine. A bad block
        is computed with all behind it. A preemption ends the load: nothing is written to the
        request's blocks any more when `handle_preemptions` of the step that names it returns, or
        the step waits for it, and no end of the load is reported, be it that `request_finished`
        comes before that step. An extension of the protocol.
        """
        return None

    @abstractmethod
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The request was admitted and holds `blocks`: all of its blocks, not only new ones.

        The connector is to fill the blocks of `num_external_tokens` tokens after the computed
        ones; 0 is common. After an asynchronous load it is called again, with 0. An answer to the
        match query that is not followed by this call is void. An exception ends the engine:
        nobody knows then what will be written where.
        """

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """What the worker side needs for this step, at the end of every `schedule()`.

        Must not change `scheduler_output`, nor return None. `request.num_computed_tokens` does
        not count this step yet. An exception ends the engine. Where the answer `is_idle`, the
        worker side's hooks of the step are not called: see `KVConnectorMetadata`.
        """

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:  # noqa: B027
        """What the worker side reported with a step that is being applied.

        Only if it reported anything; before the finished ids in it take effect, and after
        requests that end with the step were finished. An exception ends the engine.
        """

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request ended: whether it is held, and `kv_transfer_params` for its caller.

        Once per request, before its blocks are freed; `block_ids` is empty if it never had any.
        The blocks of a held request stay its own until `get_finished` reports the id as sent:
        never reported, never free. If an asynchronous load of the request is under way, it is held
        until that is reported.
        After an exception the blocks are freed and the request ends with an error.
        """
        return False, None

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Cache events since the last call; whenever a step was applied. They go to
        `AsyncEngine.events()`, beside the engine's own."""
        return ()

    def get_finished_count(self) -> int | None:
        """How many workers report each id, once at the start; None means all."""
        return None

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:  # noqa: B027
        """The engine's block pool; once, before all other hooks of the scheduler side.

        A connector may look, and hold blocks by `touch`, to let go of them by `free_blocks`: until
        then they are not handed out.
        """

    def set_xfer_handshake_metadata(  # noqa: B027
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Rank -> what `get_handshake_metadata` returned there; ranks without any are left out.

        Once, before the first step; on the device thread, where it may wait for a handshake.
        """

    def reset_cache(self) -> bool | None:
        """Forget all stored KV: `AsyncEngine.reset_prefix_cache(reset_connector=True)`. Only an
        explicit False counts as failure."""
        return None

    # ---------------------------------------------------------------- both sides

    def get_transfer_pictures(self) -> tuple[ConnectorPicture, ...]:
        """What this side would show a person who watches: transfers, lanes, stores.

        From `AsyncEngine.snapshot()`, so a few times a second while somebody looks, and never else.
        Both sides are asked on the event loop's thread, the worker side too, while the device
        thread is at work in its other hooks: so look at what is there, change nothing, take no lock
        that anybody holds for long, and wait for nothing. A device may be asked whether an event
        has passed. Pictures of one `name` are joined; what is empty is not shown. What it raises
        is shown in place of a picture. An extension of the protocol.
        """
        return ()

    def shutdown(self) -> None:  # noqa: B027
        """Release what the connector has: once per instance, on the device thread, after all
        steps, or when the engine could not be opened."""

    # ---------------------------------------------------------------- of the class

    @classmethod  # noqa: B027
    def validate_config(cls, vllm_config: EngineConfig) -> None:
        """Refuse early what the constructor would refuse: a bad option shows before weights load.

        Called before the model is loaded, which may take minutes, and again before an instance is
        made; device thread, so it may look at files, but it must change nothing. `vllm_config` is
        what the user gave: what the model and the machine decide is not known yet, so parts of it
        may be None or cannot be read. The constructor checks all the same. Not called for a class
        with a constructor of its own that inherits this: options that only that one knows would be
        refused. Raises: `ConfigError`. An extension of the protocol.
        """

    @classmethod
    def check_setup(cls, scratch: Path) -> CheckSetup:
        """What `interlace check` runs the connector with if it is given no configuration.

        `scratch` is an empty folder, removed afterwards; each run of a scenario has one, and its
        engines share it one after another. An extension of the protocol.
        """
        return CheckSetup()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: EngineConfig) -> str | None:
        """The layout of pages that the connector needs, or None if it takes any.

        Asked before an instance is made. "NHD" is [block][K,V][token][kv head][head size] in
        memory, and what the engine uses by itself; "HND" has heads before tokens. A connector that
        needs another one is refused.

        Raises: `TypeError` on the base class, which needs none and has no say.
        """
        if cls is KVConnectorBase_V1:
            raise TypeError("ask the connector's own class, not KVConnectorBase_V1, for its layout")
        return None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether the layer hooks must run, so that a step is never one whole device graph.

        Asked when the engine is made: a configured mode with full graphs becomes "PIECEWISE".
        """
        return False

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Statistics of this connector's kind that consist of `data`, empty ones without it; None
        if it has none. The engine makes its own copy of what is reported by it."""
        return None

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: EngineConfig,
        metric_types: Mapping[type[Any], Callable[..., Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """A Prometheus exporter of those statistics, or None. Asked when the engine is made; its
        metrics are in `AsyncEngine.metrics`."""
        return None
