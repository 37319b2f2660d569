"""PipelineConnector with a meter, whose load mode can be changed from request to request.

So one engine, with one pool and one set of graphs, stands for an engine of each mode. The meter is
an entry of `kv_connector_extra_config`; engines find the class by `kv_connector_module_path`.
Nothing else is changed: a request takes the way that `load_mode` would have forced.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from interlace.bench.awake_steps import awake
from interlace.bench.connector_option import take_option
from interlace.bench.overlap.meter import Meter
from interlace.bench.overlap.slow_link import SlowLoads, UselessCopies
from interlace.connectors.pipeline.layer_pipeline import LaneCopies, Pace, PipelinedLoad
from interlace.connectors.pipeline.messages import PipelineHandshake, PipelineMetadata
from interlace.connectors.pipeline.options import PipelineOptions
from interlace.connectors.pipeline.rates import Forecast
from interlace.connectors.pipeline.worker import PipelineWorker
from interlace.connectors.pipeline.worker_bulk import BulkLoad, Chunk
from interlace.connectors.pipeline.worker_feeder import FedTransfer
from interlace.connectors.pipeline_connector import PipelineConnector
from interlace.connectors.slab_store.space import Space
from interlace.engine.config import EngineConfig
from interlace.engine.kv_connector import (
    KVCacheConfig,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
)
from interlace.engine.ports import Lanes
from interlace.engine.request import Request
from interlace.engine.scheduler_output import SchedulerOutput
from interlace.layers.record_space import RecordSpace

if TYPE_CHECKING:
    import torch

METER = "meter"
"""Key of the meter among the connector's options."""


class MeteredPipelineConnector(PipelineConnector):
    """See the module's docstring."""

    def __init__(
        self,
        vllm_config: EngineConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        """Raises: `ConfigError`, also if there is no meter."""
        self._meter, config = take_option(vllm_config, METER, Meter, type(self))
        super().__init__(config, role, kv_cache_config)
        self._slowdown = 1

    def _make_worker_side(self) -> None:
        self._worker_side = MeteredWorker(self.options, self.lanes, self._meter, self._make_space)

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """As in `PipelineConnector`; the meter learns of this side, and of the measured rate."""
        super().set_xfer_handshake_metadata(metadata)
        self._meter.scheduler = self._scheduler
        handshake = metadata.get(0)
        if isinstance(handshake, PipelineHandshake):
            self._meter.link_bytes_per_s = handshake.load_bytes_per_s

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """As if the connector had been made with the load mode, and the link, that the meter says
        now."""
        chooser, meter = self._scheduler.chooser, self._meter
        chooser.load_mode = meter.load_mode
        if self._slowdown != meter.slowdown:
            self._slowdown = meter.slowdown
            chooser.restart_load_rate(meter.link_bytes_per_s / meter.slowdown)
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        meter.predicted_s = _balanced_s(chooser.last_forecast)
        return answer

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PipelineMetadata:
        """As in `PipelineConnector`; while the meter is on, it sees every step."""
        metadata = super().build_connector_meta(scheduler_output)
        return awake(metadata, scheduler_output) if self._meter.is_on else metadata

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """As in `PipelineConnector`; by now the step's sampling was queued."""
        if isinstance(self._worker_side, MeteredWorker):
            self._worker_side.note_sampled()
        return super().get_finished(finished_req_ids)


class MeteredWorker(PipelineWorker):
    """Tells a meter what it begins. Device thread."""

    def __init__(
        self,
        options: PipelineOptions,
        lanes: Lanes,
        meter: Meter,
        make_space: Callable[[int, int], Space] | None,
    ) -> None:
        super().__init__(options, lanes, make_space=make_space)
        self._meter = meter
        self._slowdown = 1
        self._has_queued = False  # a forward, in this step

    def make_copies(self, records: RecordSpace, layers: Sequence[torch.Tensor]) -> LaneCopies:
        """As in `PipelineWorker`, with a link that may be made slower."""
        load, bulk, store = super().make_copies(records, layers)
        slow_load, slow_bulk = (
            SlowLoads(
                copies,
                lambda: self._meter.slowdown,
                UselessCopies(records.host, layers[0].device).copy,
            )
            for copies in (load, bulk)
        )
        return LaneCopies(slow_load, slow_bulk, store)

    def start(self, metadata: PipelineMetadata, pace: Pace = Pace.AT_ONCE) -> None:
        """As in `PipelineWorker`; loads are timed and noted."""
        meter = self._meter
        if self._slowdown != meter.slowdown:
            self._slowdown = meter.slowdown
            self.expect_load_rate(meter.link_bytes_per_s / meter.slowdown)
        if not meter.is_on:
            super().start(metadata, pace)
            return
        meter.use(self._open.pipeline.watch)
        if metadata.loads or metadata.num_tokens:
            meter.note_begin(metadata.num_tokens)
        known = len(self._step_loads)
        super().start(metadata, pace)
        for step_load in self._step_loads[known:]:
            num_runs = sum(len(load.runs) for load in step_load.loads)
            submit_s = functools.partial(_submit_s, step_load.pipelined)
            meter.note_load(step_load.pipelined, num_runs=num_runs, submit_s=submit_s)

    def _begin(self, one: BulkLoad, chunk: Chunk) -> FedTransfer:
        """As in `PipelineWorker`: now, or when its blocks have been read from files."""
        read_s = 0.0
        if one.fetching is not None and not one.transfers:
            read_s = time.monotonic() - one.fetching.begun_s
        began = time.perf_counter()
        transfer = super()._begin(one, chunk)
        submit_s = time.perf_counter() - began
        if self._meter.is_on:
            self._meter.note_load(
                transfer,
                num_runs=len(chunk.runs),
                submit_s=lambda: submit_s,
                read_s=read_s,
            )
        return transfer

    def finish_forward(self) -> None:
        """As in `PipelineWorker`."""
        super().finish_forward()
        self._has_queued = True

    def note_sampled(self) -> None:
        """The step's sampling was queued, if it has a forward."""
        has_queued, self._has_queued = self._has_queued, False
        if has_queued and self._meter.is_on:
            self._meter.note_end()


def _submit_s(load: PipelinedLoad) -> float:
    return load.submit_s


def _balanced_s(forecast: Forecast | None) -> float | None:
    if forecast is None or forecast.hybrid_s is None or forecast.rest_s is None:
        return None
    return forecast.hybrid_s + forecast.rest_s
