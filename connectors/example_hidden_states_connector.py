"""ExampleHiddenStatesConnector: chosen layers' hidden states of each prompt, as a file.

    EngineConfig(hidden_state_layer_ids=(0, 15, 30), kv_transfer_config=KVTransferConfig(
        kv_connector="ExampleHiddenStatesConnector", kv_role="kv_producer",
        kv_connector_extra_config={"shared_storage_path": "~/states"}))

**What it stores.** One safetensors file for each request that ends well, with `hidden_states`
[tokens of the prompt, layers, hidden size] in the engine's dtype, layers in the order of
`hidden_state_layer_ids`, and `token_ids` [tokens], int64. The engine keeps the states of all tokens
in a cache-only layer beside the KV, so a chunked, preempted or partly cached prompt is as whole as
any other. It lies in `shared_storage_path` as `<request id>.safetensors`; for an id that is no
plain file name a digest stands (`path_of`). Folder and files are for their owner alone.

**When.** Once, within the step that computes the last token of the prompt: that step ends when the
file is written, or after `deadline_s`. A slow disk slows all requests; put the folder on a fast
one. It loads nothing.

**What it guarantees.** The request's answer has `kv_transfer_params["hidden_states_path"]` only if
the whole file is there, and no block beneath it was bad; else `"hidden_states_error"` says why not
(disk full, and the like), which is logged once, counted (`failed`), and harms nothing else. A
request that is aborted or fails leaves no file: one that was written already is removed in the next
step. A later request of the same id replaces the file in one go. A killed process may leave the
file of a request that had not ended, and a temporary file, whose name begins with a dot.

Another connector beside it, under MultiConnector, may load KV only if it brings the cache-only
layer too, which it is given like all layers; ExampleConnector refuses one.

    example_hidden_states_messages.py    what the two sides tell each other
    example_hidden_states_scheduler.py   which step completes which prompt
    example_hidden_states_worker.py      pages to files
    example_hidden_states_files.py       names and format
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlace.connectors import example_hidden_states_files as files
from interlace.connectors.base import CheckSetup, KVConnectorBase_V1
from interlace.connectors.example_hidden_states_messages import (
    HiddenStatesMetadata,
    HiddenStatesReport,
    HiddenStatesStats,
)
from interlace.connectors.example_hidden_states_options import HiddenStatesOptions
from interlace.connectors.example_hidden_states_scheduler import HiddenStatesScheduler
from interlace.connectors.example_hidden_states_worker import HiddenStatesWorker, cache_only_layer
from interlace.connectors.new_folder import check_writable
from interlace.engine.config import EngineConfig
from interlace.engine.errors import ConfigError
from interlace.engine.kv_connector import (
    KVCacheBlocks,
    KVCacheConfig,
    KVConnectorOutput,
    KVConnectorRole,
)
from interlace.engine.request import Request
from interlace.engine.scheduler_output import SchedulerOutput

if TYPE_CHECKING:
    import torch

    from interlace.layers.forward_context import ForwardContext


class ExampleHiddenStatesConnector(KVConnectorBase_V1):
    """Each instance has one side. Of several workers, which all hold the same states, the first one
    writes. See the base class for when each method is called."""

    def __init__(
        self,
        vllm_config: EngineConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        """The first worker makes the folder and tries it.

        Raises: `ConfigError` for bad options, and for a folder that cannot be written.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        self.options = HiddenStatesOptions.of(self._kv_transfer_config)
        self._scheduler_side: HiddenStatesScheduler | None = None
        self._worker_side: HiddenStatesWorker | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler_side = HiddenStatesScheduler(
                self.options.root, block_size=vllm_config.block_size
            )
        elif vllm_config.parallel_config.rank == 0:
            self._worker_side = self._make_worker_side(vllm_config)

    def _make_worker_side(self, config: EngineConfig) -> HiddenStatesWorker:
        root = self.options.root
        with _saving_to(root):
            files.prepare(root)
        return HiddenStatesWorker(
            root,
            self.lanes.lane("store"),
            layer_ids=config.hidden_state_layer_ids,
            deadline_s=self.options.deadline_s,
        )

    @property
    def _scheduler(self) -> HiddenStatesScheduler:
        assert self._scheduler_side is not None, "called on the worker side"
        return self._scheduler_side

    @property
    def _metadata(self) -> HiddenStatesMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, HiddenStatesMetadata)
        return metadata

    # ---------------------------------------------------------------- of the class

    @classmethod
    def validate_config(cls, vllm_config: EngineConfig) -> None:
        """Raises: `ConfigError` for bad options, and for a folder that cannot be written."""
        assert vllm_config.kv_transfer_config is not None, "it names this class"
        root = HiddenStatesOptions.of(vllm_config.kv_transfer_config).root
        with _saving_to(root):
            check_writable(root)

    @classmethod
    def check_setup(cls, scratch: Path) -> CheckSetup:
        """A folder, and layers to keep."""
        return CheckSetup({"shared_storage_path": str(scratch)}, {"hidden_state_layer_ids": (0, 2)})

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: EngineConfig) -> str | None:
        """As vLLM's connector of this name; the cache-only layer lies in one way anyhow."""
        return "NHD"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """States are copied in the hook of their layer."""
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HiddenStatesStats:
        """See the base class."""
        return HiddenStatesStats(dict(data or {}))

    # ---------------------------------------------------------------- scheduler side

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """It brings nothing."""
        return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Nothing to note: each step's message has the block tables."""
        assert num_external_tokens == 0, "it promised nothing"

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> HiddenStatesMetadata:
        """Which prompts the step completes."""
        return self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """A step was applied."""
        self._scheduler.update_connector_output(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The path of the file. Holds nothing: the states were copied when they were complete."""
        return False, self._scheduler.request_finished(request)

    def get_kv_connector_stats(self) -> HiddenStatesStats | None:
        """Files written, and failed to be, since the last call; the worker side counts none."""
        return None if self._scheduler_side is None else self._scheduler_side.take_stats()

    # ---------------------------------------------------------------- worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Raises: `ConnectorError` unless there is exactly one cache-only layer."""
        cache_only_layer(kv_caches)
        if self._worker_side is not None:
            self._worker_side.register(kv_caches)

    def has_connector_metadata(self) -> bool:
        """Whether a prompt is completed by the step, and this worker saves it: the engine leaves
        the layer hooks out where not."""
        is_bound = super().has_connector_metadata()
        return is_bound and self._worker_side is not None and bool(self._metadata.saves)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Take the step's orders; nothing is loaded."""
        if self._worker_side is not None:
            self._worker_side.start(self._metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Copy the states of the prompts that are complete, once their layer was written."""
        if self._worker_side is not None:
            self._worker_side.copy(layer_name)

    def wait_for_save(self) -> None:
        """Nothing reads the pages any more."""

    def build_connector_worker_meta(self) -> HiddenStatesReport | None:
        """Wait for the step's files, and say what became of them."""
        return None if self._worker_side is None else self._worker_side.finish_step()

    # ---------------------------------------------------------------- both

    def shutdown(self) -> None:
        """End the lane."""
        if self._worker_side is not None:
            self._worker_side.close()


@contextlib.contextmanager
def _saving_to(root: Path) -> Iterator[None]:
    """Raises: `ConfigError` for an `OSError`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"hidden states cannot be saved to {root}: {error.strerror or error}. Choose a"
            " shared_storage_path that this user may create and write."
        ) from error
