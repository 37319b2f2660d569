"""A step runner without a model that still finds every wrong KV.

Its "KV" of a token is a number that depends on all tokens before it, kept in pages and read back
through the block table. The next token is a function of that number, so one wrong, stale or
painted slot anywhere in a request's past changes its answer: the token `WRONG` comes out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch

from interlace.engine.block_pool import KVCacheBlock
from interlace.engine.kv_connector import KVConnectorHandshakeMetadata
from interlace.engine.outputs import ModelRunnerOutput
from interlace.engine.ports import Clock, PendingStep, WorkerConnector
from interlace.engine.scheduler import Scheduler
from interlace.engine.scheduler_output import SchedulerOutput
from interlace.engine.step_timings import RecordingFacts, Timings
from interlace.engine.transfer_picture import ConnectorPicture
from interlace.layers.attention import SequenceChunk
from interlace.layers.forward_context import TritonAttentionMetadata
from interlace.layers.kv_hooks import KVHooks
from interlace.layers.runner_state import RunnerRequest, RunnerState

PAINT = -1
VOCAB_SIZE = 50
WRONG = VOCAB_SIZE
"""The token sampled from wrong KV: no right answer has it."""
LAYER = "layer"
"""The oracle's one layer, for connectors."""


def mix(before: int, token_id: int) -> int:
    """The KV of a token, from the KV of the token before it."""
    digest = hashlib.blake2b(f"{before},{token_id}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def answer(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The tokens that a right engine gives after `prompt`."""
    state = 0
    for token_id in prompt:
        state = mix(state, token_id)
    tokens = []
    for _ in range(num_tokens):
        tokens.append(state % VOCAB_SIZE)
        state = mix(state, tokens[-1])
    return tokens


class PagedOracleRunner:
    """The oracle as a `StepRunner`; with a `connector`, its hooks run as in the real runner."""

    def __init__(
        self, num_blocks: int, block_size: int, connector: WorkerConnector | None = None
    ) -> None:
        """`num_blocks` counts the null block."""
        self.block_size = block_size
        self.pages = torch.full((num_blocks, block_size), PAINT)
        """[block, offset] -> KV, int64: what a connector sees as the one layer's pages."""
        self.state = RunnerState()
        self.closed = False
        self.last_fault = ""
        """The last wrong KV that was read; right as long as nothing sampled from it gets out."""
        self.hooks = None if connector is None else KVHooks(connector, {LAYER: self.pages})

    def get_handshake_metadata(self) -> dict[int, KVConnectorHandshakeMetadata]:
        metadata = None if self.hooks is None else self.hooks.get_handshake_metadata()
        return {} if metadata is None else {0: metadata}

    def set_finished_count(self, count: int | None) -> None:
        assert count in (None, 1), "there is one worker"

    def begin_recording(self, clock: Clock) -> RecordingFacts:
        return RecordingFacts()

    def end_recording(self) -> Timings:
        return Timings()

    def get_transfer_pictures(self) -> tuple[ConnectorPicture, ...]:
        return () if self.hooks is None else self.hooks.get_transfer_pictures()

    def paint(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Overwrite whole blocks with what no right answer contains."""
        for block in blocks:
            self.pages[block.block_id] = PAINT

    works_ahead = False

    def advance_transfers(self) -> bool:
        return False

    def launch(self, scheduler_output: SchedulerOutput) -> PendingStep:
        output = self.execute(scheduler_output)
        return lambda: output

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        hooks = self.hooks
        if hooks is not None:
            hooks.handle_preemptions(scheduler_output)
        requests = self.state.update(scheduler_output)
        for source, target in scheduler_output.block_copies:
            self.pages[target] = self.pages[source]
        if not requests:
            reports = None if hooks is None else hooks.no_forward(scheduler_output)
            return ModelRunnerOutput(kv_connector_output=reports)
        self._paint_begun_blocks(scheduler_output, requests)
        if hooks is None:
            return ModelRunnerOutput(self._sample(scheduler_output, requests))
        hooks.pre_forward(scheduler_output, lambda: self._metadata(scheduler_output, requests))
        nothing = torch.empty(0)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self._forward(scheduler_output, requests)
            return nothing

        hooked = hooks.maybe_transfer_kv_layer(attend, scheduler_output)
        hooked(0, nothing, nothing, nothing)
        hooks.post_forward()
        sampled = self._sample(scheduler_output, requests)
        return ModelRunnerOutput(sampled, kv_connector_output=hooks.collect(scheduler_output))

    def _metadata(
        self, output: SchedulerOutput, requests: Sequence[RunnerRequest]
    ) -> TritonAttentionMetadata:
        chunks = [
            SequenceChunk(r.block_ids, r.num_computed_tokens, r.num_computed_tokens + n)
            for r, n in zip(requests, output.num_scheduled_tokens.values(), strict=True)
        ]
        return TritonAttentionMetadata.of(chunks, torch.empty(0), self.block_size)

    def close(self) -> None:
        self.closed = True
        if self.hooks is not None:
            self.hooks.shutdown()

    def _forward(self, output: SchedulerOutput, requests: Sequence[RunnerRequest]) -> None:
        """Write the KV of all new tokens, in batch order: whoever shares a block comes later."""
        for request in requests:
            num_tokens = output.num_scheduled_tokens[request.req_id]
            assert num_tokens >= 1, "a step computes at least one token of a request"
            self._write(request, num_tokens)

    def _paint_begun_blocks(
        self, output: SchedulerOutput, requests: Sequence[RunnerRequest]
    ) -> None:
        """What the real runner zeroes: blocks that the step begins and does not fill."""
        for request in requests:
            start = request.num_computed_tokens
            end = start + output.num_scheduled_tokens[request.req_id]
            block, offset = divmod(end, self.block_size)
            if offset and start <= end - offset:
                self.pages[request.block_ids[block]] = PAINT

    def _sample(
        self, output: SchedulerOutput, requests: Sequence[RunnerRequest]
    ) -> dict[str, tuple[int, ...]]:
        if self.hooks is None:
            self._forward(output, requests)
        sampled: dict[str, tuple[int, ...]] = {}
        for request in requests:
            end = request.num_computed_tokens + output.num_scheduled_tokens[request.req_id]
            value = self._read(request, end)
            if request.req_id in output.sampling_req_ids:
                token_id = WRONG if value is None else value % VOCAB_SIZE
                request.tokens.append(token_id)
                sampled[request.req_id] = (token_id,)
        return sampled

    def _slots(self, request: RunnerRequest, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        position = torch.arange(end)
        blocks = torch.tensor(request.block_ids)[position // self.block_size]
        return blocks, position % self.block_size

    def _write(self, request: RunnerRequest, num_tokens: int) -> None:
        """Garbage in, garbage out: on wrong KV nothing right can be computed."""
        start = request.num_computed_tokens
        value = self._read(request, start)
        for position in range(start, start + num_tokens):
            if value is not None:
                value = mix(value, int(request.tokens.view(position, position + 1)[0]))
            block, offset = divmod(position, self.block_size)
            self.pages[request.block_ids[block], offset] = PAINT if value is None else value

    def _read(self, request: RunnerRequest, end: int) -> int | None:
        """The KV of the token before `end`, if everything up to it is right; else None."""
        value = 0
        found = self.pages[self._slots(request, end)].tolist()
        for position, token_id in enumerate(request.tokens.view(0, end).tolist()):
            value = mix(value, token_id)
            if found[position] != value:
                block = request.block_ids[position // self.block_size]
                kind = "painted" if found[position] == PAINT else "foreign or stale"
                self.last_fault = (
                    f"{request.req_id}: {kind} KV at position {position}, block {block}"
                )
                return None
        return value


def paint_when_reused(scheduler: Scheduler, runner: PagedOracleRunner) -> None:
    """Paint every block at the moment in which it loses its content for a new owner.

    That is while older steps may still be in flight: if one of them writes to the block late,
    the new owner reads it, and the oracle sees it.
    """
    pool = scheduler.kv_cache.pool
    get_new_blocks = pool.get_new_blocks

    def painting(num_blocks: int) -> list[KVCacheBlock]:
        blocks = get_new_blocks(num_blocks)
        runner.paint(blocks)
        return blocks

    pool.get_new_blocks = painting  # type: ignore[method-assign]


def paint_after_fences(runner: PagedOracleRunner) -> None:
    """Let blocks be painted when the step that hands them on has been told to
    `handle_preemptions`: until then a copy beside the steps may read them."""
    to_paint: list[KVCacheBlock] = []
    hooks = runner.hooks
    assert hooks is not None, "there is a connector"
    paint, fence = runner.paint, hooks.handle_preemptions

    def fence_and_paint(output: SchedulerOutput) -> None:
        fence(output)
        paint(to_paint)
        to_paint.clear()

    vars(runner)["paint"] = to_paint.extend
    vars(hooks)["handle_preemptions"] = fence_and_paint
