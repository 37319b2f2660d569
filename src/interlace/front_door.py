"""Wires the parts into an engine that one call opens: model, KV pages, runner, engine.

The only module besides `interlace/__init__.py` that knows engine and layers at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple, Self

from interlace.engine import async_engine
from interlace.engine.config import EngineConfig, ModelConfig
from interlace.engine.device_thread import DeviceThread, finish_despite_cancel
from interlace.engine.errors import ConfigError
from interlace.engine.ports import Clock, Progress

if TYPE_CHECKING:
    from interlace.connectors.base import KVConnectorBase_V1
    from interlace.connectors.factory import KVConnectorFactory
    from interlace.layers.checkpoint import LoadedModel
    from interlace.layers.kv_pages import KVPages
    from interlace.layers.runner import ModelRunner

DEFAULT_KV_CACHE_BYTES = 1 << 30
DEFAULT_MAX_BATCHED_TOKENS = 2048
DEFAULT_INFLIGHT_STEPS = 1


class AsyncEngine(async_engine.AsyncEngine):
    """`interlace.engine.AsyncEngine` with the two ways to open one."""

    @classmethod
    @asynccontextmanager
    async def from_config(
        cls,
        config: EngineConfig,
        *,
        progress: Progress | None = None,
        connectors: KVConnectorFactory | None = None,
        clock: Clock | None = None,
    ) -> AsyncIterator[Self]:
        """Load the model on the device thread, and keep an engine open over it.

            async with AsyncEngine.from_config(EngineConfig()) as engine: ...

        `connectors` is the registry to find a KV connector in; without it, the built-in ones.
        Raises: `ModelError`, `ConfigError`, `ConnectorError`. Cancellation while loading: the
        load ends at its next sign of progress, and leaves no half-written file.
        """
        with contextlib.closing(DeviceThread()) as device:
            watched = _Cancellable(progress)
            loaded = await finish_despite_cancel(
                device.submit(_load, config, watched, connectors), on_cancel=watched.cancel
            )
            async with cls.from_loaded(
                config,
                loaded,
                device=device,
                progress=progress,
                connectors=connectors,
                clock=clock,
            ) as engine:
                yield engine

    @classmethod
    @asynccontextmanager
    async def from_loaded(
        cls,
        config: EngineConfig,
        loaded: LoadedModel,
        *,
        device: DeviceThread | None = None,
        progress: Progress | None = None,
        connectors: KVConnectorFactory | None = None,
        clock: Clock | None = None,
    ) -> AsyncIterator[Self]:
        """Keep an engine open over a model that is loaded already; engines may share one.

        `device` is the thread to compute on, best the one that loaded the model; it stays open.
        Without it the engine has one of its own. `progress` shows how far the digest of all
        weights is, which a KV connector needs. Raises: `ConfigError`, `ConnectorError`.
        """
        async with contextlib.AsyncExitStack() as stack:
            if device is None:
                device = stack.enter_context(contextlib.closing(DeviceThread()))
            watched = _Cancellable(progress)
            parts = await _parts_or_nothing(
                device.submit(_make_parts, config, loaded, watched, connectors), device, watched
            )
            engine = cls(
                parts.config,
                parts.model_config,
                parts.runner,
                loaded.tokenizer,
                device=device,
                connector=parts.connector,
                clock=clock,
            )
            async with engine:
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


def _load(
    config: EngineConfig, progress: Progress, connectors: KVConnectorFactory | None
) -> LoadedModel:
    from interlace.layers.checkpoint import load_checkpoint

    if _wants_connector(config):  # an unknown one is refused before the model is loaded
        assert config.kv_transfer_config is not None
        _factory(connectors).get_connector_class(config.kv_transfer_config)
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


def resolve(
    config: EngineConfig, loaded: LoadedModel, model_config: ModelConfig | None = None
) -> EngineConfig:
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
        model_config,
        dtype=str(loaded.decoder.dtype).removeprefix("torch."),
        device=loaded.decoder.device.type,
        max_model_len=loaded.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens or DEFAULT_MAX_BATCHED_TOKENS,
        num_gpu_blocks_override=num_blocks,
        max_inflight_steps=config.max_inflight_steps or DEFAULT_INFLIGHT_STEPS,
    )


async def _parts_or_nothing(
    future: asyncio.Future[_Parts], device: DeviceThread, watched: _Cancellable
) -> _Parts:
    """Await the parts. Cancellation: those that were made are closed, then it is raised."""
    try:
        return await finish_despite_cancel(future, on_cancel=watched.cancel)
    except asyncio.CancelledError:
        if not future.cancelled() and future.exception() is None:
            await finish_despite_cancel(device.submit(future.result().close))
        raise


class _Parts(NamedTuple):
    """What an engine is built of."""

    config: EngineConfig
    model_config: ModelConfig
    runner: ModelRunner
    connector: KVConnectorBase_V1 | None
    """The scheduler side; the runner has the worker side."""

    def close(self) -> None:
        """End them unused. Device thread."""
        if self.connector is not None:
            self.connector.shutdown()
        self.runner.close()


def _make_parts(
    config: EngineConfig,
    loaded: LoadedModel,
    progress: Progress,
    connectors: KVConnectorFactory | None,
) -> _Parts:
    """Pages, runner and both sides of the KV connector. Device thread."""
    from interlace.layers.runner import ModelRunner

    model_config = ModelConfig(
        model=loaded.name,
        dtype=str(loaded.decoder.dtype).removeprefix("torch."),
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.architecture.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        seed=config.seed,
        model_identity=_identity(loaded, progress) if _wants_connector(config) else "",
    )
    resolved = resolve(config, loaded, model_config)
    pages = _make_pages(resolved, loaded)
    with contextlib.ExitStack() as undo:
        scheduler_side = worker_side = None
        if _wants_connector(config):
            worker_side, scheduler_side = _connect(resolved, pages, connectors, undo)
        runner = ModelRunner(loaded.decoder, pages, loaded.eos_token_ids, worker_side)
        undo.pop_all()
    return _Parts(resolved, model_config, runner, scheduler_side)


def _connect(
    config: EngineConfig,
    pages: KVPages,
    connectors: KVConnectorFactory | None,
    undo: contextlib.ExitStack,
) -> tuple[KVConnectorBase_V1, KVConnectorBase_V1]:
    """Worker and scheduler side of the connector, in vLLM's order of making them.

    `undo` ends those that exist if something fails later.
    """
    from interlace.engine.kv_connector import KVConnectorRole

    factory = _factory(connectors)
    sides = []
    for role in (KVConnectorRole.WORKER, KVConnectorRole.SCHEDULER):
        side = factory.create_connector(config, role, pages.describe())
        undo.callback(side.shutdown)
        sides.append(side)
    return sides[0], sides[1]


def _wants_connector(config: EngineConfig) -> bool:
    ktc = config.kv_transfer_config
    return ktc is not None and ktc.is_kv_transfer_instance


def _factory(connectors: KVConnectorFactory | None) -> KVConnectorFactory:
    from interlace.connectors.factory import KVConnectorFactory

    return connectors or KVConnectorFactory()


def _identity(loaded: LoadedModel, progress: Progress) -> str:
    from interlace.layers.checkpoint import model_identity

    return model_identity(loaded, progress)


def _make_pages(config: EngineConfig, loaded: LoadedModel) -> KVPages:
    from interlace.layers.kv_pages import KVPages

    architecture = loaded.architecture
    try:
        return KVPages(
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
