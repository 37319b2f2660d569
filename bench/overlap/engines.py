"""The engines of `interlace bench overlap`: over one loaded model, each opened once, when it is
first asked for."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlace.bench.engine_arm import EngineArm, TokenEngine
from interlace.bench.kv_blocks import BLOCK_SIZE, blocks_for, token_bytes
from interlace.bench.overlap.connector import METER, MeteredPipelineConnector
from interlace.bench.overlap.meter import Meter
from interlace.bench.overlap.sizes import Sizes
from interlace.bench.session import Prepared
from interlace.bench.shown import shown
from interlace.engine.ports import Clock, Progress

if TYPE_CHECKING:
    from interlace.engine.config import EngineConfig, KVTransferConfig

FEWEST_SEQS = 8
"""Each engine captures graphs for batches up to its largest, so that is kept small."""


_REGISTERED_PROMPTS = 8
"""May be registered: files hold more than is asked for."""


class Kind(enum.Enum):
    """Engines differ in their connector alone."""

    PIPELINE = "loads and saves"
    """With a meter, and any load mode."""
    RESTARTED = "loads from files, saves nothing"
    """With a meter, and any load mode. On a GPU the files that are sealed when it opens are
    registered; those of `PIPELINE` are read."""
    CONSUMER = "loads, saves nothing"
    NONE = "no connector"


@dataclasses.dataclass(frozen=True, slots=True)
class OpenEngine:
    """One of them."""

    engine: TokenEngine
    arm: EngineArm
    meter: Meter
    """Of the connector, if the engine is of a kind that has one."""


OpenKind = Callable[[Kind], AbstractAsyncContextManager[OpenEngine]]


class Engines:
    """Opens what is asked for, and keeps it open until its own context ends."""

    def __init__(self, stack: AsyncExitStack, open_kind: OpenKind) -> None:
        """`stack` ends them, newest first."""
        self._stack = stack
        self._open_kind = open_kind
        self._opened: dict[Kind, OpenEngine] = {}

    def fresh(self, kind: Kind) -> AbstractAsyncContextManager[OpenEngine]:
        """One that nobody else is given, and that ends with the context."""
        return self._open_kind(kind)

    async def get(self, kind: Kind) -> OpenEngine:
        """The engine of that kind. Raises: what opening it raises. Cancelling leaves none half
        open."""
        found = self._opened.get(kind)
        if found is None:
            found = await self._stack.enter_async_context(self._open_kind(kind))
            self._opened[kind] = found
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """What the parts that will run need of each engine."""

    pool_tokens: int
    record_tokens: int
    only_decodes: bool
    """Then no graphs but those of decodes are captured."""
    files: Path | None = None
    """Where the engine that saves keeps KV in files, too. None: nowhere."""

    @classmethod
    def of(
        cls, sizes: Sizes, *, has_crowd: bool, only_decodes: bool, files: Path | None = None
    ) -> Room:
        """For work of these sizes."""
        return cls(
            sizes.pool_tokens(has_crowd=has_crowd),
            sizes.record_tokens(has_crowd=has_crowd),
            only_decodes,
            files,
        )


def engine_config(
    prepared: Prepared, kind: Kind, sizes: Sizes, room: Room, meter: Meter
) -> EngineConfig:
    """Of an engine of that kind. Raises: `ConfigError`."""
    from interlace import EngineConfig

    settings = prepared.settings
    graph_mode = settings.cudagraph_mode
    if graph_mode is None and room.only_decodes and settings.device == "cuda":
        graph_mode = "FULL_DECODE_ONLY"
    return EngineConfig(
        model=settings.model,
        device=settings.device,
        dtype=settings.dtype,
        skip_tokenizer_init=True,
        max_model_len=settings.max_model_len,
        max_num_seqs=max(FEWEST_SEQS, sizes.num_decoders + sizes.num_decoders // 4),
        max_num_batched_tokens=settings.max_num_batched_tokens,
        cudagraph_mode=graph_mode,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=1 + blocks_for(room.pool_tokens),
        kv_transfer_config=_connector(kind, sizes, room, token_bytes(prepared.loaded), meter),
    )


def _connector(
    kind: Kind, sizes: Sizes, room: Room, bytes_of_token: int, meter: Meter
) -> KVTransferConfig | None:
    from interlace import KVTransferConfig

    match kind:
        case Kind.PIPELINE | Kind.RESTARTED:
            files: dict[str, Any] = {}
            if room.files is not None:
                registered = sizes.longest * bytes_of_token if kind is Kind.RESTARTED else 0
                files = {
                    "store": "file",
                    "path": str(room.files),
                    "registered_bytes": _REGISTERED_PROMPTS * registered,
                }
            return KVTransferConfig(
                kv_connector=MeteredPipelineConnector.__name__,
                kv_connector_module_path=MeteredPipelineConnector.__module__,
                kv_role="kv_both" if kind is Kind.PIPELINE else "kv_consumer",
                kv_connector_extra_config={
                    "host_bytes": room.record_tokens * bytes_of_token,
                    METER: meter,
                    **files,
                },
            )
        case Kind.CONSUMER:
            return consumer_config(sizes.longest * bytes_of_token)
        case Kind.NONE:
            return None


def consumer_config(host_bytes: int) -> KVTransferConfig:
    """PipelineConnector as it comes, saving off."""
    from interlace import KVTransferConfig

    return KVTransferConfig(
        kv_connector="PipelineConnector",
        kv_role="kv_consumer",
        kv_connector_extra_config={"host_bytes": host_bytes},
    )


def opener(
    prepared: Prepared, sizes: Sizes, room: Room, clock: Clock, progress: Progress
) -> OpenKind:
    """What opens engines over the loaded model."""
    from interlace import AsyncEngine

    @asynccontextmanager
    async def open_kind(kind: Kind) -> AsyncIterator[OpenEngine]:
        meter = Meter()
        config = engine_config(prepared, kind, sizes, room, meter)
        async with (
            AsyncEngine.from_loaded(
                config, prepared.loaded, device=prepared.device, progress=progress, clock=clock
            ) as engine,
            shown(engine, kind.value, prepared.metrics, prepared.traces),
        ):
            yield OpenEngine(engine, EngineArm(engine, clock, kind.value), meter)

    return open_kind
