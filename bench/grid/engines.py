"""The engines of a grid, and how one arm is run on them: the prefix kept, forgotten, asked for."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from interlace.bench.engine_arm import EngineArm
from interlace.bench.grid.axes import CACHED, NONE, RECOMPUTE
from interlace.bench.grid.delayed import DelayedPipelineConnector, DelayMeter
from interlace.bench.grid.plan import EngineKey, Room
from interlace.bench.grid.points import Point
from interlace.bench.grid.spec import GridSpec
from interlace.bench.kv_blocks import BLOCK_SIZE, blocks_for, token_bytes
from interlace.bench.overlap.arms import FileStore, MeteredArm, require
from interlace.bench.overlap.connector import METER
from interlace.bench.overlap.engines import FEWEST_SEQS
from interlace.bench.overlap.meter import LoadTimes
from interlace.bench.session import Prepared
from interlace.bench.settings import Settings
from interlace.bench.shown import shown
from interlace.bench.timeline import Sample
from interlace.bench.workload import Work, WorkSource
from interlace.connectors.factory import KVConnectorFactory
from interlace.engine.config import EngineConfig, KVTransferConfig
from interlace.engine.errors import ConfigError
from interlace.engine.ports import Clock, Progress

if TYPE_CHECKING:
    from interlace.bench.transformers_arm import TransformersArm

SCRATCH = "{scratch}"
"""In a text among a connector's options: a new folder."""


class Measured(NamedTuple):
    """One run of one arm."""

    sample: Sample
    device_s: float | None = None
    """As in `Metered`; None where the connector does not tell."""
    loads: tuple[LoadTimes, ...] | None = None
    """The same."""


class GridArm(Protocol):
    """An engine that arms share. Idle between calls; event loop."""

    async def keep(self, prefix: Work) -> None:
        """Compute the prompts, and let the connector store them, if there is one."""
        ...

    async def run(self, point: Point, prefix: Work | None, source: WorkSource) -> Measured:
        """Run the arm once behind `prefix`, with new tokens of `source`.

        Raises: what the engine raises; `InterlaceError` if the prefix was not where it should be.
        Cancelling closes every stream.
        """
        ...


class PlainArm:
    """A `GridArm` without a connector, or with one that knows no load modes."""

    def __init__(self, arm: EngineArm, *, stores: bool) -> None:
        self._arm = arm
        self._stores = stores

    async def keep(self, prefix: Work) -> None:
        """See `GridArm`."""
        if self._stores:
            await self._arm.run(prefix)

    async def run(self, point: Point, prefix: Work | None, source: WorkSource) -> Measured:
        """See `GridArm`."""
        self._arm.forget()
        if prefix is not None and point.load_mode == CACHED:
            await self._arm.run(source.behind(prefix, 1))
        sample = await self._arm.run(work_of(point, prefix, source))
        _require_prefix(point, sample)
        return Measured(sample)


class PipelineArm:
    """A `GridArm` with a PipelineConnector, whose mode and delay change from run to run."""

    def __init__(self, arm: MeteredArm, meter: DelayMeter) -> None:
        self._arm = arm
        self._meter = meter

    async def keep(self, prefix: Work) -> None:
        """See `GridArm`."""
        for prompt in prefix.prompts:
            await self._arm.keep(Work((prompt,), 1))

    async def run(self, point: Point, prefix: Work | None, source: WorkSource) -> Measured:
        """See `GridArm`."""
        self._arm.forget()
        if prefix is not None and point.load_mode == CACHED:
            await self._arm.run(source.behind(prefix, 1), "bulk")
        self._meter.block_delay_s = (point.delay_ms or 0) / 1e3
        try:
            hit = await self._arm.run(work_of(point, prefix, source), point.asked_mode)
        finally:
            self._meter.block_delay_s = 0.0
        _require_prefix(point, hit.sample)
        return Measured(hit.sample, hit.device_s, hit.loads)


class TheirArm:
    """A `GridArm` of transformers, which computes all."""

    def __init__(self, arm: TransformersArm) -> None:
        self._arm = arm

    async def keep(self, prefix: Work) -> None:
        """Nothing is kept."""

    async def run(self, point: Point, prefix: Work | None, source: WorkSource) -> Measured:
        """See `GridArm`."""
        return Measured(await self._arm.run(work_of(point, prefix, source)))


def work_of(point: Point, prefix: Work | None, source: WorkSource) -> Work:
    """New tokens behind the prefix, if there is one."""
    if prefix is None:
        return source.make(point.batch, point.new, point.output)
    return source.behind(prefix, point.new, point.output)


def _require_prefix(point: Point, sample: Sample) -> None:
    whole = point.batch * point.prefix
    if point.load_mode == CACHED:
        require(sample.cached_tokens, whole, "cached on the device")
    elif point.load_mode in ("bulk", "layerwise"):
        require(sample.loaded_tokens, whole, "loaded")
    elif point.load_mode == RECOMPUTE:
        require(whole - sample.loaded_tokens - sample.cached_tokens, whole, "computed again")


def engine_config(
    settings: Settings, key: EngineKey, room: Room, transfer: KVTransferConfig | None
) -> EngineConfig:
    """Of an engine with that connector, on the device that was picked. Raises: `ConfigError`."""
    return EngineConfig(
        model=settings.model,
        device=settings.device,
        dtype=settings.dtype,
        skip_tokenizer_init=True,
        max_model_len=settings.max_model_len,
        max_num_seqs=max(FEWEST_SEQS, room.num_seqs),
        max_num_batched_tokens=key.max_num_batched_tokens,
        max_inflight_steps=key.max_inflight_steps,
        cudagraph_mode=key.graph_mode,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=1 + blocks_for(room.pool_tokens),
        kv_transfer_config=transfer,
    )


def transfer_config(
    spec: GridSpec, key: EngineKey, folder: Path, host_bytes: int
) -> KVTransferConfig | None:
    """The connector of an engine whose files may lie in `folder`, without a meter.

    Raises: `ConfigError`.
    """
    if key.connector in (None, NONE):
        return None
    fields = dict(_placed(spec.connectors[str(key.connector)], folder))
    if not spec.has_load_modes(key.connector):
        return KVTransferConfig(**fields)
    options = {"host_bytes": host_bytes, "group_size": key.group_size, "store": key.store}
    if key.store == "file":  # files are read by the host: what is registered is decided at the open
        options |= {"path": str(folder / "files"), "registered_bytes": 0}
    extra = {**options, **fields.get("kv_connector_extra_config", {})}
    return KVTransferConfig(**(fields | {"kv_connector_extra_config": extra}))


def _placed(value: Any, folder: Path) -> Any:
    """With the folder for `SCRATCH` in every text."""
    if isinstance(value, Mapping):
        return {key: _placed(one, folder) for key, one in value.items()}
    if isinstance(value, list):
        return [_placed(one, folder) for one in value]
    return value.replace(SCRATCH, str(folder)) if isinstance(value, str) else value


def check_engine(
    settings: Settings, spec: GridSpec, key: EngineKey, room: Room, folder: Path
) -> None:
    """Refuse what no engine, and no connector, takes, before a model is loaded. Device thread.

    Raises: `ConfigError`.
    """
    if key.is_theirs:
        return
    transfer = transfer_config(spec, key, folder, 1 << 30)
    if spec.has_load_modes(key.connector) and transfer and transfer.kv_role != "kv_both":
        raise ConfigError(
            f"connectors.{key.connector}.kv_role = {transfer.kv_role!r}: a prefix is stored and"
            " loaded; give kv_both."
        )
    config = engine_config(settings, key, room, transfer)
    if transfer is not None:
        KVConnectorFactory().validate_config(config)


@contextlib.asynccontextmanager
async def open_arm(
    prepared: Prepared,
    spec: GridSpec,
    key: EngineKey,
    room: Room,
    folder: Path,
    clock: Clock,
    progress: Progress,
) -> AsyncIterator[GridArm]:
    """The engine of these arms, over the loaded model; its files lie in `folder`, which is its own.

    Raises: `ConfigError`. Cancelling leaves none half open.
    """
    from interlace import AsyncEngine

    if key.is_theirs:
        from interlace.bench.transformers_arm import TransformersArm

        yield TheirArm(TransformersArm(prepared.reference, clock, prepared.device))
        return
    bytes_of_token = token_bytes(prepared.loaded)
    transfer = transfer_config(spec, key, folder, room.record_tokens * bytes_of_token)
    meter = None
    if spec.has_load_modes(key.connector):
        assert transfer is not None, "it has a connector"
        meter = DelayMeter(bytes_of_token * BLOCK_SIZE)
        transfer = dataclasses.replace(
            transfer,
            kv_connector=DelayedPipelineConnector.__name__,
            kv_connector_module_path=DelayedPipelineConnector.__module__,
            kv_connector_extra_config={**transfer.kv_connector_extra_config, METER: meter},
        )
    config = engine_config(prepared.settings, key, room, transfer)
    async with (
        AsyncEngine.from_loaded(
            config, prepared.loaded, device=prepared.device, progress=progress, clock=clock
        ) as engine,
        shown(engine, key.label, prepared.metrics, prepared.traces),
    ):
        arm = EngineArm(engine, clock)
        if meter is None:
            yield PlainArm(arm, stores=transfer is not None)
        else:
            files = FileStore(arm, meter) if key.store == "file" else None
            yield PipelineArm(MeteredArm(arm, meter, prepared.device, files), meter)
