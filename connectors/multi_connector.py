"""MultiConnector: several KV connectors as one.

    KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={
        "connectors": [
            {"kv_connector": "ExampleConnector",
             "kv_connector_extra_config": {"shared_storage_path": "~/kv"}},
            {"kv_connector": "MyConnector", "kv_connector_module_path": "my_package.my_module",
             "kv_role": "kv_producer"}]})

Children inherit what they do not set, the role and the engine_id too. A class that is in no
registry but the caller's own needs `kv_connector_module_path`.

**What it stores**: nothing itself. Every child is told of every request and every step, so all of
them save; a request that children hold is released when each of them has reported it.

**When it loads**: the first child, in the configuration's order, that has something for a request
loads it. The others are told of its blocks and of 0 tokens, so they can save what was loaded. For
them loaded tokens look as if the step computed them: so they lie there when the layer's attention
has run. Blocks of an asynchronous load they hear of when it has ended, since nothing lies there
before; if the request ends meanwhile, it ends without blocks for them.

**What it guarantees**, also where vLLM 0.20.2 does otherwise:

- A match query reaches all children, also if one answers None; if any does, the answer is None.
- What an earlier query found is void after the next one, and after the request's end.
- A load is ended by the report of the child that loads. Reports that nobody waits for, and second
  ones, end nothing: a held request waits for each child that asked, not for a number of reports.
  The engine is told once of each request, by one kind of report.
- All children hear of blocks that could not be filled; each sees of all else only its own.
- Children of one class do not collide: statistics go by child, and so do events and metadata.
- Whatever a child raises, the others are still called; the error names the child.

Two children whose class requires different layouts are refused, and so is a child that only some of
several workers report for.

    multi_children.py   the configuration, and how all children are called
    multi_messages.py   what the two sides tell each other
    multi_scheduler.py  the scheduler side: choices, loads, holds
    multi_views.py      what one child sees
    multi_worker.py     the worker side's hooks
    multi_ledger.py     which reports the engine gets
    multi_stats.py      statistics and their exporters
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlace.connectors.base import (
    CheckSetup,
    KVConnectorBase_V1,
    SupportsHMA,
    supports_hma,
)
from interlace.connectors.multi_children import Child, child_specs, validate_children
from interlace.connectors.multi_messages import (
    MultiHandshakeMetadata,
    MultiMetadata,
)
from interlace.connectors.multi_scheduler import MultiScheduler, finished_count
from interlace.connectors.multi_stats import MultiKVConnectorPromMetrics, MultiKVConnectorStats
from interlace.connectors.multi_worker import MultiWorkerSide
from interlace.engine.config import EngineConfig, KVTransferConfig
from interlace.engine.errors import ConfigError
from interlace.engine.kv_connector import (
    KVCacheBlocks,
    KVCacheConfig,
    KVConnectorHandshakeMetadata,
    KVConnectorOutput,
    KVConnectorRole,
)
from interlace.engine.kv_events import KVCacheEvent
from interlace.engine.request import Request
from interlace.engine.scheduler_output import SchedulerOutput

if TYPE_CHECKING:
    from interlace.engine.block_pool import BlockPool


class MultiConnector(MultiWorkerSide):
    """See the module's docstring, and the base class for when each method is called.

    `MultiConnector(...)` makes a `MultiConnectorHMA` if all children know several KV-cache groups.
    """

    def __new__(
        cls,
        vllm_config: EngineConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> MultiConnector:
        """Raises: `ConfigError`, as the constructor."""
        made: type[MultiConnector] = cls
        if cls is MultiConnector:
            specs = child_specs(vllm_config.kv_transfer_config)
            if all(supports_hma(spec.cls) for spec in specs):
                made = MultiConnectorHMA
        return super().__new__(made)

    def __init__(
        self,
        vllm_config: EngineConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        """Makes the children. Raises: `ConfigError`, naming the child."""
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler = MultiScheduler(self._children)

    @property
    def children(self) -> tuple[KVConnectorBase_V1, ...]:
        """This side of each child, in order."""
        return tuple(child.connector for child in self._children)

    @property
    def is_idle(self) -> bool:
        """Whether this side of MultiConnector itself remembers no request."""
        return self._scheduler.is_idle and self._ledger.is_idle

    # ---------------------------------------------------------------- scheduler side

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """The answer of the first child that has something; None while any does not know yet."""
        return self._scheduler.match(request, num_computed_tokens)

    def get_compute_end(self, request: Request) -> int | None:
        """None: a request waits for its load, whichever child brings it, since the others may not
        save what is not all there."""
        return None

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The child that was chosen by the last query loads; the others hear of 0 tokens."""
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MultiMetadata:
        """All children's, in their slots."""
        return self._scheduler.build(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Each child sees its own part, and all invalid blocks; the object stays as it is."""
        self._scheduler.applied(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Held if any child asks for it, until all that ask have reported; parameters are merged.

        An exception of a child, and a parameter that two children give, is the request's error; it
        is only logged if a child holds the blocks, which an error would free.
        """
        return self._scheduler.finished(request, (block_ids,))

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Those of all children, one child after the other."""
        taken = self._each("take_events", lambda c: list(c.take_events()))
        return [event for events in taken for event in events]

    def get_finished_count(self) -> int | None:
        """All workers. Raises: `ConfigError` for a child, beside others, that answers otherwise."""
        return finished_count(self._children, self._vllm_config.parallel_config.world_size)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """For all children."""
        self._each("bind_gpu_block_pool", lambda c: c.bind_gpu_block_pool(gpu_block_pool))

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Each child gets what its own workers said."""

        def tell(child: Child) -> None:
            own = {
                rank: part
                for rank, said in metadata.items()
                if isinstance(said, MultiHandshakeMetadata)
                and (part := said.parts[child.index]) is not None
            }
            child.connector.set_xfer_handshake_metadata(own)

        self._children.each("set_xfer_handshake_metadata", tell)

    def reset_cache(self) -> bool:
        """All are asked; False if any of them says False."""
        answers = self._each("reset_cache", lambda c: c.reset_cache())
        return all(answer is not False for answer in answers)

    # ---------------------------------------------------------------- both sides

    def shutdown(self) -> None:
        """Of all children, whatever one of them raises; the first error is raised afterwards."""
        self._each("shutdown", lambda c: c.shutdown())

    # ---------------------------------------------------------------- of the class

    @classmethod
    def validate_config(cls, vllm_config: EngineConfig) -> None:
        """Of all children. Raises: `ConfigError`, naming the child."""
        validate_children(vllm_config)

    @classmethod
    def check_setup(cls, scratch: Path) -> CheckSetup:
        """Two ExampleConnectors with a folder each."""
        from interlace.connectors.example_connector import ExampleConnector

        setups = [ExampleConnector.check_setup(scratch / name) for name in ("first", "second")]
        children = [
            {"kv_connector": "ExampleConnector", "kv_connector_extra_config": setup.extra_config}
            for setup in setups
        ]
        return CheckSetup({"connectors": children}, setups[0].engine_options)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: EngineConfig) -> str | None:
        """What the children need. Raises: `ConfigError`, naming two that need different ones."""
        needed: dict[str, str] = {}  # layout -> key of the first child that needs it
        for spec in child_specs(vllm_config.kv_transfer_config):
            layout = spec.cls.get_required_kvcache_layout(spec.engine_config(vllm_config))
            if layout is not None:
                needed.setdefault(layout, spec.key)
        if len(needed) > 1:
            said = " and ".join(f"{key} needs {layout!r}" for layout, key in needed.items())
            raise ConfigError(
                f"MultiConnector's children need different KV-cache layouts: {said}. There is one"
                " for all: leave one of them out."
            )
        return next(iter(needed), None)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """If any child does."""
        specs = child_specs(
            KVTransferConfig(
                kv_connector=cls.__name__,
                kv_role="kv_both",
                kv_connector_extra_config=extra_config,
            )
        )
        return any(
            spec.cls.requires_piecewise_for_cudagraph(dict(spec.config.kv_connector_extra_config))
            for spec in specs
        )

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> MultiKVConnectorStats:
        """Child by child. Raises: `ConfigError`, a ValueError, for keys of no child."""
        return MultiKVConnectorStats.rebuilt(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: EngineConfig,
        metric_types: Mapping[type[Any], Callable[..., Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> MultiKVConnectorPromMetrics | None:
        """The children's, with a label that tells them apart; None if none has any."""
        metrics = MultiKVConnectorPromMetrics(
            vllm_config,
            metric_types,
            labelnames,
            per_engine_labelvalues,
            child_specs(vllm_config.kv_transfer_config),
        )
        return metrics if metrics.exporters else None


class MultiConnectorHMA(MultiConnector, SupportsHMA):
    """A MultiConnector all of whose children know several KV-cache groups."""

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`."""
        return self._scheduler.finished(request, block_ids)
