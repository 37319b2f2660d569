"""A LayerPipeline between small records and pages in host memory, for tests that look at both."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch
from hooked_copies import HookedCopies

from interlace.connectors.pipeline.layer_pipeline import LaneCopies, LayerPipeline, SaveTransfer
from interlace.connectors.pipeline.worker_times import ClockStopwatch
from interlace.engine.ports import Lane, Lanes
from interlace.layers.page_copies import Run

PATIENCE_S = 20.0
NUM_RECORDS, NUM_BLOCKS, NUM_LAYERS, PAGE_BYTES = 24, 32, 5, 32


class LanesKit:
    """See the module's docstring."""

    def __init__(
        self,
        lanes: Lanes,
        *,
        group_size: int = 2,
        window_bytes: int = 1 << 20,
        deadline_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        random = torch.Generator().manual_seed(0)
        shape = (NUM_LAYERS, PAGE_BYTES)
        self.records = torch.randint(
            0, 256, (NUM_RECORDS, *shape), dtype=torch.uint8, generator=random
        )
        self.layers = [
            torch.randint(
                0, 256, (NUM_BLOCKS, PAGE_BYTES), dtype=torch.uint8, generator=random
            ).view(NUM_BLOCKS, 2, 2, 2, 4)
            for _ in range(NUM_LAYERS)
        ]
        self.copies = HookedCopies(self.records, self.layers)
        self.pipeline = LayerPipeline(
            lanes,
            LaneCopies(self.copies, self.copies, self.copies),
            group_size=group_size,
            window_bytes=window_bytes,
            deadline_s=deadline_s,
            watch=ClockStopwatch(lambda: 0.0),
            clock=clock,
        )
        self.was_records = self.records.clone()
        self.was_layers = [layer.clone() for layer in self.layers]

    def is_loaded(self, layer: int, runs: Sequence[Run]) -> bool:
        rows = self.layers[layer].view(NUM_BLOCKS, PAGE_BYTES)
        return all(torch.equal(rows[b : b + n], self.records[r : r + n, layer]) for r, b, n in runs)

    def is_untouched(self, blocks: Sequence[int]) -> bool:
        return all(
            torch.equal(now[block], was[block])
            for now, was in zip(self.layers, self.was_layers, strict=True)
            for block in blocks
        )

    def is_saved(self, runs: Sequence[Run]) -> bool:
        return all(self.is_loaded(layer, runs) for layer in range(NUM_LAYERS))

    def finish(self, transfer: SaveTransfer) -> None:
        """Poll until it is done, which takes a bounded number of times."""
        for _ in range(10_000):
            if transfer.is_done:
                return
            self.pipeline.poll()
            if transfer.last_gate is not None:
                transfer.last_gate.wait(PATIENCE_S)
        raise AssertionError("it never ends")


def blocks_of(runs: Sequence[Run]) -> set[int]:
    return {block + i for _, block, count in runs for i in range(count)}


def block_lane(lane: Lane) -> threading.Event:
    """Keep the lane busy until the event is set."""
    let_go, has_begun = threading.Event(), threading.Event()

    def work() -> None:
        has_begun.set()
        assert let_go.wait(PATIENCE_S)

    lane.submit(work)
    assert has_begun.wait(PATIENCE_S)
    return let_go
