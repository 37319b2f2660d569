"""PipelineConnector, and a tape on which it notes what it does for a prompt from both ends.

Named by `kv_connector_module_path`; its configuration has a `HybridTape` beside PipelineConnector's
own options. It is never idle: each step is seen. On a CPU its layer hooks, which have nothing to
wait for in such steps, tell when each layer begins; on a GPU they are left out as ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from interlace.bench.awake_steps import awake
from interlace.bench.passing_copies import PassingCopies
from interlace.bench.step_trace.facts import RanStep
from interlace.bench.step_trace.hybrid_tape import HybridTape, NotedSlice
from interlace.bench.step_trace.taped import TapedConnector
from interlace.connectors.pipeline.layer_pipeline import LaneCopies, Pace
from interlace.connectors.pipeline.messages import PipelineMetadata
from interlace.connectors.pipeline.options import PipelineOptions
from interlace.connectors.pipeline.worker import PipelineWorker
from interlace.connectors.pipeline.worker_feeder import Copies
from interlace.engine.config import EngineConfig
from interlace.engine.kv_connector import KVCacheConfig, KVConnectorRole
from interlace.engine.ports import Lanes
from interlace.engine.scheduler_output import SchedulerOutput
from interlace.layers.page_copies import Copied, Runs
from interlace.layers.record_space import RecordSpace

if TYPE_CHECKING:
    import torch

    from interlace.layers.forward_context import ForwardContext


class HybridNotesConnector(TapedConnector[HybridTape]):
    """See the module's docstring, and the base class for when each method is called."""

    tape_kind = HybridTape

    def __init__(
        self,
        vllm_config: EngineConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        """Raises: what the base class raises."""
        super().__init__(vllm_config, role, kv_cache_config)
        self._sees_layers = False

    def _make_worker_side(self) -> None:
        self._worker_side = _NotingWorker(self.options, self.lanes, self._tape)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PipelineMetadata:
        """As the base class, but never idle."""
        return awake(super().build_connector_meta(scheduler_output), scheduler_output)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """As the base class."""
        self._sees_layers = next(iter(kv_caches.values())).device.type == "cpu"
        super().register_kv_caches(kv_caches)

    def has_connector_metadata(self) -> bool:
        """On a CPU always, so that the layer hooks are called."""
        return self._sees_layers or super().has_connector_metadata()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Note the begin of a step that computes."""
        metadata = self._metadata
        if metadata.num_tokens:
            self._tape.begin(RanStep(metadata.step_id, metadata.num_tokens))
        super().start_load_kv(forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Note the begin of a layer."""
        self._tape.reach()
        super().wait_for_layer_load(layer_name)


class _NotingWorker(PipelineWorker):
    """Notes loads from the back, and the slices that its lane "bulk" copies."""

    def __init__(self, options: PipelineOptions, lanes: Lanes, tape: HybridTape) -> None:
        super().__init__(options, lanes)
        self._tape = tape

    def make_copies(self, records: RecordSpace, layers: Sequence[torch.Tensor]) -> LaneCopies:
        """As the base class, but for the lane "bulk"."""
        copies = super().make_copies(records, layers)
        return copies._replace(bulk=_NotingCopies(copies.bulk, self._tape))

    def start(self, metadata: PipelineMetadata, pace: Pace = Pace.AT_ONCE) -> None:
        """Note the loads first: a GPU's copies are queued within this."""
        for load in metadata.loads:
            if load.share is not None:
                self._tape.note_load(load.request_id, load.runs)
        super().start(metadata, pace)


class _NotingCopies(PassingCopies):
    """`Copies` that note each load over several layers. Lane's thread."""

    def __init__(self, copies: Copies, tape: HybridTape) -> None:
        super().__init__(copies)
        self._tape = tape

    def load_layers(self, layers: range, runs: Runs) -> Iterator[Copied]:
        """See `Copies`; noted when all of it was copied, or queued."""
        begin = self._tape.now_ns()
        num_bytes = num_copies = 0
        for copied in super().load_layers(layers, runs):
            num_bytes += copied.num_bytes
            num_copies += copied.num_copies
            yield copied
        end = self._tape.now_ns()
        self._tape.add_slice(NotedSlice(runs.runs, begin, end, num_bytes, num_copies))
