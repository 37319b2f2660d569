"""The engine's workers: each has the pages of its KV heads, and a connector's WORKER instance.

There is one worker, or several that take turns on the device thread: layer by layer, rank by rank.
Their connectors' reports come out as one. Knows no connector by name.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

import torch

from interlace.engine.errors import ConnectorError
from interlace.engine.kv_connector import KVConnectorHandshakeMetadata, KVConnectorOutput
from interlace.engine.kv_output_aggregator import KVOutputAggregator
from interlace.engine.outputs import ModelRunnerOutput
from interlace.engine.ports import LayerGates, TransferRecorder, WorkerConnector
from interlace.engine.scheduler_output import BlockCopy, SchedulerOutput
from interlace.engine.transfer_picture import ConnectorPicture
from interlace.layers.attention import PagedAttention, SequenceChunk
from interlace.layers.decoder import Attend
from interlace.layers.forward_context import TritonAttentionMetadata
from interlace.layers.graph_mode import GraphMode
from interlace.layers.kv_hooks import KVHooks, LayerHooks, with_hooks
from interlace.layers.kv_pages import KVPages

AroundHooks: TypeAlias = Callable[[LayerHooks | None], LayerHooks]


class Workers:
    """All workers of one engine, as its runner sees them."""

    def __init__(self, pages: Sequence[KVPages], connectors: Sequence[WorkerConnector]) -> None:
        """By rank; `connectors` is empty, or has one for each worker, whose pages are registered.

        Raises: `ConnectorError`.
        """
        assert len(connectors) in (0, len(pages))
        self.pages = tuple(pages)
        self._hooks = tuple(
            KVHooks.of_pages(connector, own)
            for connector, own in zip(connectors, pages, strict=False)
        )
        self._aggregator = KVOutputAggregator(len(pages))
        self._attends: list[Attend] = []
        self.slots = torch.empty(0, dtype=torch.int64)
        """Where the tokens of the step go whose `pre_forward` was the last one, int64 [T]."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.pages[0].block_size

    def get_handshake_metadata(self) -> dict[int, KVConnectorHandshakeMetadata]:
        """See `StepRunner`."""
        said = [hooks.get_handshake_metadata() for hooks in self._hooks]
        return {rank: metadata for rank, metadata in enumerate(said) if metadata is not None}

    def layer_gates(self) -> LayerGates | None:
        """Those of the only worker's connector, if it has any; after registering.

        Raises: `ConnectorError`.
        """
        return self._hooks[0].get_layer_gates() if len(self._hooks) == 1 else None

    def get_transfer_pictures(self) -> tuple[ConnectorPicture, ...]:
        """See `StepRunner`."""
        return self._hooks[0].get_transfer_pictures() if self._hooks else ()

    def record_transfers(self, recorder: TransferRecorder | None) -> None:
        """Let the first worker's connector tell of its copies; None: no more. Raises:
        `ConnectorError`."""
        if self._hooks:
            self._hooks[0].record_transfers(recorder)

    def set_finished_count(self, count: int | None) -> None:
        """See `StepRunner`."""
        most = len(self.pages)
        if count is not None and not 1 <= count <= most:
            raise ConnectorError(
                f"get_finished_count answered {count}, but there are {most} workers: answer how"
                " many of them report each id, or None for all."
            )
        self._aggregator = KVOutputAggregator(most if count is None else count)

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Zero these blocks in every layer of every worker."""
        for pages in self.pages:
            pages.zero_blocks(block_ids)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks in every layer of every worker."""
        for pages in self.pages:
            pages.copy_blocks(copies)

    def handle_preemptions(self, output: SchedulerOutput) -> None:
        """See `KVHooks`; the first thing of every step. Raises: `ConnectorError`."""
        self._aggregator.begin_step(output)
        for hooks in self._hooks:
            hooks.handle_preemptions(output)

    def pre_forward(
        self,
        output: SchedulerOutput,
        chunks: Sequence[SequenceChunk],
        num_heads: int,
        around: AroundHooks | None = None,
    ) -> Attend:
        """Let the step's loads begin. Returns its attention, with the layer hooks around it.

        `num_heads` are the model's query heads. `around` puts something around the hooks of the
        first worker, which may have none. Raises: `ConnectorError`.
        """
        size = len(self.pages)
        first = PagedAttention(self.pages[0], chunks, num_heads // size)
        paged = [first, *(first.on(pages) for pages in self.pages[1:])]
        self._attends = list(paged)
        self.slots = first.slots
        self.begin_loads(
            output,
            functools.partial(TritonAttentionMetadata.of, chunks, first.slots, self.block_size),
        )
        if self._hooks:
            self._attends = [
                hooks.maybe_transfer_kv_layer(attend, output)
                for hooks, attend in zip(self._hooks, paged, strict=True)
            ]
        if around is not None:
            own = self._hooks[0].layer_hooks(output) if self._hooks else None
            self._attends[0] = with_hooks(first, around(own))
        return self._attends[0] if size == 1 else self._attend

    def begin_loads(
        self,
        output: SchedulerOutput,
        make_metadata: Callable[[], TritonAttentionMetadata],
        mode: GraphMode = GraphMode.NONE,
    ) -> None:
        """The part of `pre_forward` for a runner with an attention of its own."""
        for hooks in self._hooks:
            hooks.pre_forward(output, make_metadata, mode)

    def arm_rest(self, output: SchedulerOutput) -> None:
        """See `LateLayerGates`, of the only worker."""
        self._hooks[0].arm_rest(output)

    def layer_hooks(self, output: SchedulerOutput) -> LayerHooks | None:
        """The layer hooks of the only worker, after `begin_loads`; None if it has none."""
        assert len(self.pages) == 1, "several workers take turns within `Attend`"
        return self._hooks[0].layer_hooks(output) if self._hooks else None

    def _attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Each worker attends with its share of the heads: an `Attend`."""
        shares = zip(*(heads.chunk(len(self.pages), 1) for heads in (q, k, v)), strict=True)
        attended = zip(self._attends, shares, strict=True)
        return torch.cat([attend(layer, *share) for attend, share in attended], dim=-1)

    def write_cache_only(
        self, output: SchedulerOutput, values: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Put `values` [T, vectors, vector size] into `slots` of each worker's cache-only layer.

        With the layer hooks around it. Raises: `ConnectorError`.
        """
        for rank, pages in enumerate(self.pages):
            write = functools.partial(pages.write_cache_only, slots, values)
            if self._hooks:
                self._hooks[rank].write_cache_only(output, write)
            else:
                write()

    def post_forward(self) -> None:
        """See `KVHooks`."""
        for hooks in self._hooks:
            hooks.post_forward()

    def collect(self, output: SchedulerOutput) -> KVConnectorOutput | None:
        """What the workers' connectors report with this step. Raises: `ConnectorError`."""
        return self._as_one([hooks.collect(output) for hooks in self._hooks])

    def advance_transfers(self) -> bool:
        """While the device works: whether any worker has more to do. Raises: `ConnectorError`."""
        more = [hooks.advance_transfers() for hooks in self._hooks]  # of each, whatever others say
        return any(more)

    def no_forward(self, output: SchedulerOutput) -> KVConnectorOutput | None:
        """A step without tokens. Raises: `ConnectorError`."""
        return self._as_one([hooks.no_forward(output) for hooks in self._hooks])

    def _as_one(self, reports: list[KVConnectorOutput | None]) -> KVConnectorOutput | None:
        if len(reports) > 1:
            return self._aggregator.aggregate(reports)
        # With one worker there is nothing to count, and the scheduler knows strays better.
        return reports[0] if reports else None

    def late_load_errors(self, output: SchedulerOutput) -> set[int]:
        """When the step's tokens have come: blocks of its own loads that turn out to be bad.

        Raises: `ConnectorError`.
        """
        if not output.loading_block_ids:
            return set()
        return set().union(*(hooks.late_load_errors() for hooks in self._hooks))

    def with_reports(
        self,
        output: ModelRunnerOutput,
        reports: KVConnectorOutput | None,
        late_errors: Collection[int] = (),
    ) -> ModelRunnerOutput:
        """A step's output with what its connectors reported, `collect`ed or of `no_forward`, and
        `late_load_errors`."""
        if late_errors:
            reports = KVConnectorOutput() if reports is None else reports
            invalid = reports.invalid_block_ids.union(late_errors)
            reports = dataclasses.replace(reports, invalid_block_ids=invalid)
        num_strays = self._aggregator.take_num_strays()
        if reports is None and num_strays == 0:
            return output
        return dataclasses.replace(
            output, kv_connector_output=reports, num_stray_reports=num_strays
        )

    def close(self) -> None:
        """Let the connectors end; drop the pages."""
        for hooks in self._hooks:
            hooks.shutdown()
        for pages in self.pages:
            pages.release()
