"""Executes one step: follow the message, run the decoder over the batch, sample.

Lives on the device thread. Knows no connector by name, no text and no queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from interlace.engine.kv_connector import KVConnectorHandshakeMetadata
from interlace.engine.outputs import ModelRunnerOutput
from interlace.engine.ports import Clock, PendingStep, WorkerConnector
from interlace.engine.scheduler_output import SchedulerOutput
from interlace.engine.step_timings import RecordingFacts, Timings
from interlace.engine.transfer_picture import ConnectorPicture
from interlace.layers.attention import SequenceChunk
from interlace.layers.decoder import Decoder
from interlace.layers.hardware.host import processor
from interlace.layers.hidden_states import StateRoom
from interlace.layers.kv_pages import KVPages
from interlace.layers.moments import ClockMoments
from interlace.layers.request_sampling import sample_requests
from interlace.layers.runner_state import RunnerRequest, RunnerState
from interlace.layers.step_recorder import StepRecorder, StepTimer
from interlace.layers.workers import Workers


class ModelRunner:
    """The `StepRunner` of one decoder and one pool of KV blocks."""

    def __init__(
        self,
        decoder: Decoder,
        pages: Sequence[KVPages],
        eos_token_ids: Iterable[int],
        connectors: Sequence[WorkerConnector] = (),
        hidden_state_layer_ids: Sequence[int] = (),
    ) -> None:
        """`pages`: of each worker, which has an equal share of the KV heads, by rank; they are
        registered with its connector, if there are any. If their cache-only layer is to keep hidden
        states, `hidden_state_layer_ids` says which. Raises: `ConnectorError`."""
        self.decoder = decoder
        self.state = RunnerState()
        self._eos_token_ids = frozenset(eos_token_ids)
        self._states = StateRoom(decoder, hidden_state_layer_ids)
        self._workers = Workers(pages, connectors)
        self._recorder: StepRecorder | None = None  # while somebody looks

    def get_handshake_metadata(self) -> dict[int, KVConnectorHandshakeMetadata]:
        """See `StepRunner`."""
        return self._workers.get_handshake_metadata()

    def set_finished_count(self, count: int | None) -> None:
        """See `StepRunner`."""
        self._workers.set_finished_count(count)

    def get_transfer_pictures(self) -> tuple[ConnectorPicture, ...]:
        """See `StepRunner`."""
        return self._workers.get_transfer_pictures()

    def begin_recording(self, clock: Clock) -> RecordingFacts:
        """See `StepRunner`."""
        num_layers = self.decoder.architecture.num_layers
        recorder = StepRecorder(ClockMoments(clock.monotonic), num_layers)
        self._workers.record_transfers(recorder)
        self._recorder = recorder
        return RecordingFacts("host", processor().model, num_layers)

    def end_recording(self) -> Timings:
        """See `StepRunner`."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return Timings()
        self._workers.record_transfers(None)
        return recorder.close()

    @property
    def works_ahead(self) -> bool:
        """No: a CPU has computed a step when its launch returns."""
        return False

    def launch(self, scheduler_output: SchedulerOutput) -> PendingStep:
        """See `StepRunner`: here all is computed at once."""
        output = self.execute(scheduler_output)
        if self._recorder is not None:
            output = self._recorder.with_timings(output)
        return lambda: output

    def advance_transfers(self) -> bool:
        """Never: what goes on beside the steps of a CPU needs no help between them."""
        return False

    @torch.inference_mode()
    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step and sample where a request's last token was computed.

        An exception is fatal for the engine, except those that `sample` reports per request.
        """
        workers, timer = self._workers, self._begin_step(scheduler_output)
        workers.handle_preemptions(scheduler_output)
        requests = self.state.update(scheduler_output)
        if scheduler_output.zeroed_block_ids:
            workers.zero_blocks(scheduler_output.zeroed_block_ids)
        if not requests:
            reports = workers.no_forward(scheduler_output)
            return workers.with_reports(ModelRunnerOutput(), reports)
        workers.copy_blocks(scheduler_output.block_copies)
        counts = [scheduler_output.num_scheduled_tokens[r.req_id] for r in requests]
        chunks = [
            SequenceChunk(r.block_ids, r.num_computed_tokens, r.num_computed_tokens + n)
            for r, n in zip(requests, counts, strict=True)
        ]
        self._zero_begun_blocks(chunks)
        last = np.cumsum(counts) - 1
        sampling = [
            i
            for i, request in enumerate(requests)
            if request.req_id in scheduler_output.sampling_req_ids
        ]
        rows = torch.from_numpy(last[sampling])
        hidden = self._forward(scheduler_output, requests, chunks, rows, timer)
        output = ModelRunnerOutput()
        if sampling:
            logits = self.decoder.logits(hidden)
            output = sample_requests(logits, [requests[i] for i in sampling], self._eos_token_ids)
        if timer is not None:
            timer.end()
        reports = workers.collect(scheduler_output)
        return workers.with_reports(output, reports, workers.late_load_errors(scheduler_output))

    def close(self) -> None:
        """Let the connectors end; drop pages and requests."""
        self._workers.close()
        self.state = RunnerState()

    def _begin_step(self, output: SchedulerOutput) -> StepTimer | None:
        """None of a step without tokens, and while nobody looks."""
        if self._recorder is None or not output.num_scheduled_tokens:
            return None
        return self._recorder.begin_step(output)

    def _zero_begun_blocks(self, chunks: Sequence[SequenceChunk]) -> None:
        """Zero the blocks that this step begins and does not fill, before anything reads them."""
        size = self._workers.block_size
        begun = [
            chunk.block_ids[chunk.end // size]
            for chunk in chunks
            if chunk.end % size and chunk.start <= chunk.end // size * size
        ]
        if begun:
            self._workers.zero_blocks(begun)

    def _forward(
        self,
        output: SchedulerOutput,
        requests: Sequence[RunnerRequest],
        chunks: Sequence[SequenceChunk],
        rows: torch.Tensor,
        timer: StepTimer | None = None,
    ) -> torch.Tensor:
        """Hidden states of `rows` of the batch; the connector's hooks run around and within."""
        token_ids = np.concatenate(
            [
                request.tokens.view(chunk.start, chunk.end)
                for request, chunk in zip(requests, chunks, strict=True)
            ]
        )
        positions = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks])
        around = None if timer is None else timer.around
        num_heads = self.decoder.architecture.num_heads
        attend = self._workers.pre_forward(output, chunks, num_heads, around)
        kept, states = self._states.make(len(token_ids))
        hidden = self.decoder.forward(
            torch.from_numpy(token_ids), torch.from_numpy(positions), attend, rows, states
        )
        if timer is not None:
            timer.end_layers()
        if kept is not None:
            self._workers.write_cache_only(output, kept, self._workers.slots)
        self._workers.post_forward()
        return hidden
