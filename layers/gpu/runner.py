"""Executes steps on one GPU: all is queued, and nothing waits before the result is asked for.

What a step needs of the one before it, the sampled tokens, stays on the device. Rows that the
batched sampler does not know are sampled by the plain one, for which the step does wait. Device
thread. Knows no connector by name.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from interlace.engine.kv_connector import KVConnectorHandshakeMetadata
from interlace.engine.outputs import ModelRunnerOutput
from interlace.engine.ports import PendingStep, Progress, WorkerConnector
from interlace.engine.scheduler_output import SchedulerOutput
from interlace.layers.attention import SequenceChunk
from interlace.layers.batch_sampler import Draw, fits, sample_batch
from interlace.layers.decoder import Decoder
from interlace.layers.device_copies import to_device
from interlace.layers.forward_context import TritonAttentionMetadata
from interlace.layers.gpu.forward import Bounds, FusedDecoder
from interlace.layers.gpu.graphs import Captured, GraphPool
from interlace.layers.gpu.inputs import BatchItem, InputBuffer, StepInputs, StepSize
from interlace.layers.gpu.long_chunks import LongChunks
from interlace.layers.gpu.sampling import PendingTokens
from interlace.layers.gpu.tables import BlockTables
from interlace.layers.graph_mode import GraphMode
from interlace.layers.hidden_states import StateRoom
from interlace.layers.kv_pages import KVPages
from interlace.layers.request_sampling import sample_requests
from interlace.layers.runner_state import RunnerRequest, RunnerState
from interlace.layers.workers import Workers


class GpuRunner:
    """The `StepRunner` of one decoder and one pool of KV blocks on a GPU."""

    def __init__(
        self,
        decoder: Decoder,
        pages: KVPages,
        eos_token_ids: Iterable[int],
        connectors: Sequence[WorkerConnector] = (),
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_sms: int,
        hidden_state_layer_ids: Sequence[int] = (),
    ) -> None:
        """Registers the pages with the connector, if there is one. Raises: `ConnectorError`.

        `num_sms`: multiprocessors of the device. `hidden_state_layer_ids`: as for `ModelRunner`;
        then no graph may be captured.
        """
        self.state = RunnerState()
        self._decoder = decoder
        self._eos_token_ids = frozenset(eos_token_ids)
        self._states = StateRoom(decoder, hidden_state_layer_ids)
        self._workers = Workers([pages], connectors)
        self._block_size = pages.block_size
        columns = -(-decoder.max_model_len // pages.block_size)
        self._tables = BlockTables(max_num_seqs, columns, decoder.device)
        self._long_chunks = LongChunks(decoder, pages, num_sms, max_num_batched_tokens)
        self._forward = FusedDecoder(decoder, pages, self._tables, self._long_chunks, num_sms)
        self._largest = StepSize(max_num_batched_tokens, max_num_seqs)
        self._inputs = InputBuffer(self._largest, decoder.device)
        self._graphs = GraphPool(
            self._forward,
            self._inputs,
            nobody=self._tables.nobody,
            max_seq_len=decoder.max_model_len,
        )
        self._pending: deque[_Once] = deque()  # launched, and maybe not waited for

    def get_handshake_metadata(self) -> dict[int, KVConnectorHandshakeMetadata]:
        """See `StepRunner`."""
        return self._workers.get_handshake_metadata()

    def set_finished_count(self, count: int | None) -> None:
        """See `StepRunner`."""
        self._workers.set_finished_count(count)

    def capture(
        self,
        mode: GraphMode,
        decode_sizes: Sequence[int],
        mixed_sizes: Sequence[int],
        progress: Progress,
    ) -> None:
        """Capture graphs and prepare the matrix library, once, before the first step.

        See `GraphPool`. Raises: `ConfigError`.
        """
        with torch.inference_mode():
            self._graphs.capture(mode, decode_sizes, mixed_sizes, progress)
            self._long_chunks.prepare(progress)

    @torch.inference_mode()
    def run_padding(self) -> None:
        """Run the largest step there can be, with nothing in it: what it takes can be measured."""
        inputs = self._inputs.pad(self._largest, self._tables.nobody)
        bounds = Bounds(self._largest.num_tokens, self._decoder.max_model_len)
        logits = self._forward.forward(inputs, bounds, inputs.last_tokens)
        sample_batch(logits, [])
        torch.cuda.synchronize()

    @property
    def works_ahead(self) -> bool:
        """Yes: the device works while the host plans and launches the next step."""
        return True

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Launch one step and wait for it."""
        return self.launch(scheduler_output)()

    @torch.inference_mode()
    def launch(self, scheduler_output: SchedulerOutput) -> PendingStep:
        """See `StepRunner`."""
        while self._pending and self._pending[0].is_done:
            self._pending.popleft()
        workers = self._workers
        workers.handle_preemptions(scheduler_output)
        requests = self.state.update(scheduler_output)
        self._tables.follow(scheduler_output)
        if scheduler_output.zeroed_block_ids:
            workers.zero_blocks(scheduler_output.zeroed_block_ids)
        if not requests:
            reports = workers.no_forward(scheduler_output)
            output = workers.with_reports(ModelRunnerOutput(), reports)
            return lambda: output
        workers.copy_blocks(scheduler_output.block_copies)
        logits, sampling = self._compute(scheduler_output, requests)
        result = _Once(self._sample(logits, sampling))
        self._pending.append(result)
        reports = workers.collect(scheduler_output)
        return lambda: workers.with_reports(result(), reports)

    def _compute(
        self, output: SchedulerOutput, requests: Sequence[RunnerRequest]
    ) -> tuple[torch.Tensor, list[tuple[RunnerRequest, int]]]:
        """Logits of the requests that sample, and where each one's token will stand."""
        chunks = [
            SequenceChunk(
                request.block_ids,
                request.num_computed_tokens,
                request.num_computed_tokens + output.num_scheduled_tokens[request.req_id],
            )
            for request in requests
        ]
        counts = [chunk.end - chunk.start for chunk in chunks]
        bounds = Bounds(max(counts), max(chunk.end for chunk in chunks))
        size = StepSize(sum(counts), len(chunks))
        captured = self._graphs.find(size, is_decode=bounds.max_query_len == 1)
        self._tables.upload(requests)
        inputs = self._upload(requests, chunks, size if captured is None else captured.size)
        self._workers.begin_loads(
            output,
            functools.partial(_metadata, inputs, size, bounds, self._tables, self._block_size),
            GraphMode.NONE if captured is None else captured.runtime_mode,
        )
        places = [i for i, r in enumerate(requests) if r.req_id in output.sampling_req_ids]
        logits = self._run(output, captured, inputs, bounds, places)
        self._workers.post_forward()
        return logits, [(requests[place], chunks[place].end) for place in places]

    def _run(
        self,
        output: SchedulerOutput,
        captured: Captured | None,
        inputs: StepInputs,
        bounds: Bounds,
        places: Sequence[int],
    ) -> torch.Tensor:
        """Logits of the requests at `places` of the batch."""
        if captured is not None and captured.runtime_mode is GraphMode.FULL:
            logits = captured.replay(inputs, bounds, None)
            return self._at(logits, places)
        hooks = self._workers.layer_hooks(output)
        if captured is not None:
            return self._at(captured.replay(inputs, bounds, hooks), places)
        rows = self._at(inputs.last_tokens, places)
        kept, states = self._states.make(len(inputs.token_ids))
        logits = self._forward.forward(inputs, bounds, rows, hooks, states, may_allocate=True)
        if kept is not None:
            self._workers.write_cache_only(output, kept, inputs.slots)
        return logits

    def _at(self, values: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
        """The rows of `values` at these places."""
        if list(places) == list(range(len(places))):
            return values[: len(places)]
        return values[to_device(places, torch.int64, values.device)]

    def _upload(
        self,
        requests: Sequence[RunnerRequest],
        chunks: Sequence[SequenceChunk],
        padded: StepSize,
    ) -> StepInputs:
        items = [
            BatchItem(
                self._tables.row(request.req_id),
                chunk,
                request.tokens.view(chunk.start, min(chunk.end, len(request.tokens))),
            )
            for request, chunk in zip(requests, chunks, strict=True)
        ]
        return self._inputs.upload(items, padded, self._block_size, self._tables.nobody)

    def _sample(
        self, logits: torch.Tensor, sampling: Sequence[tuple[RunnerRequest, int]]
    ) -> PendingStep:
        """Queue the sampling, or do it where the batched sampler will not do."""
        requests = [request for request, _ in sampling]
        if not requests:
            return ModelRunnerOutput
        rows = [self._tables.row(request.req_id) for request in requests]
        positions = [end - request.num_prompt_tokens for request, end in sampling]
        if all(
            fits(request.sampling_params, position)
            for request, position in zip(requests, positions, strict=True)
        ):
            draws = [
                Draw.of(place, request.sampling_params, request.seed, position)
                for place, (request, position) in enumerate(zip(requests, positions, strict=True))
            ]
            sampled = sample_batch(logits, [draw for draw in draws if draw is not None])
            self._tables.note_sampled(rows, sampled.token_ids)
            return PendingTokens(sampled, requests, [end for _, end in sampling]).result
        for older in self._pending:
            older()  # what it sampled is part of the rows' past
        output = sample_requests(logits.float(), requests, self._eos_token_ids)
        newest = [int(request.tokens.view(-1 + len(request.tokens))[0]) for request in requests]
        self._tables.note_sampled(rows, to_device(newest, torch.int64, logits.device))
        return lambda: output

    def close(self) -> None:
        """Let the connectors end; drop pages and requests."""
        self._workers.close()
        self.state = RunnerState()
        self._pending.clear()


class _Once:
    """A result that is waited for when somebody asks first, and kept."""

    def __init__(self, wait: Callable[[], ModelRunnerOutput]) -> None:
        self._wait = wait
        self._output: ModelRunnerOutput | None = None

    def __call__(self) -> ModelRunnerOutput:
        if self._output is None:
            self._output = self._wait()
        return self._output

    @property
    def is_done(self) -> bool:
        """Whether it was waited for."""
        return self._output is not None


def _metadata(
    inputs: StepInputs, size: StepSize, bounds: Bounds, tables: BlockTables, block_size: int
) -> TritonAttentionMetadata:
    """The step's attention metadata, on the device, without padding."""
    num_tokens, num_requests = size
    columns = -(-bounds.max_seq_len // block_size)
    return TritonAttentionMetadata(
        num_actual_tokens=num_tokens,
        max_query_len=bounds.max_query_len,
        query_start_loc=inputs.query_start_loc[: num_requests + 1],
        max_seq_len=bounds.max_seq_len,
        seq_lens=inputs.seq_lens[:num_requests],
        block_table=tables.tables[:, :columns].index_select(0, inputs.rows[:num_requests]),
        slot_mapping=inputs.slots[:num_tokens],
    )
