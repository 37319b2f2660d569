"""A connector that has something to say at every hook, and logs what it hears."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from multi_kit import ChildConfig, multi_config, multi_side

from interlace.connectors.base import CopyBlocksOp, KVConnectorBase_V1, SupportsHMA
from interlace.connectors.multi_connector import MultiConnector
from interlace.engine.config import EngineConfig
from interlace.engine.kv_connector import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from interlace.engine.kv_connector_stats import KVConnectorPromMetrics, KVConnectorStats
from interlace.engine.kv_events import BlockRemoved, CountedKVEvents, KVCacheEvent
from interlace.engine.request import Request
from interlace.engine.sampling_params import SamplingParams
from interlace.engine.scheduler_output import CachedRequestData, SchedulerOutput

SCHEDULER, WORKER = KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER


@dataclasses.dataclass(frozen=True)
class Said(KVConnectorMetadata, KVConnectorHandshakeMetadata, KVConnectorWorkerMetadata):
    """Whatever a `Talker` tells."""

    words: tuple[str, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Said:
        assert isinstance(other, Said)
        return Said(self.words + other.words)


class TalkerStats(KVConnectorStats):
    """Counts words."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> TalkerStats:
        self.data["words"] = self.data.get("words", 0) + other.data.get("words", 0)
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class TalkerMetrics(KVConnectorPromMetrics):
    """One counter."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._words = self._counter_cls("words", "Said.", labelnames=self._labelnames)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        self._words.labels(*labels).inc(transfer_stats_data["words"])


class Talker(KVConnectorBase_V1):
    """Has something to say at every hook: its name, from the configuration. Logs what it hears."""

    def __init__(self, vllm_config: EngineConfig, role: KVConnectorRole, cache: Any = None) -> None:
        super().__init__(vllm_config, role, cache)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self.word = str(extra.get("word", ""))
        self.heard: list[tuple[str, Any]] = []
        self.raises: dict[str, Exception] = {}
        self.answers: dict[str, Any] = {}
        if extra.get("fails") == role.name:
            raise RuntimeError("no room")

    def _hear(self, hook: str, what: Any = None, answer: Any = None) -> Any:
        self.heard.append((hook, what))
        if hook in self.raises:
            raise self.raises[hook]
        return self.answers.get(hook, answer)

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        return bool(self.answers.get("prefer_cross_layer_blocks"))

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._hear("register_kv_caches", kv_caches)

    def register_cross_layers_kv_cache(self, kv_cache: Any, attn_backend: type[Any]) -> None:
        self._hear("register_cross_layers_kv_cache", (kv_cache, attn_backend))

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:
        self._hear("set_host_xfer_buffer_ops", copy_operation)

    def get_handshake_metadata(self) -> Said | None:
        return Said((self.word,)) if self.word else None

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self._hear("handle_preemptions", kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._hear("start_load_kv", self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._hear("wait_for_layer_load", layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kw: Any) -> None:
        self._hear("save_kv_layer", layer_name)

    def wait_for_save(self) -> None:
        self._hear("wait_for_save")

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        answer: tuple[set[str] | None, set[str] | None] = self._hear(
            "get_finished", finished_req_ids, (None, None)
        )
        return answer

    def get_kv_connector_stats(self) -> TalkerStats | None:
        return TalkerStats({"words": len(self.word)}) if self.word else None

    def get_kv_connector_kv_cache_events(self) -> CountedKVEvents | None:
        return CountedKVEvents([BlockRemoved([self.word.encode()])]) if self.word else None

    def build_connector_worker_meta(self) -> Said | None:
        return Said((self.word,)) if self.word else None

    def get_num_new_matched_tokens(self, request: Request, n: int) -> tuple[int | None, bool]:
        answer: tuple[int | None, bool] = self._hear("get_num_new_matched_tokens", n, (0, False))
        return answer

    def update_state_after_alloc(self, request: Request, blocks: Any, n: int) -> None:
        self._hear("update_state_after_alloc", n)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Said:
        said: Said = self._hear("build_connector_meta", scheduler_output, Said((self.word,)))
        return said

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._hear("update_connector_output", connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        answer: tuple[bool, dict[str, Any] | None] = self._hear(
            "request_finished", block_ids, (False, None)
        )
        return answer

    def take_events(self) -> Iterable[KVCacheEvent]:
        return iter([BlockRemoved([self.word.encode()])])

    def get_finished_count(self) -> int | None:
        count: int | None = self._hear("get_finished_count")
        return count

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._hear("bind_gpu_block_pool", gpu_block_pool)

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        self._hear("set_xfer_handshake_metadata", metadata)

    def reset_cache(self) -> bool | None:
        answer: bool | None = self._hear("reset_cache")
        return answer

    def shutdown(self) -> None:
        self._hear("shutdown")

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: EngineConfig) -> str | None:
        assert vllm_config.kv_transfer_config is not None
        layout: str | None = vllm_config.kv_transfer_config.get_from_extra_config("layout", None)
        return layout

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(extra_config.get("piecewise"))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TalkerStats:
        return TalkerStats(dict(data or {}))

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> KVConnectorPromMetrics | None:
        return TalkerMetrics(*args)


class HMATalker(Talker, SupportsHMA):
    """Knows several groups."""

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._hear("request_finished_all_groups", block_ids)
        return False, None


def talker(word: str = "", kind: type[Talker] = Talker, **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": kind.__name__,
        "kv_connector_module_path": __name__,
        "kv_connector_extra_config": {"word": word, **extra},
    }


def talkers(side: MultiConnector) -> list[Talker]:
    assert all(isinstance(child, Talker) for child in side.children)
    return [child for child in side.children if isinstance(child, Talker)]


def sides_of(*children: ChildConfig, **options: Any) -> tuple[MultiConnector, MultiConnector]:
    config = multi_config(children, **options)
    return multi_side(config, SCHEDULER), multi_side(config, WORKER)


def a_request() -> Request:
    return Request("r", [1] * 9, SamplingParams(), seed=0, arrival=0, block_size=4)


def a_step() -> SchedulerOutput:
    nothing = frozenset[str]()
    return SchedulerOutput(1, [], CachedRequestData(), {}, 0, nothing, nothing, nothing)
