"""ScriptedConnectors that want their KV pages otherwise than they lie by themselves."""

from __future__ import annotations

from typing import Any

import torch

from interlace.connectors.base import CopyBlocksOp
from interlace.connectors.conformance import ScriptedConnector
from interlace.engine.config import EngineConfig
from interlace.engine.kv_connector import KVConnectorHandshakeMetadata
from interlace.layers.attention_backend import TritonAttentionBackend
from interlace.layers.kv_copy import host_buffers
from interlace.layers.kv_memory import layer_name


class TokensFirst(ScriptedConnector):
    """Takes what there is: a tensor a layer, NHD."""


class HeadsFirst(ScriptedConnector):
    """Needs heads before tokens."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: EngineConfig) -> str | None:
        return "HND"

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        for pages in kv_caches.values():
            assert pages.permute(0, 1, 3, 2, 4).is_contiguous()
        super().register_kv_caches(kv_caches)


class OneTensor(ScriptedConnector):
    """Prefers one tensor with all layers, each block one record."""

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        return True

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        raise AssertionError("either this or the other, never both")

    def register_cross_layers_kv_cache(
        self, kv_cache: torch.Tensor, attn_backend: type[TritonAttentionBackend]
    ) -> None:
        assert kv_cache.is_contiguous()
        order = attn_backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
        logical = kv_cache.permute(*(order.index(i) for i in range(kv_cache.dim())))
        super().register_kv_caches({layer_name(i): pages for i, pages in enumerate(logical)})


class OneTensorHeadsFirst(OneTensor):
    """Both."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: EngineConfig) -> str | None:
        return "HND"


class Staged(ScriptedConnector):
    """Touches host memory only: the engine's operation copies from there and to there."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.pages = kv_caches
        self.host = host_buffers(kv_caches, len(next(iter(kv_caches.values()))))
        super().register_kv_caches(self.host)

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:
        super().set_host_xfer_buffer_ops(copy_operation)
        self.copy = copy_operation

    def wait_for_layer_load(self, layer_name: str) -> None:
        super().wait_for_layer_load(layer_name)
        ids = [block.block_id for job in self._step.loads for block in job.blocks]
        source, target = self.host[layer_name], self.pages[layer_name]
        self.copy({layer_name: source}, {layer_name: target}, ids, ids, "h2d")

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        host, ids = self.host[layer_name], list(self._step.saves.values())
        self.copy({layer_name: kv_layer}, {layer_name: host}, ids, ids, "d2h")
        super().save_kv_layer(layer_name, host, attn_metadata, **kwargs)


class Greeting(KVConnectorHandshakeMetadata):
    """What a worker has to say."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


class Greeter(ScriptedConnector):
    """Its odd workers have something to say at the start; its scheduler side remembers it."""

    heard: dict[int, KVConnectorHandshakeMetadata] | None = None

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        super().get_handshake_metadata()
        rank = self._vllm_config.parallel_config.rank
        return Greeting(rank) if rank % 2 else None

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        super().set_xfer_handshake_metadata(metadata)
        self.script.note(self.role, "heard", str({r: vars(md) for r, md in metadata.items()}))


class Miscounting(ScriptedConnector):
    """Says that more workers report than there are."""

    def get_finished_count(self) -> int | None:
        return 3
