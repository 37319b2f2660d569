"""Whole engines over PipelineConnector on a GPU, whose loads a test delays, fails and poisons.

The target blocks of each load are filled with NaN first, on the compute stream: so who reads one
before its copy has ended gets no answer at all.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest
import torch
from connected_gpu import BLOCK_SIZE
from deep_model import deep_model

from interlace import AsyncEngine, EngineConfig, KVTransferConfig
from interlace.connectors.pipeline.layer_pipeline import Pace
from interlace.connectors.pipeline.messages import PipelineMetadata
from interlace.connectors.pipeline.worker import PipelineWorker
from interlace.connectors.pipeline_connector import PipelineConnector
from interlace.layers.checkpoint import LoadedModel
from interlace.layers.graph_mode import GraphMode
from interlace.layers.page_copies import Copied, PageCopies, Runs

NUM_LAYERS = 6
"""With groups of two, the third and the fourth share a gate."""
HEAD_DIM = 64
RECORD_BYTES = NUM_LAYERS * 2 * BLOCK_SIZE * 2 * HEAD_DIM * 4
"""Layers, K and V, tokens, heads, head size, float32."""
LONGEST_CYCLES = 600_000
"""A third of a millisecond or so."""

Before = Callable[[int, Runs], None]
"""(layer, runs): called before a layer of a load is queued, while its stream is the current one."""


def plain_model() -> LoadedModel:
    """For right answers."""
    return deep_model(NUM_LAYERS, head_dim=HEAD_DIM)


def gpu_model(device: str = "cuda") -> LoadedModel:
    """The same in float32."""
    return deep_model(NUM_LAYERS, head_dim=HEAD_DIM, dtype=torch.float32, device=device)


class LoadRig:
    """What becomes of loads, of all engines that are opened after `install`."""

    def __init__(self, seed: int = 0) -> None:
        self.before: Before = lambda layer, runs: None
        self.records_of: dict[str, set[int]] = {}
        """Request id -> the records that it was to load."""
        self.modes: list[GraphMode] = []
        """How steps ran that load within themselves."""
        self.num_loads = 0
        self._draw = random.Random(seed)
        self._pages: dict[PipelineWorker, list[torch.Tensor]] = {}

    def delay(self, layer: int, runs: Runs) -> None:
        """A `Before`: two of three copies come later, by chance."""
        cycles = self._draw.choice([0, 1, 1]) * self._draw.randrange(1, LONGEST_CYCLES)
        if cycles:
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]

    def is_of(self, request_id: str, runs: Runs) -> bool:
        """Whether a copy loads something for this request."""
        records = {record + i for record, _, count in runs.runs for i in range(count)}
        return not records.isdisjoint(self.records_of.get(request_id, ()))

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Until the test ends."""
        register, start, load = PipelineWorker.register, PipelineWorker.start, PageCopies.load
        start_load_kv = PipelineConnector.start_load_kv
        rig = self

        def rigged_register(worker: PipelineWorker, kv_caches: Mapping[str, torch.Tensor]) -> None:
            register(worker, kv_caches)
            rig._pages[worker] = list(kv_caches.values())

        def rigged_start(
            worker: PipelineWorker, metadata: PipelineMetadata, pace: Pace = Pace.AT_ONCE
        ) -> None:
            if metadata.step_id != worker._begun_step:
                rig._note_and_poison(metadata, rig._pages[worker])
            start(worker, metadata, pace)

        def rigged_load(copies: PageCopies, layer: int, runs: Runs) -> Copied:
            rig.before(layer, runs)
            return load(copies, layer, runs)

        def rigged_load_layers(copies: PageCopies, layers: range, runs: Runs) -> Iterator[Copied]:
            return (rigged_load(copies, layer, runs) for layer in layers)

        def rigged_start_load_kv(side: PipelineConnector, context: Any, **kwargs: Any) -> None:
            if side._metadata.loads_within_step:
                rig.modes.append(context.cudagraph_runtime_mode)
            start_load_kv(side, context, **kwargs)

        monkeypatch.setattr(PipelineWorker, "register", rigged_register)
        monkeypatch.setattr(PipelineWorker, "start", rigged_start)
        monkeypatch.setattr(PageCopies, "load", rigged_load)
        monkeypatch.setattr(PageCopies, "load_layers", rigged_load_layers)
        monkeypatch.setattr(PipelineConnector, "start_load_kv", rigged_start_load_kv)

    def _note_and_poison(self, metadata: PipelineMetadata, layers: list[torch.Tensor]) -> None:
        for load in metadata.loads:
            self.num_loads += 1
            records = self.records_of.setdefault(load.request_id, set())
            for run in load.runs:
                records |= {run.record + i for i in range(run.num_blocks)}
                for pages in layers:
                    pages[run.block_id : run.block_id + run.num_blocks].fill_(torch.nan)


@asynccontextmanager
async def an_engine(
    model: LoadedModel,
    load_mode: str,
    *,
    policy: Literal["fail", "recompute"] = "recompute",
    group_size: int = 1,
    depth: int = 2,
    num_records: int = 1000,
    graphs: str | None = "FULL_AND_PIECEWISE",
    **options: Any,
) -> AsyncIterator[AsyncEngine]:
    """With room for six requests at a time."""
    given: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": 90,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 64,
        **options,
    }
    config = EngineConfig(
        cudagraph_mode=graphs,
        max_inflight_steps=depth,
        kv_transfer_config=KVTransferConfig(
            kv_connector="PipelineConnector",
            kv_role="kv_both",
            kv_load_failure_policy=policy,
            kv_connector_extra_config={
                "load_mode": load_mode,
                "group_size": group_size,
                "host_bytes": num_records * RECORD_BYTES,
            },
        ),
        **given,
    )
    async with AsyncEngine.from_loaded(config, model) as engine:
        yield engine
