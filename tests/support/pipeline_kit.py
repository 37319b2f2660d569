"""Whole engines over PipelineConnector whose copies a test delays, fails, holds up and poisons."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest
import torch
from engine_kit import until
from hooked_copies import HookedCopies
from tiny_model import VOCAB_SIZE

from interlace import AsyncEngine, EngineConfig, KVTransferConfig, SamplingParams
from interlace.connectors.pipeline.layer_pipeline import LaneCopies, LayerPipeline, Pace
from interlace.connectors.pipeline.messages import PipelineMetadata
from interlace.connectors.pipeline.options import PipelineOptions
from interlace.connectors.pipeline.worker import PipelineWorker
from interlace.connectors.pipeline_connector import PipelineConnector
from interlace.engine.outputs import Completion
from interlace.engine.ports import Lanes
from interlace.layers.checkpoint import LoadedModel
from interlace.layers.lanes import ThreadLanes
from interlace.layers.page_copies import Runs
from interlace.layers.record_space import RecordSpace

PATIENCE_S = 20.0
BLOCK_SIZE = 4
NUM_LAYERS = 4
RECORD_BYTES = NUM_LAYERS * 2 * BLOCK_SIZE * 2 * 8 * 8
"""Layers, K and V, tokens, heads, head size, float64."""
LOADING = ("load", "bulk")

Before = Callable[[str, int, Runs], None]
"""(lane, layer, runs): called on the lane before each copy; it may raise, and wait."""


def some_tokens(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB_SIZE) for _ in range(length)]


class Rig:
    """What becomes of the copies of one engine."""

    def __init__(
        self,
        lanes: Lanes | None = None,
        *,
        before: Before = lambda lane, layer, runs: None,
        deadline_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
        window_bytes: int = 4 * RECORD_BYTES,
    ) -> None:
        self.lanes = lanes or ThreadLanes()
        self.before = before
        self.deadline_s = deadline_s
        self.clock = clock
        self.window_bytes = window_bytes
        self.records_of: dict[str, set[int]] = {}
        """Request id -> the records that it was to load."""
        self.num_loads = 0
        self.most_at_once = 0
        """Requests that loaded within one step."""
        self.num_poisoned = 0
        self.pipeline: LayerPipeline | None = None

    @property
    def opened(self) -> LayerPipeline:
        """Of the engine that was opened last."""
        assert self.pipeline is not None, "no engine is open"
        return self.pipeline

    def before_on(self, lane: str) -> Callable[[int, Runs], None]:
        """What is called before each copy on that lane: `before`, whatever it is by then."""
        return lambda layer, runs: self.before(lane, layer, runs)

    def is_of(self, request_id: str, runs: Runs) -> bool:
        """Whether a copy loads something for this request."""
        records = {record + i for record, _, count in runs.runs for i in range(count)}
        return not records.isdisjoint(self.records_of.get(request_id, ()))

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let engines that are opened from now on use it."""

        def make(connector: PipelineConnector) -> None:
            connector._worker_side = RiggedWorker(connector.options, self)

        monkeypatch.setattr(PipelineConnector, "_make_worker_side", make)


class RiggedWorker(PipelineWorker):
    """All pages but those of the null block begin as NaN, and are it again before each load."""

    def __init__(self, options: PipelineOptions, rig: Rig) -> None:
        super().__init__(options, rig.lanes, window_bytes=rig.window_bytes)
        self._rig = rig
        self._pages: list[torch.Tensor] = []

    def make_pipeline(
        self, records: RecordSpace, layers: Sequence[torch.Tensor], lanes: Lanes
    ) -> LayerPipeline:
        rig = self._rig
        self._pages = list(layers)
        copies = (
            HookedCopies(records, self._pages, rig.before_on(lane)) for lane in LaneCopies._fields
        )
        pipeline = rig.pipeline = LayerPipeline(
            lanes,
            LaneCopies(*copies),
            group_size=self._options.group_size,
            window_bytes=rig.window_bytes,
            deadline_s=rig.deadline_s,
            clock=rig.clock,
        )
        for pages in self._pages:
            pages[1:] = torch.nan
        return pipeline

    def start(self, metadata: PipelineMetadata, pace: Pace = Pace.AT_ONCE) -> None:
        rig = self._rig
        if metadata.step_id != self._begun_step:
            within = [load for load in metadata.loads if not load.is_async]
            rig.most_at_once = max(rig.most_at_once, len(within))
            for load in metadata.loads:
                rig.num_loads += 1
                records = rig.records_of.setdefault(load.request_id, set())
                for run in load.runs:
                    records |= {run.record + i for i in range(run.num_blocks)}
                    self._poison(run.block_id, run.num_blocks)
        super().start(metadata, pace)

    def _poison(self, block_id: int, num_blocks: int) -> None:
        for pages in self._pages:
            pages[block_id : block_id + num_blocks] = torch.nan
        self._rig.num_poisoned += num_blocks


class RandomDelays:
    """Sleeps before some copies, on whatever thread they are made. Any thread."""

    def __init__(self, seed: int, longest_s: float = 0.002) -> None:
        self._draw = random.Random(seed)
        self._lock = threading.Lock()
        self._longest_s = longest_s

    def __call__(self, lane: str, layer: int, runs: Runs) -> None:
        with self._lock:
            seconds = self._draw.choice([0.0, 0.0, self._draw.random()]) * self._longest_s
        if seconds:
            time.sleep(seconds)


@asynccontextmanager
async def an_engine(
    model: LoadedModel,
    load_mode: str,
    *,
    policy: Literal["fail", "recompute"] = "recompute",
    num_records: int = 400,
    num_blocks: int = 60,
    group_size: int = 3,
    depth: int = 1,
    **options: Any,
) -> AsyncIterator[AsyncEngine]:
    """`num_blocks` are the usable ones."""
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=num_blocks + 1,
        skip_tokenizer_init=True,
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
        **{"max_num_batched_tokens": 32, **options},
    )
    async with asyncio.timeout(2 * PATIENCE_S), AsyncEngine.from_loaded(config, model) as engine:
        yield engine


async def ask(
    engine: AsyncEngine, prompt: Sequence[int], num_tokens: int, request_id: str | None = None
) -> Completion:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return await engine.complete(list(prompt), params, request_id=request_id)


async def forget_on_device(engine: AsyncEngine) -> None:
    """When nothing is computed, loaded or saved any more."""
    await until(lambda: engine.snapshot().idle and not engine.snapshot().num_held_requests)
    assert engine.reset_prefix_cache()
