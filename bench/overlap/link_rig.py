"""`LayerPipeline` over records and pages of its own, with no engine: timed. Device thread."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from interlace.engine.errors import InterlaceError
from interlace.layers.page_copies import CopyWay, Run

if TYPE_CHECKING:
    import torch

    from interlace.connectors.pipeline.layer_pipeline import LayerPipeline
    from interlace.connectors.pipeline.records import HostRecords
    from interlace.layers.kv_memory import PageShape

PATIENCE_S = 60.0


class Loaded(NamedTuple):
    """One load."""

    num_bytes: int
    seconds: float
    """From its first copy to its last one."""
    submit_s: float
    """Host time."""
    num_copies: int
    num_runs: int
    """Of neighbours on both sides, in each layer."""
    num_record_runs: int
    """Of neighbours among the records alone."""
    ways: frozenset[CopyWay]


class LinkRig:
    """Owns its memory until `close`."""

    def __init__(self, records: HostRecords, pages: torch.Tensor, pipeline: LayerPipeline) -> None:
        """For `make`. `pages`: uint8 [layers, blocks, bytes of a page], contiguous."""
        self._records = records
        self._pages = pages
        self._pipeline = pipeline
        self._steps = itertools.count(1)

    @classmethod
    def make(
        cls, shape: PageShape, num_blocks: int, num_records: int, device: torch.device
    ) -> LinkRig:
        """Pages for so many blocks, the null block included, and records. May take seconds.

        Raises: `ConfigError` if the host lacks the memory; `InterlaceError` if the device does.
        """
        import torch

        from interlace.connectors.pipeline.layer_pipeline import LayerPipeline
        from interlace.connectors.pipeline.records import HostRecords
        from interlace.layers.cuda_lanes import CudaLanes
        from interlace.layers.cuda_streams import CudaStreams
        from interlace.layers.lanes import ThreadLanes

        size = (shape.num_layers, num_blocks, shape.page_bytes)
        try:
            pages = torch.zeros(size, dtype=torch.uint8, device=device)
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            raise InterlaceError(
                f"no memory for {num_blocks} blocks of {shape.block_bytes} bytes to copy to: give a"
                " smaller --prompt-tokens, or leave the part link out."
            ) from error
        records = HostRecords.allocate(
            num_records * shape.block_bytes, (shape.num_layers, shape.page_bytes), device
        )
        lanes = CudaLanes(CudaStreams(device)) if device.type == "cuda" else ThreadLanes()
        try:
            pipeline = LayerPipeline.over(records.tensor, list(pages), lanes)
        except BaseException:
            records.close()
            raise
        return cls(records, pages, pipeline)

    def copy_at_once(self, num_blocks: int) -> float:
        """Seconds of one long copy of as many bytes as so many blocks have."""
        watch = self._pipeline.watch
        num_bytes = num_blocks * self._records.record_bytes
        source = self._records.tensor.view(-1)[:num_bytes]
        begin = watch.mark()
        self._pages.view(-1)[:num_bytes].copy_(source, non_blocking=True)
        end = watch.mark()
        self._synchronize()
        seconds = watch.seconds(begin, end)
        assert seconds is not None, "it was waited for"
        return seconds

    def load(self, runs: Sequence[Run]) -> Loaded:
        """Load these, layer by layer, and wait. Raises: `InterlaceError` if a copy fails."""
        began = time.perf_counter()
        load = self._pipeline.submit_load([runs], next(self._steps))
        submit_s = time.perf_counter() - began
        for gate in load.gates:
            if not gate.wait(PATIENCE_S):
                raise InterlaceError(
                    f"a load did not end within {PATIENCE_S:g} s: is the device busy?"
                )
        self._synchronize()
        stats, (error,) = load.stats, load.errors
        if error is not None or stats.seconds is None:
            raise InterlaceError(f"a load failed: {error}") from error
        return Loaded(
            stats.num_bytes,
            stats.seconds,
            submit_s,
            stats.num_copies,
            len(runs),
            _num_record_runs(runs),
            stats.ways,
        )

    def _synchronize(self) -> None:
        import torch

        if self._pages.device.type == "cuda":
            torch.cuda.synchronize(self._pages.device)

    def close(self) -> None:
        """End the lanes, and let go of the memory."""
        self._pipeline.close(PATIENCE_S)
        self._records.close()
        del self._pages


def _num_record_runs(runs: Sequence[Run]) -> int:
    ends = [-1, *(record + count for record, _, count in runs)]
    return sum(record != end for (record, _, _), end in zip(runs, ends, strict=False))
