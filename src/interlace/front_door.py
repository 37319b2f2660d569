"""Wires the parts into an engine that one call opens: model, KV pages, runner, engine.

The only module besides `interlace/__init__.py` that knows engine and layers at once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Self

from interlace.engine import async_engine
from interlace.engine.config import EngineConfig, ModelConfig
from interlace.engine.device_thread import DeviceThread, finish_despite_cancel
from interlace.engine.errors import ConfigError
from interlace.engine.ports import Clock, Progress

if TYPE_CHECKING:
    from interlace.layers.checkpoint import LoadedModel
    from interlace.layers.runner import ModelRunner

DEFAULT_KV_CACHE_BYTES = 1 << 30
DEFAULT_MAX_BATCHED_TOKENS = 2048
DEFAULT_INFLIGHT_STEPS = 1


class AsyncEngine(async_engine.AsyncEngine):
    """`interlace.engine.AsyncEngine` with the two ways to open one."""

    @classmethod
    @asynccontextmanager
    async def from_config(
        cls, config: EngineConfig, *, progress: Progress | None = None, clock: Clock | None = None
    ) -> AsyncIterator[Self]:
        """Load the model on the device thread, and keep an engine open over it.

            async with AsyncEngine.from_config(EngineConfig()) as engine: ...

        Raises: `ModelError`, `ConfigError`. Cancellation while loading: the load ends at its
        next sign of progress, and leaves no half-written file.
        """
        with contextlib.closing(DeviceThread()) as device:
            watched = _Cancellable(progress)
            loaded = await finish_despite_cancel(
                device.submit(_load, config, watched), on_cancel=watched.cancel
            )
            async with cls.from_loaded(config, loaded, device=device, clock=clock) as engine:
                yield engine

    @classmethod
    @asynccontextmanager
    async def from_loaded(
        cls,
        config: EngineConfig,
        loaded: LoadedModel,
        *,
        device: DeviceThread | None = None,
        clock: Clock | None = None,
    ) -> AsyncIterator[Self]:
        """Keep an engine open over a model that is loaded already; engines may share one.

        `device` is the thread to compute on, best the one that loaded the model; it stays open.
        Without it the engine has one of its own. Raises: `ConfigError`.
        """
        if device is None:
            with contextlib.closing(DeviceThread()) as device:
                async with cls.from_loaded(config, loaded, device=device, clock=clock) as engine:
                    yield engine
            return
        resolved = resolve(config, loaded)
        runner = await finish_despite_cancel(device.submit(_make_runner, resolved, loaded))
        model_config = ModelConfig(
            model=loaded.name,
            dtype=resolved.dtype,
            max_model_len=loaded.max_model_len,
            vocab_size=loaded.architecture.vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            seed=config.seed,
        )
        async with cls(
            resolved, model_config, runner, loaded.tokenizer, device=device, clock=clock
        ) as engine:
            yield engine


class _LoadCancelledError(Exception):
    """Ends a load that nobody waits for; whoever cancelled it never sees this."""


class _Cancellable:
    """A `Progress` that passes everything on until it is cancelled, and then ends the work."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Let the work end at its next sign of progress. Any thread."""
        self._cancelled.set()

    @contextlib.contextmanager
    def task(self, description: str, total: float | None) -> Iterator[Callable[[float], None]]:
        """See `Progress`. Raises: `_LoadCancelledError`, here and from the callable inside."""
        self._check()
        with contextlib.ExitStack() as stack:
            show = None
            if self._progress is not None:
                show = stack.enter_context(self._progress.task(description, total))

            def advance(amount: float) -> None:
                self._check()
                if show is not None:
                    show(amount)

            yield advance

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise _LoadCancelledError


def _load(config: EngineConfig, progress: Progress) -> LoadedModel:
    from interlace.layers.checkpoint import load_checkpoint

    return load_checkpoint(
        config.model,
        tokenizer=config.tokenizer,
        skip_tokenizer=config.skip_tokenizer_init,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        progress=progress,
    )


def _block_bytes(config: EngineConfig, loaded: LoadedModel) -> int:
    from interlace.layers.kv_pages import KVPages

    architecture = loaded.architecture
    return KVPages.block_bytes(
        num_layers=architecture.num_layers,
        block_size=config.block_size,
        num_kv_heads=architecture.num_kv_heads,
        head_dim=architecture.head_dim,
        itemsize=loaded.decoder.dtype.itemsize,
    )


def resolve(config: EngineConfig, loaded: LoadedModel) -> EngineConfig:
    """Fill in what the model and the machine decide.

    Raises: `ConfigError` for a pool that cannot hold one block.
    """
    num_blocks = config.num_gpu_blocks_override
    if num_blocks is None:
        block_bytes = _block_bytes(config, loaded)
        if config.kv_cache_bytes is None:
            one_request = -(-loaded.max_model_len // config.block_size)
            num_blocks = 1 + max(DEFAULT_KV_CACHE_BYTES // block_bytes, one_request)
        else:
            num_blocks = 1 + config.kv_cache_bytes // block_bytes
            if num_blocks < 2:
                raise ConfigError(
                    f"kv_cache_bytes={config.kv_cache_bytes} holds no block; one takes "
                    f"{block_bytes} bytes with this model and block_size={config.block_size}."
                )
    return config.resolved(
        dtype=str(loaded.decoder.dtype).removeprefix("torch."),
        device=loaded.decoder.device.type,
        max_model_len=loaded.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens or DEFAULT_MAX_BATCHED_TOKENS,
        num_gpu_blocks_override=num_blocks,
        max_inflight_steps=config.max_inflight_steps or DEFAULT_INFLIGHT_STEPS,
    )


def _make_runner(config: EngineConfig, loaded: LoadedModel) -> ModelRunner:
    from interlace.layers.kv_pages import KVPages
    from interlace.layers.runner import ModelRunner

    architecture = loaded.architecture
    try:
        pages = KVPages(
            num_layers=architecture.num_layers,
            num_blocks=config.cache_config.num_gpu_blocks,
            block_size=config.block_size,
            num_kv_heads=architecture.num_kv_heads,
            head_dim=architecture.head_dim,
            dtype=loaded.decoder.dtype,
            device=loaded.decoder.device,
        )
    except MemoryError as error:
        raise ConfigError(
            f"no memory for {config.cache_config.num_gpu_blocks} KV blocks; "
            "lower kv_cache_bytes or num_gpu_blocks_override."
        ) from error
    return ModelRunner(loaded.decoder, pages, loaded.eos_token_ids)
