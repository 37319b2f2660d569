"""The engine's options: flat keywords with vLLM's names, and the parts that vLLM groups them in.

Defaults are written here once. What a machine or a model decides is filled in by
`EngineConfig.resolved`, never by changing an object.
"""

from __future__ import annotations

import dataclasses
import hashlib
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from interlace.engine.errors import ConfigError
from interlace.engine.options import Options

if TYPE_CHECKING:
    from interlace.engine.ports import Lanes

SchedulingPolicy = Literal["fcfs", "priority"]
KVRole = Literal["kv_producer", "kv_consumer", "kv_both"]
CUDAGRAPH_MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


_READ_OUTSIDE = (
    "kv_buffer_device",
    "kv_buffer_size",
    "kv_rank",
    "kv_parallel_size",
    "kv_ip",
    "kv_port",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVTransferConfig(Options):
    """Which KV connector to use and how (vLLM's `KVTransferConfig`).

    What nothing reads is refused: `enable_permute_local_kv` here, and by `KVConnectorFactory` the
    fields for connectors with a network of their own, if the connector is one of Interlace's.
    """

    kv_connector: str | None = None
    """Name of a registered connector, or of a class in `kv_connector_module_path`. Read by
    `KVConnectorFactory`."""
    kv_role: KVRole | None = None
    """Mandatory as soon as `kv_connector` is set. Read by the connectors: a producer saves, a
    consumer loads."""
    kv_connector_module_path: str | None = None
    """Module to import the class from; wins over the registry. Read by `KVConnectorFactory`."""
    kv_connector_extra_config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Options of the connector's own, which reads them and refuses unknown ones."""
    kv_load_failure_policy: Literal["fail", "recompute"] | None = None
    """What becomes of a request whose KV could not be loaded: it ends with an error, or the lost
    part is computed. None is what the connector's class says: "fail", as in vLLM, for most. Read by
    the scheduler."""
    engine_id: str = dataclasses.field(default_factory=lambda: str(uuid.uuid4()))
    """Read by MultiConnector, whose children inherit it, and by connectors that talk with other
    engines."""
    kv_buffer_device: str = "cpu"
    """Where a connector stages transfers. Read by outside connectors only, as are the next five."""
    kv_buffer_size: float = 1e9
    """Bytes that a connector may stage."""
    kv_rank: int | None = None
    """This engine's place among those that transfer KV to each other."""
    kv_parallel_size: int = 1
    """How many engines these are."""
    kv_ip: str = "127.0.0.1"
    """Where a connector listens, or calls."""
    kv_port: int = 14579
    """See `kv_ip`."""
    enable_permute_local_kv: bool = False
    """Nothing reads this, so True is refused: a connector that needs pages by head says "HND" in
    `get_required_kvcache_layout`."""

    def __post_init__(self) -> None:
        for name in ("kv_connector", "kv_connector_module_path"):
            value = getattr(self, name)
            self.require(
                value is None or (isinstance(value, str) and value.strip() != ""),
                f"{name} must be a name, not {value!r}; leave it out for none.",
            )
        self.require_choice("kv_role", (None, "kv_producer", "kv_consumer", "kv_both"))
        self.require_choice("kv_load_failure_policy", (None, "fail", "recompute"))
        self.require(
            self.kv_connector is None or self.kv_role is not None,
            "kv_connector needs a kv_role: kv_producer, kv_consumer or kv_both.",
        )
        self.require(
            not self.enable_permute_local_kv,
            "nothing reads enable_permute_local_kv: a connector that needs HND pages says so in"
            " get_required_kvcache_layout. Leave it out.",
        )
        self.require(
            isinstance(self.kv_connector_extra_config, Mapping),
            "kv_connector_extra_config must be a mapping.",
        )
        self._check_fields_of_others()

    def _check_fields_of_others(self) -> None:
        """Refuse what no connector could use, before one fails over it far from here."""
        for name in ("engine_id", "kv_buffer_device", "kv_ip"):
            value = getattr(self, name)
            self.require(
                isinstance(value, str) and value.strip() != "",
                f"{name} must be a text that is not empty, not {value!r}; leave it out for the"
                " default.",
            )
        self.require_number("kv_buffer_size", 0)
        if self.kv_rank is not None:
            self.require_int("kv_rank", 0)
        self.require_int("kv_parallel_size", 1)
        self.require_int("kv_port", 0, 65535)

    @property
    def is_kv_transfer_instance(self) -> bool:
        """Whether there is a connector at all."""
        return self.kv_connector is not None

    @property
    def is_kv_producer(self) -> bool:
        """Whether this engine saves KV for others."""
        return self.is_kv_transfer_instance and self.kv_role in ("kv_producer", "kv_both")

    @property
    def is_kv_consumer(self) -> bool:
        """Whether this engine loads KV of others."""
        return self.is_kv_transfer_instance and self.kv_role in ("kv_consumer", "kv_both")

    @property
    def fields_of_others(self) -> list[str]:
        """Fields that only outside connectors read, and that were set to something else than their
        defaults."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return [name for name in _READ_OUTSIDE if getattr(self, name) != defaults[name]]

    def compute_hash(self) -> str:
        """A digest of what changes the computation graph: nothing here does."""
        return hashlib.sha256(b"").hexdigest()

    def get_from_extra_config(self, key: str, default: Any) -> Any:
        """One of the connector's own options."""
        return self.kv_connector_extra_config.get(key, default)


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the loaded model is. Sizes in tokens."""

    model: str
    dtype: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    seed: int
    model_identity: str = ""
    """Hex digest of the normalised configuration and all weights: models whose digests are equal
    compute equal KV. Only known where a KV connector is used, since it reads all weights once."""


@dataclasses.dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Which of the engine's workers a connector's instance belongs to."""

    rank: int = 0
    """Of the worker; 0 on the scheduler side."""
    world_size: int = 1
    """Workers in all: each has the pages of its share of the KV heads."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_rank: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int
    """Tokens per block."""
    num_gpu_blocks: int
    """Blocks in the pool, the null block (id 0) included."""
    enable_prefix_caching: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step and of the queues."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: SchedulingPolicy = "fcfs"
    max_inflight_steps: int = 1
    max_waiting_requests: int = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig(Options):
    """All options of an engine. Immutable; unknown keywords and bad values are refused.

    None means "decided when the model is loaded"; `AsyncEngine.config` then shows what was
    decided. Raises: `ConfigError` at construction.
    """

    model: str = "smollm2-135m"
    """`smollm2-135m`, a GGUF file, a Hugging Face folder, a hub id, or random weights:
    `dummy:llama-3.1-8b`, `dummy:qwen3-0.6b`, `dummy:PATH/config.json`."""
    tokenizer: str | None = None
    """Folder with a `tokenizer.json` to use in place of the model's own tokenizer."""
    dtype: str = "auto"
    """Of weights and KV cache; `auto` is float32 on a CPU."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: a GPU that works, else the CPU."""
    max_model_len: int | None = None
    """Most tokens of a request, prompt and answer together; None is the model's own limit."""
    max_num_seqs: int = 256
    """Most requests in one step."""
    max_num_batched_tokens: int | None = None
    """Token budget of one step; None is 2048 on a CPU, 8192 on a GPU."""
    block_size: int = 16
    """Tokens per KV block."""
    num_gpu_blocks_override: int | None = None
    """Blocks in the KV pool, the null block included; wins over `kv_cache_bytes`."""
    kv_cache_bytes: int | None = None
    """Size of the KV pool. None is 1 GiB on a CPU, and at least one `max_model_len`; on a GPU what
    `gpu_memory_utilization` leaves."""
    gpu_memory_utilization: float | None = None
    """Share of a GPU's memory that the engine may take, weights and graphs included; None is 0.9.
    Refused on a CPU."""
    enable_prefix_caching: bool = True
    disable_hybrid_kv_cache_manager: bool | None = None
    """Models with several KV-cache groups are not there yet, so False is refused."""
    scheduling_policy: SchedulingPolicy = "fcfs"
    """`priority`: lower numbers first, then arrival."""
    cudagraph_mode: str | None = None
    """Which steps are CUDA graphs: "NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY" or
    "FULL_AND_PIECEWISE"; None is the last one on a GPU. On a CPU nothing but None or "NONE" is
    accepted."""
    max_inflight_steps: int | None = None
    """1, or 2 to prepare a step while the one before runs; None is 1 on a CPU, 2 on a GPU."""
    max_waiting_requests: int = 4096
    """Beyond it `generate` raises `EngineBusyError`."""
    skip_tokenizer_init: bool = False
    """Token ids in and out only."""
    tensor_parallel_size: int = 1
    """Workers that the KV heads are split among, each with pages and a connector's WORKER instance
    of its own. They take turns on one device: for trying connectors, not for speed."""
    hidden_state_layer_ids: tuple[int, ...] = ()
    """Layers whose hidden states are kept beside the KV, in a cache-only layer, for a connector to
    save: i is what `transformers` calls `hidden_states[i]`, 0 the embeddings, the model's number
    of layers the final, normed states."""
    kv_transfer_config: KVTransferConfig | None = None
    """Which KV connector to use; None is none."""
    seed: int = 0
    """Of requests that sample without a seed of their own, and of a `dummy:` model's weights."""
    model_config: ModelConfig | None = dataclasses.field(default=None, init=False)
    """The loaded model; set in a resolved configuration."""
    rank: int = dataclasses.field(default=0, init=False)
    """Of the worker that gets this copy of a resolved configuration."""
    lanes: Lanes | None = dataclasses.field(default=None, init=False, compare=False)
    """Where connectors get lanes for their asynchronous work; see `KVConnectorBase_V1.lanes`."""

    def __post_init__(self) -> None:
        self.require(
            isinstance(self.model, str) and self.model.strip() != "",
            "model must be a name or path.",
        )
        self.require_choice("dtype", DTYPES)
        self.require_choice("device", ("auto", "cpu", "cuda"))
        self.require_choice("cudagraph_mode", (None, *CUDAGRAPH_MODES))
        if self.gpu_memory_utilization is not None:
            self.require_number("gpu_memory_utilization", 0.0, 1.0)
        for name in ("max_model_len", "max_num_batched_tokens", "num_gpu_blocks_override"):
            if getattr(self, name) is not None:
                self.require_int(name, 2 if name == "num_gpu_blocks_override" else 1)
        if self.kv_cache_bytes is not None:
            self.require_int("kv_cache_bytes", 1)
        self.require_int("max_num_seqs", 1)
        self.require_int("block_size", 1)
        self.require_int("max_waiting_requests", 1)
        self.require_int("tensor_parallel_size", 1)
        ids = self.hidden_state_layer_ids
        self.require(
            isinstance(ids, tuple)
            and all(isinstance(i, int) and i >= 0 for i in ids)
            and len(set(ids)) == len(ids),
            "hidden_state_layer_ids must be a tuple of different layer numbers from 0.",
        )
        if self.max_inflight_steps is not None:
            self.require_int("max_inflight_steps", 1, 2)
        self.require_int("seed", 0, 2**63 - 1)
        self.require_choice("scheduling_policy", ("fcfs", "priority"))
        self.require_choice("enable_prefix_caching", (True, False))
        self.require_choice("skip_tokenizer_init", (True, False))
        self._refuse_what_needs_more()

    def _refuse_what_needs_more(self) -> None:
        """Refuse options that later versions or other devices would honour."""
        if self.device == "cpu":
            self.require(
                self.gpu_memory_utilization is None,
                "gpu_memory_utilization applies to a GPU; set kv_cache_bytes on a CPU.",
            )
            self.require(
                self.cudagraph_mode in (None, "NONE"),
                f"cudagraph_mode {self.cudagraph_mode!r} needs a CUDA device; leave it out.",
            )
        self.require(
            self.disable_hybrid_kv_cache_manager in (None, True),
            "there is one KV-cache group, so no hybrid manager to enable; leave this option out.",
        )
        ktc = self.kv_transfer_config
        self.require(
            ktc is None or isinstance(ktc, KVTransferConfig),
            f"kv_transfer_config must be a KVTransferConfig, not {type(ktc).__name__}.",
        )

    def resolved(
        self,
        model_config: ModelConfig | None = None,
        *,
        lanes: Lanes | None = None,
        **decided: Any,
    ) -> EngineConfig:
        """A copy with what the model and the machine decided filled in."""
        return self._copy(decided, model_config=model_config, lanes=lanes)

    def with_connector(self, kv_transfer_config: KVTransferConfig) -> EngineConfig:
        """A copy for a connector of a connector."""
        return self._copy({"kv_transfer_config": kv_transfer_config})

    def with_num_blocks(self, num_blocks: int) -> EngineConfig:
        """A copy of a resolved configuration with a pool of this size."""
        return self._copy({"num_gpu_blocks_override": num_blocks})

    def with_graph_mode(self, mode: str | None) -> EngineConfig:
        """A copy of a resolved configuration with another `cudagraph_mode`."""
        return self._copy({"cudagraph_mode": mode})

    def for_rank(self, rank: int) -> EngineConfig:
        """A copy of a resolved configuration for worker `rank`."""
        return self._copy({}, rank=rank)

    def _copy(self, changes: Mapping[str, Any], **decided: Any) -> EngineConfig:
        """With fields that the user cannot set."""
        copy = dataclasses.replace(self, **changes)
        for name in ("model_config", "rank", "lanes"):
            value = decided.get(name, getattr(self, name))
            object.__setattr__(copy, name, value)  # frozen for everyone else
        return copy

    @property
    def parallel_config(self) -> ParallelConfig:
        """Ranks and sizes."""
        size = self.tensor_parallel_size
        return ParallelConfig(rank=self.rank, world_size=size, tensor_parallel_size=size)

    def _decided(self, name: str) -> int:
        value = getattr(self, name)
        if value is None:
            raise ConfigError(f"{name} is decided when the model is loaded; set it to use it now.")
        assert isinstance(value, int)
        return value

    @property
    def cache_config(self) -> CacheConfig:
        """The KV-cache part of a resolved configuration. Raises `ConfigError` before that."""
        return CacheConfig(
            block_size=self.block_size,
            num_gpu_blocks=self._decided("num_gpu_blocks_override"),
            enable_prefix_caching=self.enable_prefix_caching,
        )

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """The scheduler part of a resolved configuration. Raises `ConfigError` before that."""
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self._decided("max_num_batched_tokens"),
            max_model_len=self._decided("max_model_len"),
            policy=self.scheduling_policy,
            max_inflight_steps=self._decided("max_inflight_steps"),
            max_waiting_requests=self.max_waiting_requests,
        )
