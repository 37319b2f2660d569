"""Wires the parts into an engine that one call opens: model, KV pages, runner, engine.

The only module besides `interlace/__init__.py` that knows engine and layers at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple, Self

from interlace.engine import async_engine
from interlace.engine.config import EngineConfig, ModelConfig
from interlace.engine.connector_errors import blaming
from interlace.engine.device_thread import DeviceThread, finish_despite_cancel
from interlace.engine.errors import ConfigError
from interlace.engine.ports import Clock, Lanes, Progress, StepRunner

if TYPE_CHECKING:
    from interlace.connectors.base import KVConnectorBase_V1
    from interlace.connectors.factory import KVConnectorFactory
    from interlace.engine.kv_connector import KVConnectorRole
    from interlace.layers.attention_backend import KVCacheLayout
    from interlace.layers.checkpoint import LoadedModel
    from interlace.layers.gpu.setup import GpuLimits
    from interlace.layers.kv_memory import PageShape
    from interlace.layers.kv_pages import KVPages

logger = logging.getLogger(__name__)

DEFAULT_KV_CACHE_BYTES = 1 << 30
DEFAULT_GPU_MEMORY_UTILIZATION = 0.9


class _Defaults(NamedTuple):
    """What options are that were left out."""

    max_num_batched_tokens: int
    max_inflight_steps: int
    cudagraph_mode: str | None


_ON_CPU = _Defaults(2048, 1, None)
_ON_GPU = _Defaults(8192, 2, "FULL_AND_PIECEWISE")


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

        `connectors` is the registry to find a KV connector in; without it, the built-in ones. The
        connector's class is found, and validates its options, before the model is loaded.
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
                device.submit(make_parts, config, loaded, watched, connectors), device, watched
            )
            try:
                engine = cls(
                    parts.config,
                    parts.model_config,
                    parts.runner,
                    loaded.tokenizer,
                    device=device,
                    connector=parts.connector,
                    clock=clock,
                )
            except BaseException:
                await finish_despite_cancel(device.submit(parts.close))
                raise
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

    if _wants_connector(config):  # loading may take minutes: what is wrong shows before
        _factory(connectors).validate_config(config)
    return load_checkpoint(
        config.model,
        tokenizer=config.tokenizer,
        skip_tokenizer=config.skip_tokenizer_init,
        dtype=config.dtype,
        device=_pick_device(config),
        max_model_len=config.max_model_len,
        seed=config.seed,
        progress=progress,
    )


def _pick_device(config: EngineConfig) -> str:
    """ "cpu" or "cuda"; what only a GPU honours is refused where there is none."""
    from interlace.layers.hardware.cuda import works

    if config.device != "auto":
        return config.device
    if works():
        return "cuda"
    dataclasses.replace(config, device="cpu")  # checks what a CPU does not honour
    return "cpu"


def _page_shape(config: EngineConfig, loaded: LoadedModel) -> PageShape:
    """What a block of one worker holds. Raises: `ConfigError`."""
    from interlace.layers.kv_memory import PageShape

    architecture = loaded.architecture
    size, layers = config.tensor_parallel_size, config.hidden_state_layer_ids
    if architecture.num_kv_heads % size:
        raise ConfigError(
            f"tensor_parallel_size={size} does not divide the model's {architecture.num_kv_heads}"
            " KV heads: choose one that does."
        )
    if layers and max(layers) > architecture.num_layers:
        raise ConfigError(
            f"hidden_state_layer_ids has {max(layers)}, but the model's states are numbered from 0"
            f" to {architecture.num_layers}."
        )
    return PageShape(
        num_layers=architecture.num_layers,
        block_size=config.block_size,
        num_kv_heads=architecture.num_kv_heads // size,
        head_dim=architecture.head_dim,
        dtype=loaded.decoder.dtype,
        cache_only=(len(layers), architecture.hidden_size) if layers else None,
    )


def resolve(
    config: EngineConfig,
    loaded: LoadedModel,
    model_config: ModelConfig | None = None,
    lanes: Lanes | None = None,
) -> EngineConfig:
    """Fill in what the model and the machine decide.

    On a GPU without a given number of blocks the largest step runs once, to see what is left for
    KV. Raises: `ConfigError` for what the device cannot do, and a pool that cannot hold one block.
    """
    device = loaded.decoder.device.type
    defaults = _ON_GPU if device == "cuda" else _ON_CPU
    resolved = config.resolved(
        model_config,
        lanes=lanes,
        dtype=str(loaded.decoder.dtype).removeprefix("torch."),
        device=device,
        max_model_len=loaded.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens or defaults.max_num_batched_tokens,
        max_inflight_steps=config.max_inflight_steps or defaults.max_inflight_steps,
        cudagraph_mode=config.cudagraph_mode or defaults.cudagraph_mode,
    )
    if device == "cuda":
        _check_gpu(resolved, loaded)
    if resolved.num_gpu_blocks_override is not None:
        return resolved
    return resolved.with_num_blocks(_num_blocks(resolved, loaded))


def _num_blocks(config: EngineConfig, loaded: LoadedModel) -> int:
    """Blocks of the pool, the null block included, if the user said nothing.

    Raises: `ConfigError`.
    """
    shape = _page_shape(config, loaded)
    block_bytes = config.tensor_parallel_size * shape.block_bytes
    if config.kv_cache_bytes is not None:
        num_blocks = 1 + config.kv_cache_bytes // block_bytes
        if num_blocks < 2:
            raise ConfigError(
                f"kv_cache_bytes={config.kv_cache_bytes} holds no block; one takes "
                f"{block_bytes} bytes with this model and block_size={config.block_size}."
            )
        return num_blocks
    if config.device == "cuda":
        from interlace.layers.gpu.setup import measure_num_blocks

        utilization = config.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION
        return measure_num_blocks(
            loaded.decoder, shape, _gpu_limits(config), utilization=utilization
        )
    one_request = -(-loaded.max_model_len // config.block_size)
    return 1 + max(DEFAULT_KV_CACHE_BYTES // block_bytes, one_request)


def _check_gpu(config: EngineConfig, loaded: LoadedModel) -> None:
    """Raises: `ConfigError` for what the GPU, or this engine on a GPU, cannot do."""
    from interlace.layers.gpu.setup import check_gpu

    check_gpu(loaded.decoder.device, loaded.architecture.head_dim)
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            "tensor_parallel_size splits the KV heads on a CPU only: use device='cpu', or leave"
            " it out."
        )
    if config.dtype == "float64":
        raise ConfigError("a GPU's kernels do not compute in float64: use dtype='float32'.")


def _gpu_limits(config: EngineConfig) -> GpuLimits:
    from interlace.layers.gpu.setup import GpuLimits
    from interlace.layers.graph_mode import GraphMode

    scheduler = config.scheduler_config
    mode = GraphMode[config.cudagraph_mode or "NONE"]
    if config.hidden_state_layer_ids:  # the states of a replayed step would be lost
        mode = GraphMode.NONE
    return GpuLimits(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, mode)


async def _parts_or_nothing(
    future: asyncio.Future[Parts], device: DeviceThread, watched: _Cancellable
) -> Parts:
    """Await the parts. Cancellation: those that were made are closed, then it is raised."""
    try:
        return await finish_despite_cancel(future, on_cancel=watched.cancel)
    except asyncio.CancelledError:
        if not future.cancelled() and future.exception() is None:
            await finish_despite_cancel(device.submit(future.result().close))
        raise


class Parts(NamedTuple):
    """What an engine is built of."""

    config: EngineConfig
    model_config: ModelConfig
    pages: Sequence[KVPages]
    """Of each worker."""
    runner: StepRunner
    connector: KVConnectorBase_V1 | None
    """The scheduler side; the runner has the worker sides."""

    def close(self) -> None:
        """End them unused. Device thread. What the connector's `shutdown` raises is logged."""
        with contextlib.ExitStack() as both:
            both.callback(self.runner.close)
            if self.connector is not None:
                both.callback(_shut_down, self.connector)


def _shut_down(side: KVConnectorBase_V1) -> None:
    """Let one side release what it holds. What it raises is logged: it would hide why the engine
    is not opened."""
    try:
        side.shutdown()
    except Exception:
        logger.exception("%s.shutdown failed", type(side).__name__)


def make_parts(
    config: EngineConfig,
    loaded: LoadedModel,
    progress: Progress,
    connectors: KVConnectorFactory | None = None,
    lanes: Lanes | None = None,
) -> Parts:
    """Pages, runner and both sides of the KV connector, in vLLM's order. Device thread.

    `lanes` is where the connector gets its lanes; without it, threads.
    Raises: `ConfigError`, `ConnectorError`; nothing is left open then.
    """
    wants_connector = _wants_connector(config)
    if wants_connector:  # again for who has loaded the model: its digest takes long, too
        _factory(connectors).validate_config(config)
        config = _with_policy(config, _factory(connectors))
    model_config = ModelConfig(
        model=loaded.name,
        dtype=str(loaded.decoder.dtype).removeprefix("torch."),
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.architecture.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        seed=config.seed,
        model_identity=_identity(loaded, progress) if wants_connector else "",
    )
    resolved = resolve(config, loaded, model_config, lanes)
    shape = _page_shape(resolved, loaded)
    if not wants_connector:
        pages = [_make_pages(resolved, shape, loaded) for _ in range(config.tensor_parallel_size)]
        runner = _make_runner(resolved, loaded, pages, [], progress)
        return Parts(resolved, model_config, pages, runner, None)
    # Importing reads files: here and not on the event loop, where the engine will want it.
    importlib.import_module("interlace.engine.connector_metrics")
    with contextlib.ExitStack() as undo:
        sides = _ConnectorSides(resolved, shape, _factory(connectors), undo)
        workers = sides.make_workers()
        cross_layers = sides.want_cross_layers(workers)
        pages = [
            _make_pages(sides.config, shape, loaded, sides.layout, cross_layers) for _ in workers
        ]
        runner = _make_runner(sides.config, loaded, pages, workers, progress)
        scheduler_side = sides.make_scheduler_side()
        undo.pop_all()
    return Parts(sides.config, model_config, pages, runner, scheduler_side)


def _make_runner(
    config: EngineConfig,
    loaded: LoadedModel,
    pages: Sequence[KVPages],
    workers: Sequence[KVConnectorBase_V1],
    progress: Progress,
) -> StepRunner:
    """Registers the pages with the workers' connectors. Raises: `ConfigError`, `ConnectorError`."""
    if config.device == "cuda":
        from interlace.layers.gpu.setup import open_runner

        (only,) = pages
        limits = _gpu_limits(config)
        runner = open_runner(
            loaded.decoder,
            only,
            loaded.eos_token_ids,
            workers,
            limits,
            config.hidden_state_layer_ids,
        )
        runner.capture(limits.mode, limits.sizes, progress)
        return runner
    from interlace.layers.runner import ModelRunner

    return ModelRunner(
        loaded.decoder, pages, loaded.eos_token_ids, workers, config.hidden_state_layer_ids
    )


class _ConnectorSides:
    """Makes the instances of one connector; `undo` ends those that exist if something fails."""

    def __init__(
        self,
        config: EngineConfig,
        shape: PageShape,
        factory: KVConnectorFactory,
        undo: contextlib.ExitStack,
    ) -> None:
        """Raises: `ConfigError`."""
        assert config.kv_transfer_config is not None
        self._factory = factory
        self._undo = undo
        self._kv_cache_config = shape.describe(config.cache_config.num_gpu_blocks)
        self._has_cache_only_layer = shape.cache_only is not None
        self.layout = factory.required_layout(config)
        """Of the pages."""
        mode = factory.graph_mode(config.kv_transfer_config, config.cudagraph_mode)
        self.config = config if mode == config.cudagraph_mode else config.with_graph_mode(mode)
        """As it goes into the constructors."""

    def make_workers(self) -> list[KVConnectorBase_V1]:
        """One for each rank. Raises: `ConfigError`."""
        from interlace.engine.kv_connector import KVConnectorRole

        ranks = range(self.config.tensor_parallel_size)
        return [self._make(self.config.for_rank(rank), KVConnectorRole.WORKER) for rank in ranks]

    def make_scheduler_side(self) -> KVConnectorBase_V1:
        """Raises: `ConfigError`."""
        from interlace.engine.kv_connector import KVConnectorRole

        return self._make(self.config, KVConnectorRole.SCHEDULER)

    def _make(self, config: EngineConfig, role: KVConnectorRole) -> KVConnectorBase_V1:
        side = self._factory.create_connector(config, role, self._kv_cache_config)
        self._undo.callback(_shut_down, side)
        return side

    def want_cross_layers(self, workers: Sequence[KVConnectorBase_V1]) -> bool:
        """Whether the pages are to be one tensor; the cache-only layer is never part of one.

        Raises: `ConnectorError`.
        """
        if self._has_cache_only_layer:
            return False
        with blaming(workers[0], "prefer_cross_layer_blocks"):
            return all(worker.prefer_cross_layer_blocks for worker in workers)


def _with_policy(config: EngineConfig, factory: KVConnectorFactory) -> EngineConfig:
    """What becomes of failed loads, decided: by the user, or by the connector's class."""
    ktc = config.kv_transfer_config
    assert ktc is not None
    if ktc.kv_load_failure_policy is not None:
        return config
    policy = factory.get_connector_class(ktc).default_load_failure_policy
    ktc = dataclasses.replace(ktc, kv_load_failure_policy=policy)
    return dataclasses.replace(config, kv_transfer_config=ktc)


def _wants_connector(config: EngineConfig) -> bool:
    ktc = config.kv_transfer_config
    return ktc is not None and ktc.is_kv_transfer_instance


def _factory(connectors: KVConnectorFactory | None) -> KVConnectorFactory:
    from interlace.connectors.factory import KVConnectorFactory

    return connectors or KVConnectorFactory()


def _identity(loaded: LoadedModel, progress: Progress) -> str:
    from interlace.layers.checkpoint import model_identity

    return model_identity(loaded, progress)


def _make_pages(
    config: EngineConfig,
    shape: PageShape,
    loaded: LoadedModel,
    layout: KVCacheLayout = "NHD",
    cross_layers: bool = False,
) -> KVPages:
    from interlace.layers.kv_pages import KVPages

    num_blocks = config.cache_config.num_gpu_blocks
    try:
        return KVPages.of(
            shape,
            num_blocks=num_blocks,
            device=loaded.decoder.device,
            layout=layout,
            cross_layers=cross_layers,
        )
    except MemoryError as error:
        raise ConfigError(
            f"no memory for {num_blocks} KV blocks; lower kv_cache_bytes or"
            " num_gpu_blocks_override."
        ) from error
