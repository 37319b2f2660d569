"""Executes steps on one GPU: all is queued, and nothing waits before the result is asked for.

What a step needs of the one before it, the sampled tokens, stays on the device. Rows that the
batched sampler does not know are sampled by the plain one, for which the step does wait. Device
thread. Knows no connector by name.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from interlace.engine.errors import ConfigError
from interlace.engine.kv_connector import KVConnectorHandshakeMetadata
from interlace.engine.outputs import ModelRunnerOutput
from interlace.engine.ports import (
    Clock,
    LateLayerGates,
    PendingStep,
    Progress,
    WorkerConnector,
)
from interlace.engine.scheduler_output import SchedulerOutput
from interlace.engine.step_timings import RecordingFacts, Timings
from interlace.engine.transfer_picture import ConnectorPicture
from interlace.layers.attention import SequenceChunk
from interlace.layers.batch_sampler import Draw, draw_tokens, fits
from interlace.layers.cuda_streams import CudaStreams
from interlace.layers.decoder import Decoder
from interlace.layers.gpu.forward import Answer, Bounds, FusedDecoder, Wanted
from interlace.layers.gpu.graphs import LOWER_WHAT, Captured, GraphPool, GraphSizes, StepToReplay
from interlace.layers.gpu.inputs import BatchItem, InputBuffer, StepInputs, StepSize
from interlace.layers.gpu.recording import GpuRecording, facts_of
from interlace.layers.gpu.room import StepRoom
from interlace.layers.gpu.sampling import (
    EndedStep,
    NoTokens,
    PendingTokens,
    StepEnd,
    WantedToken,
)
from interlace.layers.gpu.steps import Step, chunk_lengths, metadata
from interlace.layers.gpu.tables import BlockTables
from interlace.layers.gpu.uploads import Uploads
from interlace.layers.graph_mode import GraphMode
from interlace.layers.hidden_states import StateRoom
from interlace.layers.kernels.attention_plan import KEY_GRAIN, AttentionPlan, gathers
from interlace.layers.kernels.gathered_attention import KeyRoom
from interlace.layers.kv_pages import KVPages
from interlace.layers.lazily import Lazily
from interlace.layers.request_sampling import sample_requests
from interlace.layers.runner_state import RunnerRequest, RunnerState
from interlace.layers.workers import Workers

ADVANCE_PAUSE_S = 0.0002
"""Between two looks at what goes on beside the steps: the event loop needs the interpreter."""
_GATHERED_KEYS = 65_536
"""Of several long chunks in one step there is room for so many, and for one chunk of any length."""
_GATHERED_REQUESTS = 16
_GATHERING = (9, 10)
"""Major compute capabilities, of data centers' GPUs: others have no tensor memory accelerator, or
too little shared memory for the tiles (99 KiB of 225)."""


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
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Registers the pages with the connector, if there is one. Raises: `ConnectorError`.

        `num_sms`: multiprocessors of the device. `hidden_state_layer_ids`: as for `ModelRunner`;
        then no graph may be captured. `sleep`, for so many seconds, is between two looks at a
        step that a connector's transfers go on beside.
        """
        self._sleep = sleep
        self.state = RunnerState()
        self._decoder = decoder
        self._eos_token_ids = frozenset(eos_token_ids)
        self._states = StateRoom(decoder, hidden_state_layer_ids)
        self._workers = Workers([pages], connectors)
        self._gates = self._workers.layer_gates()
        self._block_size = pages.block_size
        columns = -(-decoder.max_model_len // pages.block_size)
        self._uploads = Uploads(decoder.device)
        self._tables = BlockTables(max_num_seqs, columns, decoder.device)
        key_room = _key_room(decoder, max_num_batched_tokens)
        self._forward = FusedDecoder(decoder, pages, self._tables, key_room, num_sms)
        self._largest = StepSize(max_num_batched_tokens, max_num_seqs)
        # Enough for one long prompt whose blocks are all new to the device, and what runs beside.
        self._inputs = InputBuffer(self._largest, 2 * columns + 4 * max_num_seqs, decoder.device)
        self._graphs = GraphPool(
            self._forward,
            self._inputs,
            functools.partial(StepRoom.allocate, decoder),
            nobody=self._tables.nobody,
            max_seq_len=decoder.max_model_len,
            gates=self._gates,
        )
        self._pending: deque[Lazily[ModelRunnerOutput]] = (
            deque()
        )  # launched, and maybe not waited for
        self._recording: GpuRecording | None = None  # while somebody looks

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
        device, num_layers = self._decoder.device, self._forward.num_layers
        recording = GpuRecording(CudaStreams(device), self._graphs, num_layers, clock)
        self._workers.record_transfers(recording.recorder)
        self._recording = recording
        return facts_of(device, num_layers)

    def end_recording(self) -> Timings:
        """See `StepRunner`."""
        recording, self._recording = self._recording, None
        if recording is None:
            return Timings()
        self._workers.record_transfers(None)
        return recording.recorder.close()

    def capture(self, mode: GraphMode, sizes: GraphSizes, progress: Progress) -> None:
        """Capture graphs, and prepare what runs between them, once, before the first step.

        See `GraphPool`. Raises: `ConfigError` if memory runs out.
        """
        with torch.inference_mode():
            self._graphs.capture(mode, sizes, progress)
            try:
                self._compile_attention(progress)
            except torch.OutOfMemoryError as error:
                raise ConfigError(
                    f"no GPU memory is left to prepare attention: {LOWER_WHAT}."
                ) from error

    def _compile_attention(self, progress: Progress) -> None:
        """Run attention for chunks of every size class: else the first prompts would wait for the
        compiler."""
        decoder, longest = self._decoder, self._decoder.max_model_len
        most = min(self._largest.num_tokens, longest)
        plans = ((count, self._plan_alone(count)) for count in range(most, 1, -16))
        kinds = {(plan.chunk, plan.chunk_splits > 1): count for count, plan in plans}
        shapes = [
            (count, max(count, length))
            for count in sorted({*(2**i for i in range(1, most.bit_length())), *kinds.values()})
            for length in sorted({min(128, longest), longest})
        ]
        with progress.task("compiling attention", len(shapes)) as advance:
            for count, length in shapes:
                inputs = self._inputs.pad(StepSize(count, 1), self._tables.nobody)
                bounds, chunk = Bounds(count, length), SequenceChunk((), 0, count)
                attention = self._forward.attention(inputs, bounds, [chunk])
                qkv = torch.zeros(
                    (count, self._forward.qkv_width), dtype=decoder.dtype, device=decoder.device
                )
                self._forward.attend(attention, 0, qkv)
                advance(1)

    def _plan_alone(self, count: int) -> AttentionPlan:
        """For a request that computes so many tokens, the last of a long context."""
        bounds = Bounds(count, self._decoder.max_model_len)
        return self._forward.plan(StepSize(count, 1), bounds, has_decodes=False)

    @torch.inference_mode()
    def run_padding(self) -> None:
        """Run the largest step there can be, with nothing in it, and let each of its requests draw
        its token: what that takes can be measured."""
        inputs = self._inputs.pad(self._largest, self._tables.nobody)
        bounds = Bounds(self._largest.num_tokens, self._decoder.max_model_len)
        attention = self._forward.attention(inputs, bounds)
        wanted = Wanted(inputs.last_tokens, inputs.rows)
        answer = self._forward.forward(inputs, attention, wanted)
        assert answer is not None, "a step has requests"
        most = self._largest.num_requests
        # Both top-k and top-p: with the sort that they need.
        draws = [Draw(place, 1.0, 0.0, 8, 0.9, 0.5) for place in range(most)]
        self._draw(answer, draws, [self._tables.nobody] * most)
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
        while self._pending and self._pending[0].is_made:
            self._pending.popleft()
        workers, recording = self._workers, self._recording
        timer = None if recording is None else recording.begin_step(scheduler_output)
        workers.handle_preemptions(scheduler_output)
        if scheduler_output.zeroed_block_ids:
            workers.zero_blocks(scheduler_output.zeroed_block_ids)
        if not scheduler_output.num_scheduled_tokens:
            self._follow(scheduler_output)
            reports = workers.no_forward(scheduler_output)
            output = workers.with_reports(ModelRunnerOutput(), reports)
            if recording is not None:
                output = recording.recorder.with_timings(output)
            return lambda: output
        workers.copy_blocks(scheduler_output.block_copies)
        end = self._sample(*self._compute(scheduler_output))
        if timer is not None:
            timer.end()
        result = Lazily(end.result)
        self._pending.append(result)  # keeps what tokens are written to, whatever comes next
        # Behind the sampled tokens' way to the host, which must not queue behind what is saved.
        workers.post_forward()
        reports = workers.collect(scheduler_output)

        def finish() -> ModelRunnerOutput:
            self._advance_transfers(end)
            output = result()
            late_errors = workers.late_load_errors(scheduler_output)
            output = workers.with_reports(output, reports, late_errors)
            return output if recording is None else recording.recorder.with_timings(output, timer)

        return finish

    def advance_transfers(self) -> bool:
        """See `StepRunner`."""
        return self._workers.advance_transfers()

    def _advance_transfers(self, end: StepEnd) -> None:
        """Until a step has ended, or nothing is under way beside the steps. Once at least."""
        while self._workers.advance_transfers() and not end.has_come:
            self._sleep(ADVANCE_PAUSE_S)

    def _follow(self, output: SchedulerOutput) -> list[RunnerRequest]:
        """Follow the message: the step's requests, in batch order."""
        requests = self.state.update(output)
        self._tables.follow(output)
        return requests

    def _compute(self, output: SchedulerOutput) -> tuple[Answer | None, list[WantedToken]]:
        """What the step comes to, and for whom."""
        counts = output.num_scheduled_tokens.values()
        size = StepSize(sum(counts), len(counts))
        is_decode = max(counts) == 1
        captured = self._graphs.find(
            size,
            is_decode=is_decode,
            can_gather=is_decode or self._forward.can_gather(chunk_lengths(output)),
        )
        padded = size if captured is None else captured.size
        if self._recording is not None and captured is not None:
            self._recording.prepare(captured, is_gated=self._waits_for_gates(output))
        made = Lazily(functools.partial(self._prepare, output, padded))
        if not output.loading_block_ids:
            made()  # else it waits: until its first copy is queued, a load stands still
        self._workers.begin_loads(
            output,
            functools.partial(metadata, made, size, self._tables, self._block_size),
            GraphMode.NONE if captured is None else captured.runtime_mode,
        )
        step = made()
        places = [i for i, r in enumerate(step.requests) if r.req_id in output.sampling_req_ids]
        answer: Answer | None = None
        among: Sequence[int] = places
        if captured is not None and self._may_replay(captured, output):
            answer = captured.replay(self._to_replay(captured, output, step))
        if answer is None:
            answer = self._run(output, step, places)
            among = range(len(places))
        return answer, [
            WantedToken(step.requests[place], found, step.chunks[place].end)
            for place, found in zip(places, among, strict=True)
        ]

    def _prepare(self, output: SchedulerOutput, padded: StepSize) -> Step:
        """Follow the message, and queue the upload of the step's inputs."""
        requests = self._follow(output)
        chunks = [
            SequenceChunk(
                request.block_ids,
                request.num_computed_tokens,
                request.num_computed_tokens + output.num_scheduled_tokens[request.req_id],
            )
            for request in requests
        ]
        bounds = Bounds(
            max(output.num_scheduled_tokens.values()), max(chunk.end for chunk in chunks)
        )
        return Step(requests, chunks, bounds, self._upload(requests, chunks, padded))

    def _to_replay(self, captured: Captured, output: SchedulerOutput, step: Step) -> StepToReplay:
        is_full = captured.runtime_mode is GraphMode.FULL
        hooks = None if is_full else self._workers.layer_hooks(output)
        arm_rest = None
        if is_full and self._waits_for_gates(output):
            arm_rest = functools.partial(self._arm_rest, output)
        traced: Sequence[torch.cuda.CUDAGraph] | None = None
        if self._recording is not None and is_full:
            traced = self._recording.graphs(is_gated=arm_rest is not None)
        elif self._recording is not None:
            hooks = self._recording.around(hooks, captured.runtime_mode)
        return StepToReplay(step.inputs, step.bounds, step.chunks, hooks, arm_rest, traced)

    def _arm_rest(self, output: SchedulerOutput) -> bool:
        """Whether all gates of the step are armed, those that may be armed late too."""
        assert self._gates is not None, "they are waited for"
        self._workers.arm_rest(output)
        return self._gates.are_armed(output.step_id)

    def _waits_for_gates(self, output: SchedulerOutput) -> bool:
        """Whether the step loads, and its connector has gates for that."""
        return self._gates is not None and bool(output.loading_block_ids)

    def _may_replay(self, captured: Captured, output: SchedulerOutput) -> bool:
        """A full graph that waits for gates would pass on loads of an older step, were not all of
        them armed for this one: then the step runs with its layer hooks. Late ones have time until
        the first layers are launched."""
        gates = self._gates
        if captured.runtime_mode is not GraphMode.FULL or gates is None:
            return True
        if not self._waits_for_gates(output):
            return True
        if captured.is_cut and isinstance(gates, LateLayerGates):
            return gates.are_first_armed(output.step_id)
        return self._arm_rest(output)

    def _run(
        self,
        output: SchedulerOutput,
        step: Step,
        places: Sequence[int],
    ) -> Answer | None:
        """Compute a step without graphs: answers for the requests at `places`, maybe padded."""
        inputs = step.inputs
        wanted = Wanted(inputs.last_tokens, inputs.rows)
        if len(places) < len(step.chunks):
            index = self._uploads(places, torch.int64, inputs.rows.device)
            wanted = Wanted(inputs.last_tokens[index], inputs.rows[index])
        kept, states = self._states.make(len(inputs.token_ids))
        attention = self._forward.attention(inputs, step.bounds, step.chunks)
        hooks = self._workers.layer_hooks(output)
        if self._recording is not None:
            hooks = self._recording.around(hooks, GraphMode.NONE)
        answer = self._forward.forward(inputs, attention, wanted, hooks, states)
        if kept is not None:
            self._workers.write_cache_only(output, kept, inputs.slots)
        return answer

    def _upload(
        self,
        requests: Sequence[RunnerRequest],
        chunks: Sequence[SequenceChunk],
        padded: StepSize,
    ) -> StepInputs:
        """Queue the upload of the step's numbers, and of what the block tables lack."""
        tables, buffer = self._tables, self._inputs
        items = [
            BatchItem(
                tables.row(request.req_id),
                chunk,
                request.tokens.view(chunk.start, min(chunk.end, len(request.tokens))),
            )
            for request, chunk in zip(requests, chunks, strict=True)
        ]
        additions = tables.take_additions(requests, buffer.most_additions)
        inputs, added = buffer.upload(items, padded, self._block_size, tables.nobody, additions)
        if added is not None:
            tables.add(added.places, added.block_ids)
        return inputs

    def _sample(self, answer: Answer | None, wanted: Sequence[WantedToken]) -> StepEnd:
        """Queue the sampling, or do it where the batched sampler will not do."""
        if not wanted:
            return NoTokens(self._decoder.device)
        assert answer is not None, "somebody wants a token"
        draws = []
        for request, place, end in wanted:
            position = end - request.num_prompt_tokens
            if not fits(request.sampling_params, position):
                return self._sample_plainly(answer, wanted)
            draw = Draw.of(place, request.sampling_params, request.seed, position)
            if draw is not None:
                draws.append((draw, self._tables.row(request.req_id)))
        if draws:
            self._draw(answer, [draw for draw, _ in draws], [row for _, row in draws])
        return PendingTokens(answer.sampled, wanted)

    def _draw(self, answer: Answer, draws: Sequence[Draw], rows: Sequence[int]) -> None:
        """Queue: random rows get other tokens than the likeliest ones."""
        upload, device = self._uploads, answer.logits.device
        places = upload([draw.place for draw in draws], torch.int64, device)
        token_ids = draw_tokens(answer.logits[places], draws, upload)
        answer.sampled[0].index_copy_(0, places, token_ids.to(torch.int32))
        self._tables.note_sampled(upload(rows, torch.int64, device), token_ids)

    def _sample_plainly(self, answer: Answer, wanted: Sequence[WantedToken]) -> StepEnd:
        """By the plain sampler, for which the step waits."""
        for older in self._pending:
            older()  # what it sampled is part of the rows' past
        device = answer.logits.device
        upload = self._uploads
        places = upload([one.place for one in wanted], torch.int64, device)
        requests = [one.request for one in wanted]
        output = sample_requests(answer.logits[places].float(), requests, self._eos_token_ids)
        newest = [int(request.tokens.view(-1 + len(request.tokens))[0]) for request in requests]
        rows = [self._tables.row(request.req_id) for request in requests]
        self._tables.note_sampled(
            upload(rows, torch.int64, device), upload(newest, torch.int64, device)
        )
        return EndedStep(output)

    def close(self) -> None:
        """Let the connectors end; drop pages, graphs and requests."""
        self._workers.close()
        self.state = RunnerState()
        if self._decoder.device.type == "cuda":
            torch.cuda.synchronize()  # tokens on their way need what they are copied to
        self._pending.clear()
        self._recording = None
        self._graphs.close()


def _key_room(decoder: Decoder, max_num_batched_tokens: int) -> KeyRoom | None:
    """Where the keys of long chunks are gathered; None if no step has any, or for other GPUs."""
    device = decoder.device
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] not in _GATHERING:
        return None
    a, longest = decoder.architecture, decoder.max_model_len
    group = a.num_heads // a.num_kv_heads
    most = min(max_num_batched_tokens, longest)
    if not gathers(a.head_dim, group, most, decoder.dtype):
        return None
    return KeyRoom.allocate(
        capacity=max(longest, min(2 * longest, _GATHERED_KEYS)) + _GATHERED_REQUESTS * KEY_GRAIN,
        num_kv_heads=a.num_kv_heads,
        head_dim=a.head_dim,
        dtype=decoder.dtype,
        device=device,
    )
