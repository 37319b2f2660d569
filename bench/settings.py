"""What a benchmark runs on: a model, a device, and the engine's options, apart from the work."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from interlace.connectors.factory import KVConnectorFactory
from interlace.engine.config import EngineConfig, KVTransferConfig
from interlace.engine.ports import Progress

LEAST_MODEL_LEN = 12_288
"""On a GPU, unless the model is made for less: so work of all usual sizes runs on one engine."""
LEN_STEP = 4096
POOL_SHARE = 0.9
"""Of a GPU's memory, for all engines of a benchmark together."""


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """What is run, apart from the shape of the work. Names as in `EngineConfig`."""

    model: str
    max_inflight_steps: tuple[int, ...] = ()
    """One engine for each; empty means one with the default."""
    against_transformers: bool = False
    kv_transfer_config: KVTransferConfig | None = None
    """Of each engine."""
    device: str = "cpu"
    """`auto` is decided by `pick_device`."""
    dtype: str = "auto"
    max_model_len: int | None = None
    """None: the model's own limit; on a GPU what `pick_device` decides."""
    max_num_batched_tokens: int | None = None
    cudagraph_mode: str | None = None
    request_tokens: int = 0
    """Most tokens of a request of the work, prompt and answer together."""
    measure_limits: bool = False
    """Whether the device's limits are measured, for figures to be shares of."""

    def check(self) -> None:
        """Refuse options that no engine, and no connector, takes, before a model is loaded. On the
        device thread.

        Raises: `ConfigError`.
        """
        for _, config in self.engine_configs():
            transfer = config.kv_transfer_config
            if transfer is not None and transfer.is_kv_transfer_instance:
                KVConnectorFactory().validate_config(config)

    def engine_configs(self) -> Iterator[tuple[int | None, EngineConfig]]:
        """For each engine the steps in flight that were asked for, and its configuration.

        Several engines on a GPU share its memory: each may fill it up to its share.
        Raises: `ConfigError`.
        """
        depths = self.max_inflight_steps or (None,)
        for index, depth in enumerate(depths):
            share = POOL_SHARE * (index + 1) / len(depths)
            yield (
                depth,
                EngineConfig(
                    model=self.model,
                    device=self.device,
                    dtype=self.dtype,
                    skip_tokenizer_init=True,
                    max_model_len=self.max_model_len,
                    max_num_batched_tokens=self.max_num_batched_tokens,
                    max_inflight_steps=depth,
                    cudagraph_mode=self.cudagraph_mode,
                    gpu_memory_utilization=share if self.device == "cuda" else None,
                    kv_transfer_config=self.kv_transfer_config,
                ),
            )

    def facts(self) -> dict[str, object]:
        """For a report: the model, the device, and the options that were given."""
        given = {
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "cudagraph_mode": self.cudagraph_mode,
        }
        facts: dict[str, object] = {"model": self.model, "device": self.device}
        facts |= {name: value for name, value in given.items() if value is not None}
        if self.kv_transfer_config is not None:
            facts["kv_connector"] = self.kv_transfer_config.kv_connector
        return facts


def pick_device(settings: Settings, progress: Progress) -> Settings:
    """`settings` with "cpu" or "cuda", and on a GPU with a length that the work needs.

    The model's own limit may be so long there that each request's tables, and the KV pool, are
    made for far more than is run. On the device thread. Raises: `ModelError`.
    """
    from interlace.layers.hardware.cuda import works

    if settings.device == "auto":
        settings = dataclasses.replace(settings, device="cuda" if works() else "cpu")
    if settings.device == "cpu" or settings.max_model_len is not None:
        return settings
    from interlace.layers.checkpoint.resolve import open_checkpoint

    limit = open_checkpoint(settings.model, progress).architecture.max_position
    length = min(limit, model_len(settings.request_tokens))
    return dataclasses.replace(settings, max_model_len=length)


def model_len(request_tokens: int) -> int:
    """`max_model_len` for requests of so many tokens, a multiple of 4,096."""
    return max(LEAST_MODEL_LEN, -(-request_tokens // LEN_STEP) * LEN_STEP)
