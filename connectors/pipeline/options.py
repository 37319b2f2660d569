"""What `kv_connector_extra_config` may say to PipelineConnector."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, get_args

from interlace.engine.config import KVTransferConfig
from interlace.engine.kv_connector import KVCacheConfig
from interlace.engine.options import Options, is_path

LoadMode = Literal["auto", "recompute", "bulk", "layerwise", "hybrid"]
"""See `PipelineOptions.load_mode`."""
StoreKind = Literal["memory", "file"]
"""See `PipelineOptions.store`."""
_TIERS: tuple[tuple[StoreKind, ...], ...] = (("memory",), ("memory", "file"), ("file",))
_LONGEST_MS = 60_000.0
_LONGEST_S = 3600.0


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

    store: StoreKind | None = None
    """Where KV lies: "memory", in `host_bytes`; "file", in slab files below `path` too, which a
    restarted engine, and others beside it, find again. Then host memory is what is read lately.
    None: what `tiers` says, "memory" without them."""
    tiers: Sequence[StoreKind] | None = None
    """The same in other words, from the first place where a block is looked for to the last:
    ["memory"]; ["memory", "file"], which is what "file" means; or ["file"] alone. Then nothing
    stays in host memory: it is buffers that blocks are read into, and written from."""
    path: str | None = None
    """Of the store's directory, which it has for itself. Only with, and always with, files."""
    capacity_bytes: int | None = None
    """Of all slabs below `path`, whoever wrote them; None: what the file system holds."""
    min_free_bytes: int = 1 << 30
    """That the store leaves free on its file system."""
    slab_bytes: int = 256 << 20
    """Of one file. Files are removed as wholes, to make room."""
    registered_bytes: int = 4 << 30
    """Of slabs that a GPU copies from directly, those used last: they are registered with it as
    long as they lie in the page cache, which keeps them there. 0: all is read by the host."""
    store_threshold: int = 1
    """A block is written to a file when it is used so often: 1, when it is computed; 2, when it is
    loaded from memory for the first time, or where nothing stays there computed once more."""
    read_deadline_s: float = 10.0
    """How long a read of one block may take. What takes longer is computed."""

    def __post_init__(self) -> None:
        if self.store is not None:
            self.require_choice("store", get_args(StoreKind))
        if self.tiers is not None:
            self._check_tiers(self.tiers)
        self.require(
            self.path is None or is_path(self.path),
            f"path must name a directory, not {self.path!r}.",
        )
        self.require(
            (self.path is not None) == self.has_files,
            'path is for store="file", or tiers with "file", and has to be there with it: give'
            " both, or neither.",
        )
        if self.capacity_bytes is not None:
            self.require_int("capacity_bytes", 1)
        self.require_int("min_free_bytes", 0)
        self.require_int("slab_bytes", 1)
        self.require(
            self.capacity_bytes is None or self.capacity_bytes >= self.slab_bytes,
            f"capacity_bytes={self.capacity_bytes} is less than one file of"
            f" slab_bytes={self.slab_bytes}: allow more, or make files smaller.",
        )
        self.require_int("registered_bytes", 0)
        self.require_int("store_threshold", 1)
        self.require_number("read_deadline_s", 0.001, _LONGEST_S)
        self.require_int("host_bytes", 1)
        self.require_choice("load_mode", get_args(LoadMode))
        self.require_int("group_size", 1)
        self.require_number("max_load_stall_ms", 0, _LONGEST_MS)

    def _check_tiers(self, tiers: object) -> None:
        known = [list(kinds) for kinds in _TIERS]
        self.require(
            isinstance(tiers, list | tuple) and list(tiers) in known,
            f"tiers must be one of {', '.join(map(str, known))}, not {tiers!r}.",
        )
        assert self.tiers is not None
        self.require(
            self.store in (None, self.tiers[-1]),
            f"store={self.store!r} and tiers={list(self.tiers)} are at odds: leave one of them out,"
            " or let store be the last of the tiers.",
        )

    @property
    def has_files(self) -> bool:
        """Whether blocks are kept in files."""
        return "file" in (self.tiers or (self.store,))

    @property
    def keeps_in_memory(self) -> bool:
        """Whether blocks are kept in host memory, too."""
        return self.tiers is None or "memory" in self.tiers

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
        if not config.is_kv_consumer:  # it loads nothing: nothing need be registered for that
            options = dataclasses.replace(options, registered_bytes=0)
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
