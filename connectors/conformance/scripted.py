"""A connector whose every answer is scripted, and which brings right KV unless told to fail.

It keeps KV in memory, in the script's store. Its answers show what an engine makes of them: see
`interlace.connectors.conformance.script` for what can be scripted. Each hook is logged there
before anything else, and raises if the script says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlace.connectors.base import CheckSetup, CopyBlocksOp, KVConnectorBase_V1
from interlace.connectors.conformance.script import Script
from interlace.connectors.conformance.scripted_metadata import (
    ScriptedMetadata,
    ScriptedWorkerMetadata,
)
from interlace.connectors.conformance.scripted_scheduler import ScriptedScheduler
from interlace.engine.config import EngineConfig, KVTransferConfig
from interlace.engine.errors import ConfigError, ConnectorError
from interlace.engine.kv_connector import (
    KVCacheBlocks,
    KVCacheConfig,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
)
from interlace.engine.request import Request
from interlace.engine.scheduler_output import SchedulerOutput

if TYPE_CHECKING:
    from interlace.connectors.conformance.scripted_worker import ScriptedWorker
    from interlace.engine.block_pool import BlockPool
    from interlace.layers.forward_context import ForwardContext


class ScriptedConnector(KVConnectorBase_V1):
    """`kv_connector_extra_config={"script": Script(...)}` says what it does."""

    def __init__(
        self,
        vllm_config: EngineConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        """Raises: `ConfigError` without a script."""
        super().__init__(vllm_config, role, kv_cache_config)
        self.script = script = _script_of(self._kv_transfer_config)
        self._scheduler: ScriptedScheduler | None = None
        self._worker: ScriptedWorker | None = None
        if role is KVConnectorRole.SCHEDULER:
            block_size = vllm_config.block_size
            self._scheduler = ScriptedScheduler(script, self._kv_transfer_config, block_size)
        else:
            from interlace.connectors.conformance.scripted_worker import ScriptedWorker

            self._worker = ScriptedWorker(script, vllm_config.parallel_config.rank)

    @classmethod
    def validate_config(cls, vllm_config: EngineConfig) -> None:
        """Raises: `ConfigError` without a script."""
        assert vllm_config.kv_transfer_config is not None, "it names this class"
        _script_of(vllm_config.kv_transfer_config)

    @classmethod
    def check_setup(cls, scratch: Path) -> CheckSetup:
        """A plain script: everything is stored, and loaded within the step."""
        return CheckSetup({"script": Script()})

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """True: it loads and saves in the hooks of the layers."""
        return True

    @property
    def is_idle(self) -> bool:
        """Whether this side remembers no request and has nothing under way."""
        return (self._scheduler or self._on_worker).is_idle

    def _note(self, hook: str, summary: object = "") -> None:
        self.script.note(self.role, hook, str(summary))

    @property
    def _on_scheduler(self) -> ScriptedScheduler:
        if self._scheduler is None:
            raise ConnectorError("a scheduler-side hook was called on the worker's instance")
        return self._scheduler

    @property
    def _on_worker(self) -> ScriptedWorker:
        if self._worker is None:
            raise ConnectorError("a worker-side hook was called on the scheduler's instance")
        return self._worker

    @property
    def _step(self) -> ScriptedMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ScriptedMetadata)
        return metadata

    # ---------------------------------------------------------------- worker side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Remember the pages: tensors or arrays."""
        self._note("register_kv_caches", ", ".join(kv_caches))
        self._on_worker.register(kv_caches)

    def register_cross_layers_kv_cache(self, kv_cache: Any, attn_backend: type[Any]) -> None:
        """Logged; the script knows single layers only."""
        self._note("register_cross_layers_kv_cache")
        raise ConnectorError("ScriptedConnector takes one tensor per layer: register_kv_caches.")

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:
        """Logged."""
        self._note("set_host_xfer_buffer_ops")

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Logged; none."""
        self._note("get_handshake_metadata")
        return None

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """End lost loads. Nothing to fence: copies are made within their step."""
        assert isinstance(kv_connector_metadata, ScriptedMetadata)
        self._note("handle_preemptions", f"step {kv_connector_metadata.step_id}")
        self._on_worker.lose_loads(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Logged."""
        assert isinstance(connector_metadata, ScriptedMetadata)
        self._note("bind_connector_metadata", f"step {connector_metadata.step_id}")
        super().bind_connector_metadata(connector_metadata)

    def clear_connector_metadata(self) -> None:
        """Logged."""
        self._note("clear_connector_metadata")
        super().clear_connector_metadata()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Take the step's loads; nothing is copied yet."""
        tokens = "no tokens" if forward_context.attn_metadata is None else "tokens"
        loads = [f"{job.req_id}:{len(job.blocks)}" for job in self._step.loads]
        self._note("start_load_kv", f"{tokens}, loads {', '.join(loads) or 'nothing'}")
        self._on_worker.begin(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Copy this layer of the step's synchronous loads."""
        self._note("wait_for_layer_load", layer_name)
        self._on_worker.load_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Copy this layer of the blocks that the step saves."""
        self._note("save_kv_layer", layer_name)
        self._on_worker.copy_layer(self._step, layer_name, kv_layer)

    def wait_for_save(self) -> None:
        """Nothing to wait for: `save_kv_layer` has copied."""
        self._note("wait_for_save")

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Fill the asynchronous loads whose time has come, and report."""
        self._note("get_finished", sorted(finished_req_ids))
        sent, received = self._on_worker.finished(self._step, set(finished_req_ids))
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that failed, as scripted."""
        self._note("get_block_ids_with_load_errors")
        return self._on_worker.take_invalid()

    def get_kv_connector_stats(self) -> Any:
        """Logged; none."""
        self._note("get_kv_connector_stats")

    def get_kv_connector_kv_cache_events(self) -> Any:
        """Logged; none."""
        self._note("get_kv_connector_kv_cache_events")

    def build_connector_worker_meta(self) -> ScriptedWorkerMetadata | None:
        """The step's copies, for the scheduler side to store."""
        self._note("build_connector_worker_meta")
        return self._on_worker.take_copies(self._step)

    # ---------------------------------------------------------------- scheduler side

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """The scripted answer, lawful or not."""
        answer = self._on_scheduler.match(request, num_computed_tokens)
        summary = f"{request.request_id} computed={num_computed_tokens} -> {answer}"
        self._note("get_num_new_matched_tokens", summary)
        return answer

    def get_compute_end(self, request: Request) -> int | None:
        """The scripted answer, lawful or not."""
        end: int | None = self._on_scheduler.compute_end(request)
        self._note("get_compute_end", f"{request.request_id} -> {end}")
        return end

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Plan the load."""
        summary = f"{request.request_id} external={num_external_tokens}"
        self._note("update_state_after_alloc", summary)
        self._on_scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ScriptedMetadata:
        """The step's loads and saves."""
        self._note("build_connector_meta", f"step {scheduler_output.step_id}")
        return self._on_scheduler.build(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Store what the step copied."""
        parts = {
            "sent": sorted(connector_output.finished_sending or ()),
            "received": sorted(connector_output.finished_recving or ()),
            "invalid": sorted(connector_output.invalid_block_ids),
        }
        summary = " ".join(f"{name}={ids}" for name, ids in parts.items() if ids)
        self._note("update_connector_output", summary)
        self._on_scheduler.applied(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hold the blocks, if scripted."""
        self._note("request_finished", f"{request.request_id} blocks={len(block_ids)}")
        return self._on_scheduler.finished(request, block_ids)

    def take_events(self) -> Iterable[Any]:
        """Logged; none."""
        self._note("take_events")
        return ()

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Logged; the pool is left alone."""
        self._note("bind_gpu_block_pool")

    def get_finished_count(self) -> int | None:
        """Logged; all."""
        self._note("get_finished_count")
        return None

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Logged."""
        self._note("set_xfer_handshake_metadata")

    def reset_cache(self) -> bool | None:
        """Empty the store."""
        self._note("reset_cache")
        self.script.store.clear()
        return True

    # ---------------------------------------------------------------- both sides

    def shutdown(self) -> None:
        """Logged."""
        self._note("shutdown")


def _script_of(config: KVTransferConfig) -> Script:
    """Raises: `ConfigError`."""
    script = config.get_from_extra_config("script", None)
    if not isinstance(script, Script):
        raise ConfigError(
            "ScriptedConnector is for tests: pass a Script object, the same for both roles, as"
            ' kv_connector_extra_config={"script": Script(...)}.'
        )
    return script
