"""DecodeBenchConnector: invented KV, so that decoding can be measured without a prefill.

    EngineConfig(kv_transfer_config=KVTransferConfig(
        kv_connector="DecodeBenchConnector", kv_role="kv_consumer",
        kv_connector_extra_config={"fill_mean": 0.015, "fill_std": 0.0}))

A prompt of N tokens costs one computed token: its first answer token comes out of the step that
admits it, and everything after that is decoding over a context of N. So a benchmark of decoding at
long contexts starts at once; the answers mean nothing (`kv_is_synthetic`).

**What it stores**: nothing.

**When it loads**: within the step, once for each request, when it is first admitted: all that it
lacks but the last token. After a preemption the request is computed like any other.

**What it guarantees**:

- Filled are the blocks behind the locally cached ones, which nobody shares, and the last of them as
  a whole. vLLM 0.20.2 fills the first blocks of the request instead, over what is cached there.
- The filled blocks go into the prefix cache like loaded ones, so prompts with the same beginning
  share them. That poisons the cache on purpose: use the engine for nothing else.
- With `fill_std` 0 every number is `fill_mean`. Else they are normally distributed, and a block's
  numbers follow from the engine's seed, the layer and the block's id: not from timing, nor from how
  many workers share the heads.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from interlace.connectors.base import KVConnectorBase_V1
from interlace.engine.config import EngineConfig, KVTransferConfig
from interlace.engine.errors import ConnectorError
from interlace.engine.kv_connector import (
    KVCacheBlocks,
    KVCacheConfig,
    KVConnectorMetadata,
    KVConnectorRole,
)
from interlace.engine.options import Options
from interlace.engine.request import Request
from interlace.engine.scheduler_output import SchedulerOutput

if TYPE_CHECKING:
    import torch

    from interlace.connectors.decode_bench_fill import BlockFiller
    from interlace.layers.forward_context import ForwardContext

_LARGEST = 1e3
"""Of mean and deviation: every type that KV can have holds what is drawn."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeBenchOptions(Options):
    """What `kv_connector_extra_config` may say. Others and bad values raise `ConfigError`."""

    fill_mean: float = 0.015
    """Of the numbers in K and V."""
    fill_std: float = 0.0
    """Their standard deviation."""

    def __post_init__(self) -> None:
        self.require_number("fill_mean", -_LARGEST, _LARGEST)
        self.require_number("fill_std", 0, _LARGEST)

    @classmethod
    def of(cls, config: KVTransferConfig) -> DecodeBenchOptions:
        """Raises: `ConfigError`."""
        return cls(**config.kv_connector_extra_config)


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeBenchMetadata(KVConnectorMetadata):
    """One step's fills."""

    reqs_to_fill: dict[str, tuple[tuple[list[int], ...], int]]
    """Request id -> (ids of the blocks to fill, per KV-cache group; tokens)."""


class DecodeBenchConnector(KVConnectorBase_V1):
    """See the module's docstring, and the base class for when each method is called."""

    kv_is_synthetic = True

    def __init__(
        self,
        vllm_config: EngineConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        """Raises: `ConfigError` for bad options."""
        super().__init__(vllm_config, role, kv_cache_config)
        self.options = DecodeBenchOptions.of(self._kv_transfer_config)
        self._filled: set[str] = set()  # requests that have had their fill, until they end
        self._to_fill: dict[str, tuple[tuple[list[int], ...], int]] = {}  # for the next message
        self._filler: BlockFiller | None = None

    @classmethod
    def validate_config(cls, vllm_config: EngineConfig) -> None:
        """Raises: `ConfigError` for bad options."""
        assert vllm_config.kv_transfer_config is not None, "it names this class"
        DecodeBenchOptions.of(vllm_config.kv_transfer_config)

    @property
    def is_idle(self) -> bool:
        """Whether this side remembers no request."""
        return not (self._filled or self._to_fill)

    # ---------------------------------------------------------------- scheduler side

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """All that the request lacks but one token; 0 if it has had its fill."""
        if not self._kv_transfer_config.is_kv_consumer or request.request_id in self._filled:
            return 0, False
        return max(0, request.num_tokens - num_computed_tokens - 1), False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Note which blocks are to be filled: those of the promised tokens, the last ones but one.

        What lies before them is cached, and may be shared.
        """
        if num_external_tokens == 0:
            return
        end = request.num_tokens - 1
        block_size = self._vllm_config.block_size
        first, stop = (end - num_external_tokens) // block_size, -(-end // block_size)
        ids = tuple(group[first:stop] for group in blocks.get_block_ids())
        self._to_fill[request.request_id] = ids, num_external_tokens
        self._filled.add(request.request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> DecodeBenchMetadata:
        """The step's fills; none of them is told twice."""
        fills, self._to_fill = self._to_fill, {}
        return DecodeBenchMetadata(fills)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request."""
        self._filled.discard(request.request_id)
        self._to_fill.pop(request.request_id, None)
        return False, None

    # ---------------------------------------------------------------- worker side

    def _filler_of(self, layers: list[torch.Tensor]) -> BlockFiller:
        from interlace.connectors.decode_bench_fill import BlockFiller

        parallel = self._vllm_config.parallel_config
        return BlockFiller(
            layers,
            mean=self.options.fill_mean,
            std=self.options.fill_std,
            seed=self._vllm_config.seed,
            rank=parallel.rank,
            num_ranks=parallel.world_size,
        )

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Fill the attention layers; a cache-only layer is left alone.

        Raises: `ConnectorError` if layers are missing.
        """
        if self._kv_cache_config is None:
            names = list(kv_caches)
        else:
            groups = self._kv_cache_config.kv_cache_groups
            names = [name for group in groups for name in group.layer_names]
        missing = sorted(set(names) - kv_caches.keys())
        if missing:
            raise ConnectorError(
                f"DecodeBenchConnector: the pages of {', '.join(missing)} were not registered."
            )
        self._filler = self._filler_of([kv_caches[name] for name in names])

    def register_cross_layers_kv_cache(
        self, kv_cache: torch.Tensor, attn_backend: type[Any]
    ) -> None:
        """Fill the layers of one tensor."""
        order = attn_backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
        logical = kv_cache.permute([order.index(i) for i in range(len(order))])
        self._filler = self._filler_of(list(logical))

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Fill all layers of the step's blocks, so no layer has anything to wait for."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, DecodeBenchMetadata)
        ids = [i for groups, _ in metadata.reqs_to_fill.values() for i in groups[0]]
        if not ids:
            return
        if self._filler is None:
            raise ConnectorError("DecodeBenchConnector: no pages were registered to be filled.")
        self._filler.fill(ids)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Everything was filled by `start_load_kv`."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""
