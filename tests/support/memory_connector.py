"""MemoryConnector: a right connector for tests, which broken ones are made of.

It keeps each full block of each request in a `MemoryStore` under the request's block hash, and
brings it to whoever shares the prefix. It loads within the step, layer by layer, or asynchronously;
it copies within the step, or beside the following ones. A block is published when the step that
copied it was applied, and no KV beneath it was bad. Every rank has its own records.

    memory_store.py       the store, and how it can be damaged
    memory_messages.py    what the sides tell each other
    memory_scheduler.py   the scheduler side
    memory_worker.py      the worker side
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memory_messages import MemoryStats
from memory_scheduler import MemorySchedulerSide
from memory_store import FAULTS, MemoryStore
from memory_worker import MemoryWorkerSide

from interlace.connectors.base import CheckSetup
from interlace.engine.config import EngineConfig
from interlace.engine.errors import ConfigError
from interlace.engine.kv_connector import KVCacheConfig, KVConnectorRole

_OPTIONS = {"store", "load_async", "save_async"}


class MemoryConnector(MemorySchedulerSide, MemoryWorkerSide):
    """`kv_connector_extra_config={"store": MemoryStore(), "load_async": False, "save_async":
    False}`: engines with the same store see each other's KV. Each instance plays one role."""

    store_fault_kinds = tuple(FAULTS)

    def __init__(
        self,
        vllm_config: EngineConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        """Raises: `ConfigError` without a store, and for unknown options."""
        super().__init__(vllm_config, role, kv_cache_config)
        options = self._kv_transfer_config.kv_connector_extra_config
        store = options.get("store")
        if not isinstance(store, MemoryStore) or not options.keys() <= _OPTIONS:
            raise ConfigError(
                "MemoryConnector is for tests: pass kv_connector_extra_config="
                '{"store": MemoryStore()}, the same store for both roles, and beside it only'
                f" {', '.join(sorted(_OPTIONS - {'store'}))}."
            )
        self.store = store
        self.load_async = bool(options.get("load_async", False))
        self.save_async = bool(options.get("save_async", False))
        self._stats = MemoryStats()
        if role is KVConnectorRole.SCHEDULER:
            self._begin_scheduler_side()
        else:
            self._begin_worker_side()

    @classmethod
    def check_setup(cls, scratch: Path) -> CheckSetup:
        """A store for each check."""
        return CheckSetup({"store": MemoryStore()})

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> MemoryStats:
        """See the base class."""
        return MemoryStats(dict(data or {}))

    def get_kv_connector_stats(self) -> MemoryStats | None:
        """What this side has counted since the last call."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, MemoryStats()
        return stats

    def what_is_left(self) -> list[object]:
        """Whatever this side remembers of any request or has under way; empty when idle."""
        if self.role is KVConnectorRole.SCHEDULER:
            return self.what_is_left_of_scheduler_side()
        return self.what_is_left_of_worker_side()

    def shutdown(self) -> None:
        """End the lanes."""
        if self.role is KVConnectorRole.WORKER:
            self._end_worker_side()
