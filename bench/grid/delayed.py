"""A metered PipelineConnector over a store that answers late: each block takes so much longer.

The lane of loads is held up before it copies, by as much as the blocks of that copy come to; layer
by layer each layer bears its part. On a CPU the lane's thread sleeps, which takes no core from
computing; on a GPU, where nothing may wait for the host, useless copies take the time, as in
`bench/overlap/slow_link.py`. The connector is told what rate to expect, as if it had measured it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from interlace.bench.connector_option import take_option
from interlace.bench.overlap.connector import METER, MeteredPipelineConnector, MeteredWorker
from interlace.bench.overlap.meter import Meter
from interlace.bench.overlap.slow_link import UselessCopies
from interlace.bench.passing_copies import HeldLoads
from interlace.connectors.pipeline.layer_pipeline import LaneCopies, Pace
from interlace.connectors.pipeline.messages import PipelineMetadata
from interlace.connectors.pipeline.options import PipelineOptions
from interlace.connectors.pipeline.worker_feeder import Copies
from interlace.connectors.slab_store.space import Space
from interlace.engine.config import EngineConfig
from interlace.engine.kv_connector import KVCacheConfig, KVConnectorRole
from interlace.engine.ports import Lanes
from interlace.engine.request import Request
from interlace.layers.page_copies import Runs
from interlace.layers.record_space import RecordSpace

if TYPE_CHECKING:
    import torch


class DelayMeter(Meter):
    """A meter that says how late the store is, too."""

    def __init__(self, block_bytes: int) -> None:
        """`block_bytes`: KV of one block, over all layers."""
        super().__init__()
        self.block_delay_s = 0.0
        """That a block takes longer. Changed only while nothing is under way."""
        self._block_bytes = block_bytes

    @property
    def expected_bytes_per_s(self) -> float:
        """Of loads with the delay; 0 if the connector could not measure its link, and there is
        none."""
        copy_s = self._block_bytes / self.link_bytes_per_s if self.link_bytes_per_s else 0.0
        block_s = copy_s + self.block_delay_s
        return self._block_bytes / block_s if block_s else 0.0


class DelayedPipelineConnector(MeteredPipelineConnector):
    """See the module's docstring."""

    def __init__(
        self,
        vllm_config: EngineConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        """Raises: `ConfigError`, also if its meter is no `DelayMeter`."""
        self._delays, _ = take_option(vllm_config, METER, DelayMeter, type(self))
        self._known_delay_s = 0.0
        super().__init__(vllm_config, role, kv_cache_config)

    def _make_worker_side(self) -> None:
        self._worker_side = DelayedWorker(self.options, self.lanes, self._delays, self._make_space)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """As in `PipelineConnector`, knowing how late the store is now."""
        if self._known_delay_s != self._delays.block_delay_s:
            self._known_delay_s = self._delays.block_delay_s
            self._scheduler.chooser.restart_load_rate(self._delays.expected_bytes_per_s)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class DelayedWorker(MeteredWorker):
    """Holds up loads. Device thread."""

    def __init__(
        self,
        options: PipelineOptions,
        lanes: Lanes,
        delays: DelayMeter,
        make_space: Callable[[int, int], Space] | None,
    ) -> None:
        super().__init__(options, lanes, delays, make_space)
        self._delays = delays
        self._known_delay_s = 0.0

    def make_copies(self, records: RecordSpace, layers: Sequence[torch.Tensor]) -> LaneCopies:
        """As in `PipelineWorker`, with loads that may be held up."""
        load, bulk, store = super().make_copies(records, layers)
        device = layers[0].device
        wait: Callable[[float], None] = time.sleep
        if device.type != "cpu":
            waste = UselessCopies(records.host, device).copy

            def wait(seconds: float) -> None:
                waste(int(seconds * self._delays.link_bytes_per_s))

        held_load, held_bulk = (
            DelayedLoads(copies, lambda: self._delays.block_delay_s, wait)
            for copies in (load, bulk)
        )
        return LaneCopies(held_load, held_bulk, store)

    def start(self, metadata: PipelineMetadata, pace: Pace = Pace.AT_ONCE) -> None:
        """As in `PipelineWorker`: as much is queued beside the steps as suits such a store."""
        if self._known_delay_s != self._delays.block_delay_s:
            self._known_delay_s = self._delays.block_delay_s
            self.expect_load_rate(self._delays.expected_bytes_per_s)
        super().start(metadata, pace)


class DelayedLoads(HeldLoads):
    """`Copies` that wait before they load. Lane's thread."""

    def __init__(
        self, copies: Copies, block_delay_s: Callable[[], float], wait: Callable[[float], None]
    ) -> None:
        """`wait` holds the lane up for so many seconds."""
        super().__init__(copies)
        self._block_delay_s = block_delay_s
        self._wait = wait

    def _delay(self, num_layers: int, runs: Runs) -> None:
        seconds = self._block_delay_s() * runs.num_blocks * num_layers / self.num_layers
        if seconds > 0:
            self._wait(seconds)
