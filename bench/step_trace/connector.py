"""PipelineConnector, and a tape on which it notes what its steps do. For CPUs: a GPU's work has no
host time.

Named by `kv_connector_module_path`; its configuration has a `StepTape` beside PipelineConnector's
own options.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from interlace.bench.passing_copies import PassingCopies
from interlace.bench.step_trace.tape import StepTape
from interlace.bench.step_trace.taped import TapedConnector
from interlace.connectors.pipeline.layer_pipeline import LaneCopies
from interlace.connectors.pipeline.options import PipelineOptions
from interlace.connectors.pipeline.worker import PipelineWorker
from interlace.connectors.pipeline.worker_feeder import Copies
from interlace.engine.config import EngineConfig
from interlace.engine.errors import ConfigError
from interlace.engine.kv_connector import KVCacheConfig, KVConnectorRole
from interlace.engine.ports import Lanes
from interlace.layers.page_copies import Copied, Runs
from interlace.layers.record_space import RecordSpace

if TYPE_CHECKING:
    import torch

    from interlace.layers.forward_context import ForwardContext


class TapedPipelineConnector(TapedConnector[StepTape]):
    """See the module's docstring, and the base class for when each method is called."""

    tape_kind = StepTape

    def __init__(
        self,
        vllm_config: EngineConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        """Raises: what the base class raises."""
        super().__init__(vllm_config, role, kv_cache_config)
        self._places: dict[str, int] = {}

    def _make_worker_side(self) -> None:
        self._worker_side = _TapedWorker(self.options, self.lanes, self._tape)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """As the base class, with a load lane whose copies are noted.

        Raises: also `ConfigError` for pages on a GPU.
        """
        if next(iter(kv_caches.values())).device.type != "cpu":
            raise ConfigError("TapedPipelineConnector is for CPUs: profile the device instead.")
        self._places = {name: layer for layer, name in enumerate(kv_caches)}
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Note the begin of a step that loads."""
        if self.has_connector_metadata():
            self._tape.begin()
        super().start_load_kv(forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Note both sides of the gate."""
        layer = self._places[layer_name]
        self._tape.reach(layer)
        super().wait_for_layer_load(layer_name)
        self._tape.go_on(layer)


class _TapedWorker(PipelineWorker):
    """Its load lane notes what it copies."""

    def __init__(self, options: PipelineOptions, lanes: Lanes, tape: StepTape) -> None:
        super().__init__(options, lanes)
        self._tape = tape

    def make_copies(self, records: RecordSpace, layers: Sequence[torch.Tensor]) -> LaneCopies:
        """As the base class, but for the load lane."""
        copies = super().make_copies(records, layers)
        return copies._replace(load=_TapedCopies(copies.load, self._tape))


class _TapedCopies(PassingCopies):
    """`Copies` that note each load of a layer: in host memory those are single. Lane's thread."""

    def __init__(self, copies: Copies, tape: StepTape) -> None:
        super().__init__(copies)
        self._tape = tape

    def load(self, layer: int, runs: Runs) -> Copied:
        """See `Copies`; noted."""
        begin = self._tape.now_ns()
        copied = super().load(layer, runs)
        self._tape.add_load(layer, begin, copied.num_bytes)
        return copied

    def load_layers(self, layers: range, runs: Runs) -> Iterator[Copied]:
        """See `Copies`; each noted."""
        return (self.load(layer, runs) for layer in layers)
