"""What `kv_connector_extra_config` may say to PipelineConnector."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from interlace.engine.config import KVTransferConfig
from interlace.engine.kv_connector import KVCacheConfig
from interlace.engine.options import Options

LoadMode = Literal["auto", "recompute", "bulk", "layerwise", "hybrid"]
"""See `PipelineOptions.load_mode`."""
_LONGEST_MS = 60_000.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineOptions(Options):
    """Unknown keys and bad values are refused with `ConfigError`."""

    host_bytes: int = 4 << 30
    """Host memory for records, pinned beside a GPU. Whole records fit into it, at least one."""
    load_mode: LoadMode = "auto"
    """How a request's stored KV comes back: "layerwise", within the step, each layer while those
    before it compute; "bulk", beside the steps, before the request joins the batch; "hybrid", from
    the back beside the steps, while those compute it from the front; "recompute", not at all;
    "auto" chooses for each request what its measured rates promise to be soonest."""
    group_size: int = 2
    """Layers that share a gate. The first and the last one have gates of their own: see
    `LayerGroups`."""
    max_load_stall_ms: float = 20.0
    """Under "auto": how long the requests of a batch, taken together, may wait for a load within
    their step. And about how long a step may take at most that computes the front of a load from
    the back, where others run."""

    def __post_init__(self) -> None:
        self.require_int("host_bytes", 1)
        self.require_choice("load_mode", get_args(LoadMode))
        self.require_int("group_size", 1)
        self.require_number("max_load_stall_ms", 0, _LONGEST_MS)

    @classmethod
    def of(
        cls, config: KVTransferConfig, kv_cache_config: KVCacheConfig | None = None
    ) -> PipelineOptions:
        """Raises: `ConfigError`, also for what does not fit `kv_cache_config`."""
        options = cls(
            **{str(key): value for key, value in config.kv_connector_extra_config.items()}
        )
        if kv_cache_config is not None:
            options._check_fit(kv_cache_config)
        return options

    def _check_fit(self, kv_cache_config: KVCacheConfig) -> None:
        (group,) = kv_cache_config.kv_cache_groups
        num_layers = len(group.layer_names)
        self.require_int("group_size", 1, num_layers)
        record_bytes = num_layers * group.kv_cache_spec.page_size_bytes
        self.require(
            self.host_bytes >= record_bytes,
            f"host_bytes={self.host_bytes} holds no record; one takes {record_bytes} bytes with"
            " this model and block size.",
        )
